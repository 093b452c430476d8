"""The results directory: what is written while an evaluation goes on, and how it is read back.

Everything else is made of `samples/`: dataset.jsonl, trajectories, agent states, samples.parquet and the summary. While
an evaluation goes on, a sample costs its own file and a line of the dataset: the model may need the same cores.
"""

import json
import os
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from evals.activations_meta import is_lost
from evals.config import Config, EvalError
from evals.results.provenance import Facts, differences
from evals.scoring import RULES
from evals.task.records import agent_state, dataset_row, trajectory
from evals.task.trajectory import UNSCORED, Sample

FOLDER = "activations"  # below it one for each session
TRANSFER_FILE = "transferred.json"  # in it, once all of the session is there: what `transfer` returns
SAMPLES, TRAJECTORIES, STATES = "samples", "trajectories", "agent_states"
ROWS = 1000  # of samples.parquet, written at once
TEXTS, TIME = pa.list_(pa.string()), pa.timestamp("us", tz="UTC")
COLUMNS = {
    "id": pa.string(),
    "mode": pa.string(),
    "variant": pa.string(),
    "epoch": pa.int32(),
    "question": pa.string(),
    "gold": pa.string(),
    "completion": pa.string(),
    "reasoning": pa.string(),
    **{rule: pa.string() for rule in RULES},
    "correct": pa.bool_(),
    **{f"correct_{rule}": pa.bool_() for rule in RULES},
    "outcome": pa.string(),
    "finish_reason": pa.string(),
    "turn_limit": pa.bool_(),
    "error": pa.string(),
    "turns": pa.int32(),
    "tool_calls": pa.int32(),
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "reasoning_tokens": pa.int64(),
    "latency_s": pa.float64(),
    "started": TIME,
    "ended": TIME,
    "reward": pa.float64(),
    "session_id": pa.string(),
    "run_ids": TEXTS,
    "activation_uris": TEXTS,
}


class Results(AbstractContextManager["Results"]):
    """The directory of one run. A context: it holds dataset.jsonl open.

    Attributes:
        again: keys of samples that are here and are to be asked again.
    """

    def __init__(self, directory: Path, again: Set[str] = frozenset()) -> None:
        """Opens dataset.jsonl of a directory that `create` or `resume` has prepared."""
        self.directory = directory
        self.again = again
        self._lines = (directory / "dataset.jsonl").open("a", encoding="utf-8")

    @classmethod
    def create(cls, directory: Path, facts: Facts) -> Self:
        """A new directory with its config.json.

        Raises:
            EvalError: it cannot be made, or holds a run already.
        """
        check_new(directory)
        try:
            for name in (SAMPLES, TRAJECTORIES, STATES):
                (directory / name).mkdir(parents=True, exist_ok=False)
        except OSError as error:
            raise EvalError(f"--results-dir {directory}: not usable: {error}") from error
        write_json(directory / "config.json", facts)
        return cls(directory)

    @classmethod
    def resume(cls, directory: Path, facts: Facts, score: Callable[[Sample], Sample] = lambda sample: sample) -> Self:
        """An earlier evaluation's directory; what failed, also in being stored, is asked again.

        Args:
            directory: the evaluation's.
            facts: of the evaluation as it is to go on.
            score: scores and rewards an answered sample as the evaluation goes on.

        Raises:
            EvalError: it asked otherwise; the text names what differs.
        """
        earlier = read_json(directory / "config.json")
        if differing := differences(earlier, facts):
            raise EvalError(f"--resume: {directory} was made with different {', '.join(differing)}")
        again = set()
        for sample in read_samples(directory):
            if sample.outcome == "failed" or any(is_lost(turn.activations) for turn in sample.turns):
                again.add(sample.key)
            if score(sample) != sample:  # interrupted here, it has no score, and none that is of others' kind
                _write(directory, sample.model_copy(update=UNSCORED))
        write_json(directory / "config.json", earlier | {name: facts[name] for name in ("config", "dataset")})
        for sample in read_samples(directory):
            if sample.reward is None and sample.outcome != "failed":
                _write(directory, score(sample))
        write_dataset(directory, again)  # a killed evaluation may have left half a line
        return cls(directory, again)

    def __exit__(self, *_: object) -> None:
        """Closes dataset.jsonl."""
        self._lines.close()

    def has(self, key: str) -> bool:
        """Whether the sample is here, and not to be asked again."""
        return key not in self.again and _path(self.directory, key).exists()

    def add(self, sample: Sample) -> None:
        """Writes the sample's file and its line, at once. An answer that is here stays if there is no other now."""
        (self.directory / FOLDER / TRANSFER_FILE).unlink(missing_ok=True)  # there is more now
        if sample.outcome == "failed" and sample.key in self.again:
            earlier = _read(_path(self.directory, sample.key))
            sample = sample if earlier.outcome == "failed" else earlier
        _write(self.directory, sample)
        self._lines.write(_line(dataset_row(sample)))
        self._lines.flush()


