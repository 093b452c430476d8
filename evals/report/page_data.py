"""The samples of a results directory as compressed blocks that its page holds, a bounded part of it in memory."""

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from evals.results.results import TRAJECTORIES
from evals.scoring import RULES
from evals.task.trajectory import sample_key

ROWS = 2000  # samples of a block of the table
STEPS_BYTES = 128 << 10  # of trajectories, uncompressed, that are opened together
MAX_TRAJECTORY = 1 << 20  # bytes of a trajectory that is still in the page
QUESTION = 120  # characters of it that the table has
COLUMNS = ["id", "mode", "variant", "epoch", "outcome", "gold", *RULES, "reward", "turns", "tool_calls"]
COLUMNS += ["prompt_tokens", "completion_tokens", "latency_s", "question"]
DETAILS = ("question", "error", "finish_reason", "session_id", "run_ids")


class Block(NamedTuple):
    """JSON, gzipped, in base64. Of `table`, columns of samples; of `steps`, the trajectories of some by their keys."""

    kind: str
    number: int
    text: str


def blocks(directory: Path, embed_bytes: int) -> Iterator[Block]:
    """All samples, and the trajectories of the first ones, in the order of their problems' ids, as many as fit.

    In a table `block` is the number of the steps' block that has the sample's trajectory, or null.

    Args:
        directory: the results, with samples.parquet and trajectories.
        embed_bytes: about the most that trajectories take in the page.
    """
    number, left = 0, embed_bytes
    with pq.ParquetFile(directory / "samples.parquet") as file:
        rewards = [name for name in file.schema_arrow.names if name.startswith("reward_")]
        columns = [*dict.fromkeys([*COLUMNS, *DETAILS, *rewards])]
        for table, batch in enumerate(file.iter_batches(batch_size=ROWS, columns=columns)):
            rows = batch.to_pylist()
            held: dict[str, Any] = {}
            size = 0
            for place, row in enumerate(rows, 1):
                key = sample_key(row["id"], row["mode"], row["variant"], row["epoch"])
                text = _read(directory / TRAJECTORIES / f"{key}.jsonl") if left > 0 else None
                row["block"] = None if text is None else number
                if text is not None:
                    held[key] = _detail(row, text, rewards)
                    size += len(text)
                if held and (size >= STEPS_BYTES or place == len(rows)):
                    yield (block := _block("steps", number, held))
                    number, left, held, size = number + 1, left - len(block.text), {}, 0
            yield _block("table", table, _columns(rows))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= MAX_TRAJECTORY else None
    except FileNotFoundError:
        return None


def _detail(row: dict[str, Any], text: str, rewards: list[str]) -> dict[str, Any]:
    found = {name: row[name] for name in DETAILS}
    found["rewards"] = {name.removeprefix("reward_"): row[name] for name in rewards}
    found["steps"] = [json.loads(line) for line in text.rstrip("\n").split("\n")]  # no other line break
    return found


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    found = {name: [row[name] for row in rows] for name in (*COLUMNS, "block")}
    found["question"] = [question[:QUESTION] for question in found["question"]]
    found["latency_s"] = [round(seconds, 4) for seconds in found["latency_s"]]
    return found


def _block(kind: str, number: int, content: Any) -> Block:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Block(kind, number, base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode())
