"""Single questions to a server before a run: its models, and what it says of itself."""

import logging
from collections.abc import Callable
from typing import Any

import httpx

from evals.server.answers import RequestFailed, error_of, is_absent, message_of
from evals.server.keys import headers

CHECK_S = 30.0  # seconds for the answer to a request of one token
logger = logging.getLogger(__name__)


def first_model(base_url: str) -> str:
    """The id of the first model that the server lists.

    Raises:
        RequestFailed: no server, no list, or an empty one.
    """
    hint = "" if base_url.endswith("/v1") else "; an OpenAI root ends in /v1"
    try:
        listed = ask_json(f"{base_url}/models", fails=lambda _: True) or {}
        models = [str(model["id"]) for model in listed["data"]]
    except RequestFailed as error:
        raise RequestFailed(f"{error}{hint}") from error
    except (TypeError, KeyError) as error:
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


def refused(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's error object, where a server refuses a request by 400; empty for any other answer, and without one.

    Any answer other than success or 400 is logged as a warning, since it does not tell whether the server accepts the
    option; so is the lack of an answer.
    """
    try:
        response = httpx.post(url, json=body, headers=headers(), timeout=CHECK_S)
    except httpx.HTTPError as error:
        logger.warning("an option could not be checked before the first sample: no answer from %s: %s", url, error)
        return {}
    if not response.is_success and response.status_code != 400:
        said = f"HTTP {response.status_code}: {message_of(response)}"
        logger.warning("an option could not be checked before the first sample: %s: %s", url, said)
    return (error_of(response) or {}) if response.status_code == 400 else {}
