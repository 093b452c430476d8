"""Statistics of a run's recorded activations by point, and so by layer: norms, spread, correct answers and others."""

import hashlib
import heapq
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet as pq

from evals.config import CONTROL
from evals.results.results import write_json
from evals.results.transfer import files_of

if TYPE_CHECKING:
    import torch

NAME = "activation_stats.json"
MOST_RUNS = 300
BATCH_BYTES = 32 << 20  # of rows in memory at once, in the dtype that was stored
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)")
GROUPS = ("correct", "other", "rest")  # rest: rows in which right answers and others are not compared


class _Recorded(NamedTuple):
    """A run that a sample names."""

    run_id: str
    session_id: str
    correct: bool
    uris: list[str]
    mode: str
    variant: str
    is_last: bool  # of its sample's turns


@dataclass
class _Sums:
    """What is added up of some rows, in float64."""

    tokens: int = 0
    values: int = 0
    norm: float = 0.0
    square: float = 0.0  # of the norms, and so of all values
    value: float = 0.0
    absmax: float = 0.0
    not_finite: int = 0  # rows, which count nowhere else

    def add(self, rows: "torch.Tensor") -> None:
        """Adds rows `[rows, features]`."""
        import torch

        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        if not bool(torch.isfinite(norms).all()):
            rows, norms, before = rows[torch.isfinite(norms)], norms[torch.isfinite(norms)], len(norms)
            self.not_finite += before - len(norms)
        if not rows.numel():
            return
        self.tokens += len(rows)
        self.values += rows.numel()
        self.norm += float(norms.sum())
        self.square += float(norms.square().sum())
        self.value += float(rows.sum(dtype=torch.float64))
        self.absmax = max(self.absmax, float(rows.abs().max()))

    def joined(self, other: "_Sums") -> "_Sums":
        """Both together."""
        names = ("tokens", "values", "norm", "square", "value", "not_finite")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return _Sums(absmax=max(self.absmax, other.absmax), **sums)

    def said(self) -> dict[str, Any]:
        """The statistics; None where there is no row."""
        if not self.tokens:
            none = dict.fromkeys(("mean_norm", "std_norm", "mean", "std", "absmax"))
            return {"tokens": 0, **none, "not_finite": self.not_finite}
        norm, mean = self.norm / self.tokens, self.value / self.values
        return {
            "tokens": self.tokens,
            "mean_norm": norm,
            "std_norm": math.sqrt(max(0.0, self.square / self.tokens - norm**2)),
            "mean": mean,
            "std": math.sqrt(max(0.0, self.square / self.values - mean**2)),
            "absmax": self.absmax,
            "not_finite": self.not_finite,
        }


def write_stats(directory: Path, *, most_runs: int = MOST_RUNS, seed: int = 0) -> Path | None:
    """Writes `activation_stats.json` of a results directory that has its `samples.parquet`.

    The files are those that were transferred, else the store's own where they can be read from here. Norms are those
    of a token's whole value, mean and std those of all its numbers.

    Args:
        directory: the results directory.
        most_runs: of more, a sample is read.
        seed: which.

    Returns:
        The file; None where no activations were recorded. Where they cannot be read, it says `why_not`.
    """
    first = next(_recorded(directory), None)
    if first is None:
        return None
    found: dict[str, Any] = {"points": {}, "of_runs": 0, "runs": 0, "sampled": False, "seed": seed}
    try:
        source = files_of(directory, first.session_id, first.uris[0])
        found |= _statistics(directory, source, most_runs, seed) | {"source": str(source), "why_not": None}
    except (OSError, ValueError) as error:
        found |= {"source": None, "why_not": str(error)}
    path = directory / NAME
    write_json(path, found)
    return path


def _recorded(directory: Path) -> Iterator[_Recorded]:
    columns = ["run_ids", "session_id", "correct", "activation_uris", "mode", "variant"]
    with pq.ParquetFile(directory / "samples.parquet") as file:
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in batch.to_pylist():
                if uris := row["activation_uris"]:
                    ids = row["run_ids"] or []
                    for run_id in ids:
                        last = run_id == ids[-1]
                        of = row["mode"], row["variant"]
                        yield _Recorded(run_id, row["session_id"], bool(row["correct"]), uris, *of, last)


