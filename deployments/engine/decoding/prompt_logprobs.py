"""Logprobs of a prompt's tokens, computed while the prompt's chunks run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from deployments.engine.decoding.sampling import score
from deployments.engine.decoding.sampling_state import NEG_INF
from deployments.engine.request import Logprob, Request

LOGITS_BYTES = 256 << 20  # of float32 logits that one forward pass with such prompts may have
CHUNK = 64  # rows of logits converted to logprobs at a time


class Span(Protocol):
    """Consecutive tokens of a sequence, and the first one's row in the forward pass."""

    @property
    def start(self) -> int:
        """The position of its first token in the sequence."""

    @property
    def count(self) -> int:
        """The number of its tokens."""

    @property
    def row(self) -> int:
        """The row of its first token in the forward pass."""


class PromptScores:
    """The logprobs of one prompt's tokens from the second on, as they are computed.

    It is kept when its sequence is preempted; tokens that run again are not scored again.

    Attributes:
        most_tokens: The most tokens of scored prompts in one forward pass.
        logprobs: One for each token from the second on.
        finite: Whether every distribution was finite.
    """

    def __init__(self, request: Request, vocabulary: int) -> None:
        """Initialize without scores.

        Args:
            request: The request, which sets the number of top tokens.
            vocabulary: The number of logits of each token.
        """
        assert request.prompt_logprobs is not None
        self._prompt = request.prompt
        self._likeliest = request.prompt_logprobs
        self.most_tokens = LOGITS_BYTES // (4 * vocabulary)
        self.logprobs: list[Logprob] = []
        self.finite = True

    def wanted(self, start: int, count: int) -> range:
        """Which of `count` tokens from position `start` on predict a token that has no score yet, counted from 0."""
        first = len(self.logprobs) - start  # position p predicts token p + 1
        assert first >= 0 or start >= len(self._prompt) - 1, "a chunk was run and not scored"
        return range(first, max(first, min(count, len(self._prompt) - 1 - start)))

    def read(self, logits: torch.Tensor) -> list[Logprob]:
        """Score the next tokens, a few rows at a time.

        Args:
            logits: [tokens, vocabulary] of the positions before them, as `wanted`.
        """
        first = len(self.logprobs) + 1
        tokens = torch.tensor(self._prompt[first : first + len(logits)], dtype=torch.long, device=logits.device)
        found: list[Logprob] = []
        for rows, ids in zip(torch.split(logits, CHUNK), torch.split(tokens, CHUNK), strict=True):
            self.finite &= bool(rows.amax(dim=-1).isfinite().all())
            found += score(rows, ids.clamp_max(rows.shape[-1] - 1), [self._likeliest] * len(ids))
        # An embedding may have more tokens than the head.
        known = (tokens < logits.shape[-1]).tolist()
        return [one if here else one._replace(logprob=NEG_INF) for one, here in zip(found, known, strict=True)]

    def add(self, logprobs: list[Logprob]) -> None:
        """Append the result of `read` after the forward pass has succeeded."""
        self.logprobs += logprobs


class ScoredSpan(NamedTuple):
    """The part of a forward pass that one prompt's scores need.

    Attributes:
        scores: The prompt's scores so far.
        rows: The rows of the forward pass whose logits are needed; at least one.
    """

    scores: PromptScores
    rows: range


def spans_of(scores: Sequence[PromptScores | None], chunks: Sequence[Span]) -> list[ScoredSpan]:
    """The spans that a forward pass has to score.

    Args:
        scores: The scores of each chunk's prompt; None if not requested.
        chunks: The chunks.
    """
    asked = []
    for one, chunk in zip(scores, chunks, strict=True):
        if one and (wanted := one.wanted(chunk.start, chunk.count)):
            asked.append(ScoredSpan(one, range(chunk.row + wanted.start, chunk.row + wanted.stop)))
    return asked


def read(asked: Sequence[ScoredSpan], logits: torch.Tensor) -> list[list[Logprob]]:
    """Score the requested tokens from their logits [tokens of all rows, vocabulary]."""
    if not asked:
        return []
    parts = torch.split(logits, [len(one.rows) for one in asked])
    return [one.scores.read(part) for one, part in zip(asked, parts, strict=True)]
