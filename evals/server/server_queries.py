"""Single questions to a server before a run: its models, its health, and what it says of itself."""

import time
from collections.abc import Callable
from typing import Any

import httpx

from evals.server.answers import RequestFailed, error_of, is_absent, message_of
from evals.server.keys import headers


def first_model(base_url: str) -> str:
    """The id of the first model that the server lists.

    Raises:
        RequestFailed: no server, no list, or an empty one.
    """
    try:
        response = httpx.get(f"{base_url}/models", headers=headers(), timeout=30)
    except httpx.HTTPError as error:
        raise RequestFailed(f"no answer from {base_url}: {error}") from error
    if not response.is_success:
        hint = "; an OpenAI root ends in /v1" if not base_url.endswith("/v1") else ""
        raise RequestFailed(f"{base_url}/models: HTTP {response.status_code}: {message_of(response)}{hint}")
    try:
        models = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, TypeError, KeyError) as error:
        raise RequestFailed(f"{base_url}/models is not a list of models; is it an OpenAI server?") from error
    if not models:
        raise RequestFailed(f"{base_url} serves no model yet: wait, or load one")
    return models[0]


def is_closed(response: httpx.Response) -> bool:
    """Whether a server could not answer now, or only with a key."""
    return is_absent(response) or response.status_code in {401, 403}


def ask_json(
    url: str, params: dict[str, str] | None = None, fails: Callable[[httpx.Response], bool] = lambda _: False
) -> Any:
    """The JSON object of a server's route, or None if it has no such route.

    Args:
        url: of the route.
        params: of the query.
        fails: which answers are raised and not taken for None.

    Raises:
        RequestFailed: no server, or an answer that `fails`.
    """
    try:
        response = httpx.get(url, params=params, headers=headers(), timeout=30)
    except httpx.HTTPError as error:
        raise RequestFailed(f"no answer from {url}: {error}") from error
    if not response.is_success and fails(response):
        raise RequestFailed(f"{url}: HTTP {response.status_code}: {message_of(response)}")
    try:
        body = response.json() if response.is_success else None
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def refused(url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """OpenAI's error object, where a server refuses a request by 400; None for any other answer, and without one."""
    try:
        response = httpx.post(url, json=body, headers=headers(), timeout=30)
    except httpx.HTTPError:
        return None
    return error_of(response) if response.status_code == 400 else None


def wait_healthy(base_url: str, seconds: float) -> None:
    """Returns as soon as `/health` of the server is ok and a model is loaded.

    Args:
        base_url: ends in `/v1`; health is asked beside it.
        seconds: how long to go on asking.

    Raises:
        RequestFailed: not healthy in that time; the text has the last answer.
    """
    url = f"{base_url.removesuffix('/v1')}/health"
    end = time.monotonic() + seconds
    while True:
        try:
            response = httpx.get(url, timeout=10)
            last = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.is_success and _is_ready(response):
                return
        except httpx.HTTPError as error:
            last = str(error)
        if time.monotonic() > end:
            raise RequestFailed(f"{url} was not healthy within {seconds:g} s; last: {last}")
        time.sleep(0.5)


def _is_ready(response: httpx.Response) -> bool:
    try:
        health = response.json()
    except ValueError:
        return False
    return isinstance(health, dict) and health.get("status") == "ok" and bool(health.get("loaded_models"))
