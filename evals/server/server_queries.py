"""Single questions to a server before a run: its models, and what it says of itself. They are not repeated."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from evals.server.answers import RequestFailed, is_absent
from evals.server.keys import api_key
from vitrine.connection.blocking import wait
from vitrine.connection.transport import Transport
from vitrine.server_error import ServerError

LIMIT_S = 30.0  # of an answer
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


def is_closed(error: RequestFailed) -> bool:
    """Whether a server could not answer now, or only with a key."""
    return is_absent(error) or error.status in {401, 403}


def ask_json(
    url: str, params: dict[str, str] | None = None, fails: Callable[[RequestFailed], bool] = lambda _: False
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
        return _asked(url, lambda client: client.get(url, params))
    except RequestFailed as error:
        if error.status is None:
            raise
        if fails(error):
            raise RequestFailed(f"{url}: {error}", error.status) from error
        return None


def refused(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's error object, where a server refuses a request by 400; empty for any other answer, and without one.

    Any answer other than success or 400 is logged as a warning, since it does not tell whether the server accepts the
    option; so is the lack of an answer.
    """
    try:
        _asked(url, lambda client: client.post(url, body))
    except RequestFailed as error:
        if isinstance(error, ServerError) and error.status == 400:
            return {"message": error.message, "param": error.param, "code": error.code}
        logger.warning("an option could not be checked before the first sample: %s: %s", url, error)
    return {}


def _asked(url: str, ask: Callable[[Transport], Coroutine[Any, Any, Any]]) -> Any:
    """The answer to one request.

    Raises:
        RequestFailed: There is none, or an error.
    """

    async def once() -> Any:
        client = Transport(url, api_key(), LIMIT_S, retries=0, max_outage=0.0, parallel=1)
        try:
            return await ask(client)
        finally:
            await client.close()

    return wait(once())