def _statistics(directory: Path, source: Path, most: int, seed: int) -> dict[str, Any]:
    """Reads a sample of the runs, batch by batch."""
    from deployments.activations import runs

    there = {run.run_id for run in runs(source)}
    of_runs = sum(run.run_id in there for run in _recorded(directory))
    if not of_runs:
        raise ValueError(f"{source} has none of the samples' runs")
    chosen = heapq.nsmallest(
        most, (run for run in _recorded(directory) if run.run_id in there), key=lambda run: _rank(run.run_id, seed)
    )
    # Without tools, where there is that. A steered condition's name begins with that of its variant: it is not least.
    of = (run for run in _recorded(directory) if run.run_id in there)
    mode, _, variant = min((run.mode, run.variant != CONTROL, run.variant) for run in of)
    last = {run.run_id for run in chosen if run.is_last and (run.mode, run.variant) == (mode, variant)}
    sums = _sums(source, chosen, last)
    points = {name: _point(name, of) for name, of in sums.items()}
    compared = {"mode": mode, "variant": variant, "turns": "last", "tokens": "those that the answer was drawn at"}
    found = {"points": points, "of_runs": of_runs, "runs": len(chosen), "sampled": len(chosen) < of_runs}
    return found | {"by_outcome": compared}


def _sums(source: Path, chosen: list[_Recorded], last: set[str]) -> dict[str, dict[str, tuple[set[int], _Sums]]]:
    """By point and group, which runs there are and their sums.

    Right answers are compared with others in the `last` turns of one condition, from the prompt's last token on: of
    other turns and conditions, and of prompts, there would be more in one group than in the other, which alone would
    tell them apart.
    """
    import torch

    from deployments.activations import load
    from deployments.activations.reader.training import ActivationRows

    of = {run.run_id: run for run in chosen}
    first = load(source, chosen[0].run_id)
    names = [name for name in first if isinstance(first[name], torch.Tensor)]  # attention patterns are none
    if not names:
        raise ValueError("only attention patterns were recorded, which have no norm")
    row_bytes = sum(first[name][0].nbytes for name in names)
    sums = {name: {group: (set[int](), _Sums()) for group in GROUPS} for name in names}
    batch_size = max(1, BATCH_BYTES // row_bytes)
    rows = ActivationRows(source, names, batch_size=batch_size, runs=set(of), shuffle=False)
    right = torch.tensor([of[run.run_id].correct for run in rows.runs])
    compared = torch.tensor([run.run_id in last for run in rows.runs])
    begins = torch.tensor([run.prompt_tokens - 1 for run in rows.runs])
    for batch in rows:
        drawn = compared[batch.run] & (batch.position >= begins[batch.run])
        for group, its in zip(GROUPS, (drawn & right[batch.run], drawn & ~right[batch.run], ~drawn), strict=True):
            for name in names:
                ids, sum_of = sums[name][group]
                ids.update(batch.run[its].tolist())
                sum_of.add(_floats(batch.points[name][its].flatten(1)))
    return sums


def _floats(rows: "torch.Tensor") -> "torch.Tensor":
    return rows if rows.itemsize == 8 else rows.float()


def _point(name: str, of: dict[str, tuple[set[int], _Sums]]) -> dict[str, Any]:
    whole = of["correct"][1].joined(of["other"][1]).joined(of["rest"][1])
    layer = LAYER.search(name)
    by_outcome = {group: {"runs": len(of[group][0]), **of[group][1].said()} for group in ("correct", "other")}
    return {
        "layer": int(layer[1]) if layer else None,
        "site": layer[2] if layer else name,
        "runs": len(set().union(*(ids for ids, _ in of.values()))),
        **whole.said(),
        "by_outcome": by_outcome,
    }


def _rank(run_id: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{run_id}".encode()).hexdigest()


def sites(points: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The points of layers by their site, each site's in the order of the layers; what is of no layer is left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in sorted((p for p in points.values() if p["layer"] is not None), key=lambda p: p["layer"]):
        found.setdefault(point["site"], []).append(point)
    return found
