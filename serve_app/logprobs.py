"""Logprobs in OpenAI's two forms: a chat's and a completion's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.messages import Scored, TokenLogprob

LEAST = -9999.0  # what OpenAI says of a token that is all but impossible; JSON has no -inf


def of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat; None without tokens."""
    if not tokens:
        return None
    content = [_entry(token.chosen) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def of_completion(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a completion; None without tokens.

    As in OpenAI's, the token itself is among its likeliest, so that there may be one more than asked for.
    """
    if not tokens:
        return None
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [_logprob(token.chosen) for token in tokens],
        "top_logprobs": [_by_text((*token.top, token.chosen)) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _entry(scored: Scored) -> dict[str, Any]:
    raw = None if scored.raw is None else list(scored.raw)
    return {"token": scored.text, "logprob": _logprob(scored), "bytes": raw}


def _by_text(likely: Sequence[Scored]) -> dict[str, float]:
    found: dict[str, float] = {}
    for scored in likely:  # of two tokens written alike, the likelier
        found.setdefault(scored.text, _logprob(scored))
    return found


def _logprob(scored: Scored) -> float:
    return max(scored.logprob, LEAST)
