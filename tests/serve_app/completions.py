"""Completions of the shared server, plain and steered."""

from __future__ import annotations

from typing import Any

import httpx

MODEL, POINT, WIDTH = "vitrine-demo", "layers.3.output", 192
PROMPT = "Tom has 3 boxes of 4 pens."
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
STEER = {"op": "add", "point": POINT, "vector": [1.0, -1.0] * (WIDTH // 2), "scale": 5}


def post(served, route: str = "completions", **fields: Any) -> httpx.Response:
    """The answer to `BODY` with other fields; for a chat, its prompt is the only message."""
    body = BODY | fields
    if route.startswith("chat"):
        body |= {"messages": [{"role": "user", "content": body.pop("prompt")}]}
    return httpx.post(f"{served.base_url}/{route}", json=body, timeout=60)


def text(served, **fields: Any) -> str:
    answer = post(served, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def refused(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    """An error's status, field and code."""
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["code"]
