"""Logprobs in OpenAI's formats for chats and for completions, and the logit lens in a similar format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.messages import LayerTop, ScoredToken, TokenLayers, TokenLogprob, TokenText

LEAST = -9999.0  # OpenAI's value for a nearly impossible token; JSON has no -inf


def of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat; None without tokens."""
    if not tokens:
        return None
    content = [_entry(token.chosen) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def of_completion(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a completion; None without tokens.

    As in OpenAI's API, the token itself is among the top tokens, so there may be one more than requested. A prompt's
    first token has neither.
    """
    if not tokens:
        return None
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [_logprob(token.chosen) for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def of_lens(tokens: Sequence[TokenLayers], prompt: Sequence[TokenLayers] = ()) -> dict[str, Any]:
    """`choices[].logit_lens` of chats and completions."""
    found = {"content": list(map(_lens, tokens))}
    return found | {"prompt": list(map(_lens, prompt))} if prompt else found


def _lens(one: TokenLayers) -> dict[str, Any]:
    place = {} if one.position is None else {"position": one.position}
    return place | _token(one.token, one.spelled) | {"layers": list(map(_layer, one.layers))}


def _layer(one: LayerTop) -> dict[str, Any]:
    top = [_token(id, spelled) | {"logprob": max(value, LEAST)} for id, spelled, value in one.top]
    targets = [
        _token(id, spelled) | {"logprob": max(value, LEAST), "rank": rank} for id, spelled, value, rank in one.targets
    ]
    return {"layer": one.layer, "top": top} | ({"targets": targets} if targets else {})


def _token(id: int, spelled: TokenText) -> dict[str, Any]:
    return {"token": spelled.text, "token_id": id, "bytes": _bytes(spelled.raw)}


def _bytes(raw: bytes | None) -> list[int] | None:
    return None if raw is None else list(raw)


def _entry(scored: ScoredToken) -> dict[str, Any]:
    return {"token": scored.text, "logprob": _logprob(scored), "bytes": _bytes(scored.raw)}


def _by_text(token: TokenLogprob) -> dict[str, float] | None:
    found: dict[str, float] = {}
    for scored in (*token.top, token.chosen):  # of two tokens with the same text, the likelier
        if (logprob := _logprob(scored)) is not None:
            found.setdefault(scored.text, logprob)
    return found or None


def _logprob(scored: ScoredToken) -> float | None:
    return None if scored.logprob is None else max(scored.logprob, LEAST)
