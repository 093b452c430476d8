"""The results directory: what is written while a run goes on, and how it is read back.

`samples/` is the truth; dataset.jsonl, trajectories, agent states, the Parquet file and the summary are made of it.
While a run goes on, a sample costs its own file and a line of the dataset, no more: the model may need the same cores.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from evals.activations_meta import is_lost
from evals.config import EvalError
from evals.results.provenance import Facts, differences, resumed
from evals.task.records import agent_state, dataset_row, trajectory
from evals.task.trajectory import UNSCORED, Problem, Sample, failed

FOLDER = "activations"  # below it one for each session
TRANSFER_FILE = "transferred.json"  # in it, once all of the session is there: what `transfer` returns
SAMPLES, TRAJECTORIES, STATES = "samples", "trajectories", "agent_states"
logger = logging.getLogger(__name__)


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
    def resume(
        cls,
        directory: Path,
        facts: Facts,
        score: Callable[[Sample], Sample] = lambda sample: sample,
        ids: Sequence[str] = (),
    ) -> Self:
        """An earlier run's directory; what failed, also in being stored, or cannot be read is asked again.

        So is what was late, where the time limit is longer now.

        Args:
            directory: the run's.
            facts: of the run as it is to go on.
            score: scores and rewards an answered sample as the run goes on.
            ids: of the problems, in order.

        Raises:
            EvalError: the run asked otherwise; the text names what differs.
        """
        earlier = read_json(directory / "config.json")
        if differing := differences(earlier, facts, ids):
            raise EvalError(f"--resume: {directory} was made with different {', '.join(differing)}")
        _set_broken_aside(directory)
        if facts["config"]["timeout"] > earlier["config"]["timeout"]:
            _forget_late(directory)  # before config.json has the longer one: this call may be killed
        again = set()
        for sample in read_samples(directory):
            if sample.outcome == "failed" or any(is_lost(turn.activations) for turn in sample.turns):
                again.add(sample.key)
            if score(sample) != sample:  # interrupted here, it has no score, and none that is of others' kind
                _write(directory, sample.model_copy(update=UNSCORED))
        write_json(directory / "config.json", resumed(earlier, facts))
        for sample in read_samples(directory):
            if sample.reward is None and sample.outcome != "failed":
                _write(directory, score(sample))
        write_dataset(directory, again)  # a killed run may have left half a line
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

    def note_preset(self, default: Facts | None) -> None:
        """Writes into config.json the server's default preset after the answers, where it is another than before."""
        path = self.directory / "config.json"
        facts = read_json(path)
        if default is not None and default != facts.get("interventions"):  # None: the server does not say it
            write_json(path, facts | {"interventions_after": default})


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


def _set_broken_aside(directory: Path) -> None:
    """Renames files that hold no whole sample, as a power cut may leave them: these samples are asked again."""
    for path in (directory / SAMPLES).glob("*.json"):
        try:
            _read(path)
        except EvalError as error:
            if isinstance(error.__cause__, OSError):
                raise
            logger.warning("%s: its sample is asked again", path.replace(path.with_suffix(".broken")))


def _forget_late(directory: Path) -> None:
    """Makes late samples failed ones, which are asked again."""
    for sample in read_samples(directory):
        if sample.outcome == "timed_out":
            problem = Problem(sample.id, sample.question, sample.gold)
            _write(directory, failed(problem, sample.mode, sample.variant, str(sample.error), sample.epoch))


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


def scored_earlier(directory: Path) -> EvalError:
    """Why the scores of a directory are not used: they are not by today's rules."""
    return EvalError(
        f"{directory} was scored by an earlier version: where config.json has the same version of Vitrine, evals.gsm8k "
        "--resume scores its answers anew; otherwise run the evaluation again"
    )


def _read(path: Path) -> Sample:
    try:
        return Sample.model_validate_json(path.read_bytes())
    except OSError as error:
        raise EvalError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise EvalError(f"{path} cannot be read: {reason}; evals.gsm8k --resume asks such a sample again") from error


def _write(directory: Path, sample: Sample) -> None:
    write_whole(_path(directory, sample.key), sample.model_dump_json(indent=2))


def _path(directory: Path, key: str) -> Path:
    return directory / SAMPLES / f"{key}.json"


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
