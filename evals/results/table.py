"""samples.parquet: one row a sample, written in batches."""

from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evals.results.results import read_samples
from evals.scoring import RULES
from evals.task.records import dataset_row
from evals.task.trajectory import Sample

BATCH = 1000  # rows
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


def write_table(directory: Path, rewards: list[str]) -> None:
    """Writes samples.parquet of all samples that are there, whole or not at all.

    Args:
        directory: the results.
        rewards: their names; each is a column `reward_<name>`.
    """
    schema = pa.schema({**COLUMNS, **{f"reward_{name}": pa.float64() for name in rewards}})
    part = directory / "samples.part"
    samples = read_samples(directory)
    with pq.ParquetWriter(part, schema) as writer:
        while rows := [_row(sample) for sample in islice(samples, BATCH)]:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    part.replace(directory / "samples.parquet")


def _row(sample: Sample) -> dict[str, Any]:
    row = dataset_row(sample)
    micros = {name: round(row[name] * 1e6) for name in ("started", "ended")}
    rewards = {f"reward_{name}": value for name, value in sample.rewards.items()}
    thought = {"reasoning": sample.reasoning, "reasoning_tokens": sum(turn.reasoning_tokens for turn in sample.turns)}
    return {**row, **row["usage"], **micros, **rewards, **thought}
