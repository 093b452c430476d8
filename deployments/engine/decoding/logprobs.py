"""Logprobs of tokens and of the likeliest ones: tensors on the device, and lists of them once they are on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deployments.engine.decoding.transfers import Array
from deployments.engine.request import MOST_LOGPROBS, Likeliest, Logprob


def score(logprobs: torch.Tensor, tokens: torch.Tensor, most: int) -> dict[str, torch.Tensor]:
    """The logprob of each row's token, and the top tokens of the same distribution.

    Args:
        logprobs: [rows, vocabulary] float32.
        tokens: [rows] token ids.
        most: The number of top tokens.

    Returns:
        own [rows] float32; unless `most` is 0, also those of `ranked`.
    """
    own = {"own": logprobs.gather(-1, tokens[:, None]).squeeze(-1)}
    return own | ranked(logprobs, most) if most else own


def ranked(logprobs: torch.Tensor, most: int) -> dict[str, torch.Tensor]:
    """The top tokens of each row; equal ones are ordered by id.

    Args:
        logprobs: [rows, vocabulary] float32.
        most: The number of top tokens.

    Returns:
        ids [rows, most] int64 and values [rows, most] float32; fewer columns if the vocabulary has no more.
    """
    # The same number for every row, so that the order of equal tokens does not depend on the neighbours.
    top = logprobs.topk(min(MOST_LOGPROBS, logprobs.shape[-1]), dim=-1)
    ids, order = top.indices.sort(dim=-1)
    values, order = top.values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return {"ids": ids.gather(-1, order)[:, :most], "values": values[:, :most]}


def as_likeliest(found: Mapping[str, Array], most: Sequence[int]) -> list[Likeliest]:
    """The top tokens of each row of `ranked` on the host, so many for each row."""
    rows = zip(found["ids"].tolist(), found["values"].tolist(), most, strict=True)
    return [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in rows]


def as_logprobs(found: Mapping[str, Array], most: Sequence[int]) -> list[Logprob]:
    """The logprob of each row of `score` on the host, with so many top tokens for each row."""
    own = found["own"].tolist()
    tops = as_likeliest(found, most) if "ids" in found else [()] * len(own)
    return [Logprob(logprob, top) for logprob, top in zip(own, tops, strict=True)]
