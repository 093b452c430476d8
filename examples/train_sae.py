"""Train a small BatchTopK autoencoder on a stored session, in SAELens' format.

    python examples/train_sae.py --session gsm8k --point layers.12.output --out sae-12 --tokenizer smollm2
    python -m deployments.readouts add sae-12 --model smollm2

It prints how much of the rows it explains, how many features are never active, and how many a row has; and writes each
feature's top tokens to `features.json`. Bussmann et al. 2024 describe BatchTopK; it is saved as `jumprelu`, with the
mean of the batches' least kept values as threshold.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deployments.activations.reader.row_reader import RowBatch
from deployments.activations.reader.training import ActivationRows
from deployments.options import home

TOP_TOKENS = 10  # of a feature
MOMENTUM = 0.99  # of the threshold
OUTLIERS = 10  # times the median length, from which on a row does not count for the explained variance


class BatchTopK(torch.nn.Module):
    """An autoencoder whose batches keep `k` features a row on average."""

    def __init__(self, rows: torch.Tensor, features: int, k: int) -> None:
        """Begin with random directions.

        Args:
            rows: Some rows [rows, hidden]: their mean is the first `b_dec`.
            features: How many.
            k: Of a row, on average.
        """
        super().__init__()
        directions = torch.nn.functional.normalize(torch.randn(features, rows.shape[1]), dim=1)
        self.W_dec = torch.nn.Parameter(directions)
        self.W_enc = torch.nn.Parameter(directions.T.clone())
        self.b_enc = torch.nn.Parameter(torch.zeros(features))
        self.b_dec = torch.nn.Parameter(rows.mean(0))
        self.k = k
        self.threshold = torch.tensor(0.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The reconstruction of rows [rows, hidden]; the threshold follows."""
        found = ((rows - self.b_dec) @ self.W_enc + self.b_enc).relu()  # [rows, features]
        kept = found.flatten().topk(self.k * len(rows))
        least = kept.values.min().detach()
        self.threshold = least if not self.threshold else MOMENTUM * self.threshold + (1 - MOMENTUM) * least
        sparse = torch.zeros_like(found).flatten().scatter(0, kept.indices, kept.values).view_as(found)
        return sparse @ self.W_dec + self.b_dec

    @torch.no_grad()
    def features(self, rows: torch.Tensor) -> torch.Tensor:
        """The features [rows, features] of rows by the threshold."""
        found = (rows - self.b_dec) @ self.W_enc + self.b_enc
        return found * (found > self.threshold)

    @torch.no_grad()
    def normalize(self) -> None:
        """Keep each direction's length at 1."""
        self.W_dec /= self.W_dec.norm(dim=1, keepdim=True)


def train(rows: Iterable[RowBatch], point: str, features: int, k: int, epochs: int, rate: float) -> BatchTopK:
    """An autoencoder of a point's rows, scaled by their mean norm while it is trained."""
    first = next(iter(rows)).points[point].float()
    scale = first.norm(dim=1).mean() / first.shape[1] ** 0.5
    sae = BatchTopK(first / scale, features, k)
    optimizer = torch.optim.Adam(sae.parameters(), lr=rate)
    for _ in range(epochs):
        for batch in rows:
            scaled = batch.points[point].float() / scale
            loss = (sae(scaled) - scaled).square().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            sae.normalize()
    with torch.no_grad():  # for rows as they are
        sae.b_enc *= scale
        sae.b_dec *= scale
        sae.threshold = sae.threshold * scale
    return sae


@torch.no_grad()
def evaluate(sae: BatchTopK, rows: Iterable[RowBatch], point: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Explained variance, dead features, active features of a row; and each feature's top tokens, `[token, value]`.

    The explained variance leaves out the rows of massive activations, such as a text's first token has in many models:
    they would be nearly all of it (Sun et al. 2024).
    """
    error = squares = active = usual_count = torch.tensor(0.0)
    total, count = torch.zeros(sae.W_dec.shape[1]), 0
    fired = torch.zeros(len(sae.W_dec))
    best, tokens = torch.zeros(TOP_TOKENS, len(fired)), torch.full((TOP_TOKENS, len(fired)), -1)
    for batch in rows:
        own = batch.points[point].float()
        features = sae.features(own)
        lengths = own.norm(dim=1)
        kept = lengths < OUTLIERS * lengths.median()
        usual = own[kept]  # [usual rows, hidden]
        error = error + (usual - features[kept] @ sae.W_dec - sae.b_dec).square().sum()
        squares, total = squares + usual.square().sum(), total + usual.sum(0)
        usual_count = usual_count + len(usual)
        active, count = active + (features > 0).sum(), count + len(own)
        fired += (features > 0).sum(0)
        ids = batch.token_id.long()[:, None].expand(-1, len(fired))
        best, order = torch.cat([best, features]).topk(TOP_TOKENS, dim=0)
        tokens = torch.cat([tokens, ids]).gather(0, order)
    variance = squares - total.square().sum() / usual_count
    figures = {
        "explained_variance": 1 - float(error / variance),
        "dead_features": float((fired == 0).float().mean()),
        "l0": float(active) / count,
    }
    pairs = [zip(tokens[:, i].tolist(), best[:, i].tolist(), strict=True) for i in range(len(fired))]
    tops = [
        {"feature": i, "rows": int(fired[i]), "top": [[token, value] for token, value in pair if value > 0]}
        for i, pair in enumerate(pairs)
    ]
    return figures, tops


def save(sae: BatchTopK, point: str, model: str | None, out: Path) -> None:
    """Write SAELens' format."""
    out.mkdir(parents=True, exist_ok=True)
    features, hidden = sae.W_dec.shape
    tensors = {name: tensor.detach().contiguous() for name, tensor in sae.named_parameters()}
    save_file(tensors | {"threshold": sae.threshold.expand(features).clone()}, out / "sae_weights.safetensors")
    found = re.fullmatch(r"layers\.(\d+)\.(input|output)", point)
    hook = f"blocks.{found[1]}.hook_resid_{'pre' if found[2] == 'input' else 'post'}" if found else point
    config = {
        "architecture": "jumprelu",
        "d_in": hidden,
        "d_sae": features,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"hook_name": hook, "model_name": model},
    }
    (out / "cfg.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate and write one; gives the figures.

    Args:
        argv: The options; without it the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session", required=True, help="the stored session")
    parser.add_argument("--point", required=True, help="whose rows, layers.12.output")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    parser.add_argument(
        "--store", type=Path, default=home() / "activations", help="the store's directory (%(default)s)"
    )
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--k", type=int, default=32, help="features of a row, on average (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning (%(default)s)")
    parser.add_argument("--model", help="the served model's id")
    parser.add_argument("--tokenizer", type=Path, help="a model's directory, to write the top tokens as text")
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    rows = ActivationRows(given.store, [given.point], batch_size=given.batch_size, session=given.session)
    sae = train(rows, given.point, given.features, given.k, given.epochs, given.rate)
    figures, tops = evaluate(sae, rows, given.point)
    save(sae, given.point, given.model, given.out)
    if given.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
        for feature in tops:
            feature["top"] = [[tokenizer.decode([token]), value] for token, value in feature["top"]]
    (given.out / "features.json").write_text(json.dumps({"figures": figures, "features": tops}) + "\n")
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
