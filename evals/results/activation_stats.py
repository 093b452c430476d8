"""Statistics of a run's recorded activations by point, and so by layer: norms, spread, correct answers and others."""

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
from evals.task.problems import rank

if TYPE_CHECKING:
    import torch

NAME = "activation_stats.json"
MOST_RUNS = 300
BATCH_BYTES = 32 << 20  # of rows in memory at once, in the dtype that was stored
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)")
GROUPS = ("all", "correct", "other")
COMPARED = {"turns": "last", "tokens": "those that the answer was drawn at"}


class _Recorded(NamedTuple):
    """A run that a sample names."""

    run_id: str
    session_id: str
    correct: bool | None  # None of a sample that failed
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
        most_runs: of more, a sample is read. As many are read of those in which right answers and others are compared.
        seed: which.

    Returns:
        The file; None where no activations were recorded. Where they cannot be read, it says `why_not`; `lacking` is
        how many of the runs that samples name, `of_runs`, are not among the files.
    """
    first = next(_recorded(directory), None)
    if first is None:
        return None
    found: dict[str, Any] = {"points": {}, "of_runs": 0, "lacking": 0, "runs": 0, "sampled": False, "seed": seed}
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
                        yield _Recorded(run_id, row["session_id"], row["correct"], uris, *of, last)


def _statistics(directory: Path, source: Path, most: int, seed: int) -> dict[str, Any]:
    """Reads a sample of the runs, batch by batch."""
    from deployments.activations import runs

    there = {run.run_id for run in runs(source)}

    def found() -> Iterator[_Recorded]:
        return (run for run in _recorded(directory) if run.run_id in there)

    def compared(runs: Iterator[_Recorded]) -> Iterator[_Recorded]:
        its = (run for run in runs if (run.mode, run.variant) == (mode, variant))
        return (run for run in its if run.is_last and run.correct is not None)

    def drawn(runs: Iterator[_Recorded]) -> dict[str, _Recorded]:
        return {run.run_id: run for run in heapq.nsmallest(most, runs, key=lambda run: rank(run.run_id, seed))}

    if not (chosen := drawn(found())):
        raise ValueError(f"{source} has none of the samples' runs")
    # Without tools, where there is that. A steered condition's name begins with that of its variant: it is not least.
    mode, _, variant = min((run.mode, run.variant != CONTROL, run.variant) for run in found())
    last = drawn(compared(found()))
    named, readable, of_compared = (
        sum(1 for _ in runs) for runs in (_recorded(directory), found(), compared(_recorded(directory)))
    )
    sums = _sums(source, chosen, last)
    return {
        "points": {name: _point(name, of) for name, of in sums.items()},
        "of_runs": named,
        "lacking": named - readable,
        "runs": len(chosen),
        "sampled": len(chosen) < readable,
        "by_outcome": {"mode": mode, "variant": variant, "of_runs": of_compared, "runs": len(last)} | COMPARED,
    }


def _sums(
    source: Path, chosen: dict[str, _Recorded], last: dict[str, _Recorded]
) -> dict[str, dict[str, tuple[set[int], _Sums]]]:
    """By point and group, which runs there are and their sums: `all` of the chosen ones.

    Right answers are compared with others in the `last` turns of one condition, from the prompt's last token on: of
    other turns and conditions, and of prompts, there would be more in one group than in the other, which alone would
    tell them apart.
    """
    import torch

    from deployments.activations import load
    from deployments.activations.reader.training import ActivationRows

    of = chosen | last
    first = load(source, next(iter(chosen)))
    names = [name for name in first if isinstance(first[name], torch.Tensor)]  # attention patterns are none
    if not names:
        raise ValueError("only attention patterns were recorded, which have no norm")
    row_bytes = sum(first[name][0].nbytes for name in names)
    sums = {name: {group: (set[int](), _Sums()) for group in GROUPS} for name in names}
    batch_size = max(1, BATCH_BYTES // row_bytes)
    rows = ActivationRows(source, names, batch_size=batch_size, runs=set(of), shuffle=False)
    right = torch.tensor([of[run.run_id].correct is True for run in rows.runs])
    counted, compared = (torch.tensor([run.run_id in some for run in rows.runs]) for some in (chosen, last))
    begins = torch.tensor([run.prompt_tokens - 1 for run in rows.runs])
    for batch in rows:
        drawn = compared[batch.run] & (batch.position >= begins[batch.run])
        is_right = right[batch.run]
        for group, its in zip(GROUPS, (counted[batch.run], drawn & is_right, drawn & ~is_right), strict=True):
            for name in names:
                ids, sum_of = sums[name][group]
                ids.update(batch.run[its].tolist())
                sum_of.add(_floats(batch.points[name][its].flatten(1)))
    return sums


def _floats(rows: "torch.Tensor") -> "torch.Tensor":
    return rows if rows.itemsize == 8 else rows.float()


def _point(name: str, of: dict[str, tuple[set[int], _Sums]]) -> dict[str, Any]:
    layer = LAYER.search(name)
    by_outcome = {group: {"runs": len(of[group][0]), **of[group][1].said()} for group in ("correct", "other")}
    return {
        "layer": int(layer[1]) if layer else None,
        "site": layer[2] if layer else name,
        "runs": len(of["all"][0]),
        **of["all"][1].said(),
        "by_outcome": by_outcome,
    }


def sites(points: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The points of layers by their site, each site's in the order of the layers; what is of no layer is left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in sorted((p for p in points.values() if p["layer"] is not None), key=lambda p: p["layer"]):
        found.setdefault(point["site"], []).append(point)
    return found
