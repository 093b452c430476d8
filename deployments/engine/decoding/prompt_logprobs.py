"""Logprobs of a prompt's tokens, computed while the prompt's chunks run."""

from __future__ import annotations

import torch

from deployments.engine.decoding.sampling import score
from deployments.engine.decoding.sampling_state import NEG_INF
from deployments.engine.request import Logprob, Request

LOGITS_BYTES = 256 << 20  # of float32 logits that one forward pass with such prompts may have
CHUNK = 64  # rows of logits converted to logprobs at a time


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
        logprobs: list[Logprob] = []
        for rows, ids in zip(torch.split(logits, CHUNK), torch.split(tokens, CHUNK), strict=True):
            self.finite &= bool(rows.amax(dim=-1).isfinite().all())
            logprobs += score(rows, ids.clamp_max(rows.shape[-1] - 1), [self._likeliest] * len(ids))
        # An embedding may have more tokens than the head.
        known = (tokens < logits.shape[-1]).tolist()
        return [own if ok else own._replace(logprob=NEG_INF) for own, ok in zip(logprobs, known, strict=True)]

    def add(self, logprobs: list[Logprob]) -> None:
        """Append the result of `read` after the forward pass has succeeded."""
        self.logprobs += logprobs
