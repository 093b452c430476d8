"""Logprobs of a prompt's tokens, computed while the prompt's chunks run."""

from __future__ import annotations

import numpy as np
import torch

from deployments.engine.decoding.logprobs import as_logprobs, score
from deployments.engine.decoding.sampling_state import NEG_INF
from deployments.engine.decoding.transfers import Download, to_device
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
        """Begin without scores; `vocabulary` is the number of logits of each token."""
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
        """Score the next tokens, a few rows at a time, and wait for all of them once.

        Args:
            logits: [tokens, vocabulary] of the positions before them, as `wanted`.
        """
        first, vocabulary = len(self.logprobs) + 1, logits.shape[-1]
        ids = np.array(self._prompt[first : first + len(logits)], np.int64)
        (tokens,) = to_device([ids.clip(max=vocabulary - 1)], logits.device)
        chunks = zip(torch.split(logits, CHUNK), torch.split(tokens, CHUNK), strict=True)
        parts = [
            {"highest": rows.amax(dim=-1).float()} | score(rows.float().log_softmax(dim=-1), some, self._likeliest)
            for rows, some in chunks
        ]
        found = Download({name: torch.cat([part[name] for part in parts]) for name in parts[0]}).read()
        self.finite &= bool(np.isfinite(found["highest"]).all())
        # An embedding may have more tokens than the head.
        found["own"][ids >= vocabulary] = NEG_INF
        return as_logprobs(found, [self._likeliest] * len(ids))

    def add(self, logprobs: list[Logprob]) -> None:
        """Append the result of `read` after the forward pass has succeeded."""
        self.logprobs += logprobs
