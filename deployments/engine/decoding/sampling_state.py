"""One sequence's state for drawing its next token; `sampling.py` draws for all sequences at once."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from deployments.engine.request import Request

NEG_INF = float("-inf")


class TokenValues(NamedTuple):
    """A value for each of some token ids of one sequence, on the CPU."""

    ids: array[int]
    values: array[float]

    @classmethod
    def of(cls, numbers: dict[int, float]) -> TokenValues:
        """Make it from token id -> value."""
        return cls(array("q", numbers), array("f", numbers.values()))


class TokenCounts:
    """Which tokens a sequence contains, and how often its answer contains each."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self.entries = TokenValues.of(dict.fromkeys(prompt, 0.0))
        self._at = {token: i for i, token in enumerate(self.entries.ids)}

    def add(self, token: int) -> None:
        """Count one token of the answer."""
        at = self._at.setdefault(token, len(self._at))
        if at == len(self.entries.ids):
            self.entries.ids.append(token)
            self.entries.values.append(0.0)
        self.entries.values[at] += 1


class SamplingState:
    """A sequence's settings, random numbers and token counts.

    It is kept when its sequence is preempted; tokens that run again are already counted.

    Attributes:
        sampling: The settings.
        logprobs: The number of top tokens to report with each token; None for no logprobs.
        ends: Token ids that end the text.
        draws: Whether tokens are drawn; settings that keep only the likeliest token are greedy.
        limits: Temperature, min_p, the most tokens (top_k) and their share (top_p) of the draw; infinite for any share.
        cut: Whether top_k or top_p drops tokens.
        bias: Values added to logits.
        grammar_state: The state in its grammar; None for any text.
    """

    def __init__(self, request: Request, eos: frozenset[int], vocabulary: int) -> None:
        """Begin a sequence; `vocabulary` is the number of logits: an embedding may have more ids, never drawn."""
        sampling = request.sampling
        self.sampling = sampling
        self.logprobs = request.logprobs
        self.ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else eos)
        self.draws = sampling.temperature > 0 and sampling.top_k != 1 and sampling.top_p > 0 and sampling.min_p < 1
        share = sampling.top_p if sampling.top_p < 1 else float("inf")
        self.limits = max(sampling.temperature, 1e-5), sampling.min_p, sampling.top_k or vocabulary, share
        self.cut = 0 < sampling.top_k < vocabulary or sampling.top_p < 1
        self.bias = TokenValues.of({token: value for token, value in sampling.logit_bias.items() if token < vocabulary})
        self.grammar_state = request.grammar.begin() if request.grammar else None
        self._barred = TokenValues.of({token: NEG_INF for token in self.ends if token < vocabulary})
        self._barred_until = sampling.min_tokens if self._barred.ids else 0
        seed: int | str | None = sampling.seed
        if isinstance(seed, int) and seed < 0:
            seed = str(seed)  # `Random` ignores a number's sign; other seeds keep the draws of earlier versions
        self._random = random.Random(seed)
        self._numbers: list[float] = []  # of the next tokens
        self._generated = 0
        self._counts: TokenCounts | None = None
        if sampling.repetition_penalty != 1:
            self._counts = TokenCounts(token for token in request.prompt if token < vocabulary)
        elif sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = TokenCounts()
        adjusted = bool(self.bias.ids) or self._counts is not None or self.grammar_state is not None
        self._always_special = self.draws or adjusted

    @property
    def needs_last(self) -> bool:
        """Whether choosing a token needs the one before it on the host: for a penalty or a grammar."""
        return self._counts is not None or self.grammar_state is not None

    def special(self, ahead: int = 0) -> bool:
        """Whether its next token, or the one `ahead` after it, needs more than a maximum of the logits."""
        return self._always_special or self._generated + ahead < self._barred_until

    @property
    def counts(self) -> TokenValues | None:
        """How often the answer contains each token that a penalty applies to; None without a penalty."""
        return self._counts.entries if self._counts else None

    def barred(self, ahead: int = 0) -> TokenValues | None:
        """-inf for each token that is not allowed yet; None if all are allowed, or if a grammar allows no other."""
        if self._generated + ahead >= self._barred_until:
            return None
        if self.grammar_state and not self.grammar_state.allows_beside(self._barred.ids):
            return None
        return self._barred

    def number(self, ahead: int = 0) -> float:
        """The random number from [0, 1) for its next token, or the one `ahead` after it; the same until it is added."""
        while len(self._numbers) <= ahead:
            self._numbers.append(self._random.random())
        return self._numbers[ahead]

    def add(self, token: int) -> None:
        """Add the sequence's next token."""
        self._generated += 1
        del self._numbers[:1]
        if self._counts:
            self._counts.add(token)
        if self.grammar_state and token not in self.ends:
            self.grammar_state.add(token)
