"""The files of a sweep: probes.json and probes.parquet, scores.parquet, and the probe as safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from evals.probes.fitting.headline import Headline
from evals.probes.inputs.examples import Examples

_ROWS = pa.schema(
    {
        "point": pa.string(),
        "tokens": pa.string(),
        "method": pa.string(),
        **dict.fromkeys(("auroc", "auroc_low", "auroc_high"), pa.float64()),
        **dict.fromkeys(("control_auroc", "text_auroc"), pa.float64()),
        "n": pa.int64(),
        "groups": pa.int64(),
    }
)


def scores(examples: Examples, positive: np.ndarray, folds: np.ndarray, headline: Headline) -> pa.Table:
    """A row for each example, with its probability by the probe of its fold, which was not trained on it.

    Args:
        examples: The examples.
        positive: Each one's class, bool `[n]`.
        folds: Its fold, `[n]`.
        headline: The probes.
    """
    return pa.table(
        {
            "run_id": [run.run_id for run in examples.runs],
            "sample_id": pa.array([run.sample_id for run in examples.runs], pa.string()),
            "group": [run.group for run in examples.runs],
            "label": [run.label for run in examples.runs],
            "positive": positive,
            "fold": folds,
            "logit": headline.held_out.logits,
            "probability": headline.held_out.probabilities,
        }
    )


def tensors(headline: Headline) -> dict[str, torch.Tensor]:
    """The probe file's tensors: `weight [1, hidden]`, `bias [1]`, `mean`, `std [hidden]`, `slope`, `offset [1]`."""
    probe, calibration = headline.probe, headline.calibration
    found = {
        "weight": probe.weight[None],
        "bias": np.array([probe.bias]),
        "mean": probe.mean,
        "std": probe.std,
        "slope": np.array([calibration.slope]),
        "offset": np.array([calibration.offset]),
    }
    return {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in found.items()}


def metadata(name: str, document: dict[str, Any]) -> dict[str, str]:
    """The probe file's metadata.

    Args:
        name: The probe's name.
        document: As `probes.json` has it.
    """
    headline = document["headline"]
    description = (
        f"{document['label']} = {document['positive']} of session {document['session']}: AUROC {headline['auroc']:.3f} "
        f"in nested cross-validation, {headline['n']} examples in {headline['groups']} groups"
    )
    return {
        "name": name,
        "model": document["model"],
        "point": headline["point"],
        "kind": "linear",
        "activation": "sigmoid",
        "labels": json.dumps([document["positive"]]),
        "tokens": headline["tokens"],
        "method": headline["method"],
        "description": description,
    }


def write(
    out: Path, document: dict[str, Any], examples: pa.Table, probe: dict[str, torch.Tensor], about: dict[str, str]
) -> None:
    """Write all of them, each whole or not at all.

    Args:
        out: The directory.
        document: For `probes.json`.
        examples: For `scores.parquet`.
        probe: The probe's tensors.
        about: Its metadata.
    """
    names = "probes.json", "probes.parquet", "scores.parquet", f"{about['name']}.safetensors"
    parts = [out / f"{name}.part" for name in names]
    parts[0].write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(document["rows"], _ROWS), parts[1])
    pq.write_table(examples, parts[2])
    save_file(probe, parts[3], about)
    for part, name in zip(parts, names, strict=True):
        part.replace(out / name)
