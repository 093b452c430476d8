"""Choices of tokens: which one token of a run, or which mean, makes a probe's example."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from deployments.activations.facts import RunInfo
from deployments.points.placement import Role, is_role
from deployments.points.token_choices import TokensError, parse
from evals.config import EvalError

_SPAN = re.compile(r"span:(-?\d*):(-?\d*)")


class TokenColumn(NamedTuple):
    """A choice of tokens: the last of some, `mean` of all, or the mean of a span or of what has a role."""

    name: str  # as it was written
    kind: str  # `prompt_last`, `generated_last`, `last`, `mean`, `span` (of a labels table), `positions` or `role`
    label: str = ""
    first: int | None = None
    end: int | None = None
    role: Role | None = None

    @classmethod
    def parse(cls, name: str) -> TokenColumn:
        """Read one choice.

        Raises:
            EvalError: It is none.
        """
        if name in ("prompt_last", "generated_last", "last", "mean"):
            return cls(name, name)
        if match := _SPAN.fullmatch(name):
            first, end = (int(part) if part.lstrip("-") else None for part in match.groups())
            return cls(name, "positions", first=first, end=end)
        if name.startswith("span:") and name != "span:":
            return cls(name, "span", name.removeprefix("span:"))
        with suppress(TokensError):
            if is_role(choice := parse(name)):
                return cls(name, "role", role=choice)
        raise EvalError(
            f"--tokens {name!r}: none of prompt_last, generated_last, last, mean, reasoning, answer, role:ROLE, "
            "role:ROLE:TURN, turn:TURN, span:NAME, span:FIRST:END"
        )

    def positions(self, run: RunInfo, spans: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
        """The tokens' positions in prompt + generated, `[first, end)`; None where the run has none of them.

        Raises:
            EvalError: It is `last`, which once was the prompt's, and the run generated tokens.
        """
        if self.kind == "last" and run.tokens > run.prompt_tokens:
            raise EvalError("--tokens last: the runs generated tokens: use prompt_last or generated_last")
        if self.kind in ("last", "prompt_last"):
            return run.prompt_tokens - 1, run.prompt_tokens
        if self.kind == "generated_last" and run.tokens > run.prompt_tokens:
            return run.tokens - 1, run.tokens
        if self.kind == "generated_last":
            return None
        if self.kind == "span":
            return spans.get(self.label)
        first, end, _ = slice(self.first, self.end).indices(run.tokens)
        return first, end
