"""Tokenizing text, and detokenizing tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

import serve_app.openapi_examples as examples
from serve_app.http.bodies import JsonRoute
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend
from serve_app.schemas.tokens import DetokenizeRequest, TokenizeRequest

tokens = APIRouter(tags=["Tokens"], responses=errors(404, 429, 503, 504), route_class=JsonRoute)


@tokens.post("/tokenize", responses=examples.TOKENS)
async def tokenize(body: TokenizeRequest, backend: AppBackend) -> dict[str, Any]:
    """Return the tokens of a prompt, or of a chat as the model's template writes it."""
    model = await backend.models.find(body.model)
    return await model.tokenize(body.text)


@tokens.post("/detokenize", responses=examples.TEXT)
async def detokenize(body: DetokenizeRequest, backend: AppBackend) -> dict[str, Any]:
    """Return the text of tokens, and with `return_token_strs` the text of each."""
    model = await backend.models.find(body.model)
    return await model.detokenize(body.tokens, bool(body.return_token_strs))