def check_new(directory: Path) -> None:
    """Returns if a directory holds no evaluation yet.

    Raises:
        EvalError: it does.
    """
    if any((directory / name).exists() for name in (SAMPLES, "config.json")):
        raise EvalError(f"--results-dir {directory} already holds an evaluation; use --resume to continue it")


def read_samples(directory: Path, mode: str = "*") -> Iterator[Sample]:
    """The samples of a run, or of one mode, in the order of their names, one at a time.

    Raises:
        EvalError: A file is broken.
    """
    names = [entry.name for entry in os.scandir(directory / SAMPLES) if fnmatch(entry.name, f"*.{mode}.*.json")]
    for name in sorted(names):
        yield _read(directory / SAMPLES / name)


def write_dataset(directory: Path, without: Set[str] = frozenset()) -> None:
    """Writes dataset.jsonl anew, of all samples that are there, in the order of their names, but for some keys."""
    part = directory / "dataset.part"
    with part.open("w", encoding="utf-8") as lines:
        rows = (dataset_row(sample) for sample in read_samples(directory) if sample.key not in without)
        lines.writelines(map(_line, rows))
    part.replace(directory / "dataset.jsonl")


def write_views(directory: Path) -> None:
    """Writes the trajectory and the agent's state of all samples that are there."""
    for sample in read_samples(directory):
        steps = "".join(map(_line, trajectory(sample)))
        write_whole(directory / TRAJECTORIES / f"{sample.key}.jsonl", steps)
        write_json(directory / STATES / f"{sample.key}.json", agent_state(sample))


def write_table(directory: Path, rewards: list[str]) -> None:
    """Writes samples.parquet, a row a sample, of all samples that are there, whole or not at all.

    Args:
        directory: the results.
        rewards: their names; each is a column `reward_<name>`.
    """
    schema = pa.schema({**COLUMNS, **{f"reward_{name}": pa.float64() for name in rewards}})
    part = directory / "samples.part"
    samples = read_samples(directory)
    with pq.ParquetWriter(part, schema) as writer:
        while rows := [_row(sample) for sample in islice(samples, ROWS)]:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    part.replace(directory / "samples.parquet")


def read_config(directory: Path) -> Config:
    """The options of the evaluation in a results directory.

    Raises:
        EvalError: there is none, or one of an earlier version.
    """
    try:
        return Config.model_validate(read_json(directory / "config.json")["config"])
    except (LookupError, TypeError, ValidationError) as error:
        raise EvalError(f"{directory / 'config.json'} has no options of this version: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        EvalError: there is none.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvalError(f"{path} cannot be read: {error}") from error
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON object, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all: a reader, or a run that is killed, never leaves half a file."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _read(path: Path) -> Sample:
    try:
        return Sample.model_validate_json(path.read_bytes())
    except OSError as error:
        raise EvalError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise EvalError(
            f"{path} cannot be read: {reason}; delete it, and --resume asks for the sample again"
        ) from error


def _row(sample: Sample) -> dict[str, Any]:
    row = dataset_row(sample)
    micros = {name: round(row[name] * 1e6) for name in ("started", "ended")}
    rewards = {f"reward_{name}": value for name, value in sample.rewards.items()}
    thought = {"reasoning": sample.reasoning, "reasoning_tokens": sum(turn.reasoning_tokens for turn in sample.turns)}
    return {**row, **row["usage"], **micros, **rewards, **thought}


def _write(directory: Path, sample: Sample) -> None:
    write_whole(_path(directory, sample.key), sample.model_dump_json(indent=2))


def _path(directory: Path, key: str) -> Path:
    return directory / SAMPLES / f"{key}.json"


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
