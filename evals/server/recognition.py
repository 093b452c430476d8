"""Whether a Vitrine server answers at a URL."""

from typing import Any, NamedTuple

import httpx

from deployments import __version__
from evals.config import EvalError

TITLE = "Vitrine"
PATIENCE_S = 10.0  # for each question
NO_ROUTES = "Route table is not populated yet."  # Serve's proxy, before the first application


class NotReady(EvalError):
    """A Vitrine server, or the proxy before one, that cannot answer yet."""


class FoundServer(NamedTuple):
    """A Vitrine server.

    Attributes:
        version: Its own.
        status: What `/health` says: `ok`, or `unavailable`.
        loaded: Ids of models that can answer now.
        models: Ids of all its models, those that still load included.
    """

    version: str
    status: str
    loaded: frozenset[str]
    models: frozenset[str]

    def is_ready(self, model: str) -> bool:
        """Whether the model can answer; without a name, whether any can."""
        return self.status == "ok" and (model in self.loaded if model else bool(self.loaded))


def look(base_url: str) -> FoundServer | None:
    """The Vitrine server at a URL that ends in `/v1`; None where nothing listens, or Ray Serve without an application.

    Raises:
        NotReady: It cannot say yet what it is.
        EvalError: Something else answers.
    """
    root = base_url.removesuffix("/v1")
    try:
        # Without the key, which what listens there must not see before it is known.
        with httpx.Client(base_url=root, timeout=PATIENCE_S) as client:
            if _is_vacant(client):
                return None
            return _recognized(client, root)
    except httpx.ConnectError:
        return None
    except (httpx.TimeoutException, httpx.NetworkError) as error:
        raise NotReady(f"{root} does not answer: {type(error).__name__}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EvalError(f"{root} answers, but not as a Vitrine server: {type(error).__name__}: {error}") from error


def check_asked(found: FoundServer, base_url: str, model: str) -> None:
    """Returns if the server is of this project's version and has the model.

    Raises:
        EvalError: It is not, or has not; with what was asked for and what is there.
    """
    if found.version != __version__:
        raise EvalError(f"{base_url} is Vitrine {found.version}, and the evaluator is {__version__}; {HINT}")
    if model not in found.models:
        there = ", ".join(sorted(found.models)) or "no model"
        raise EvalError(f"{base_url} serves {there}, not {model}; {HINT}")


HINT = "stop it, or give another --base-url"


def _is_vacant(client: httpx.Client) -> bool:
    """Whether it is Ray Serve's proxy, and no application is at `/`."""
    routes, ping = client.get("/-/routes"), client.get("/-/healthz")
    if routes.text == ping.text == NO_ROUTES:
        return True
    table = _json(routes)
    return isinstance(table, dict) and "/" not in table and ping.text == "success"


def _recognized(client: httpx.Client, root: str) -> FoundServer:
    described = client.get("/openapi.json")
    if described.status_code == 503:
        raise NotReady(f"{root}/openapi.json: HTTP 503: {described.text[:200]}")
    page = _json(described)
    info = page.get("info") if isinstance(page, dict) else None
    if not isinstance(info, dict) or info.get("title") != TITLE:
        raise EvalError(f"{root} answers, but is no Vitrine server: {_shown(described)}")
    answer = client.get("/health")
    health = _json(answer)
    if not isinstance(health, dict) or not isinstance(health.get("loaded_models"), list):
        raise NotReady(f"{root} does not say which models are loaded: {_shown(answer)}")
    loaded, replicas = frozenset(map(str, health["loaded_models"])), health.get("replicas")
    models = loaded | frozenset(replicas if isinstance(replicas, dict) else ())
    return FoundServer(str(info.get("version")), str(health.get("status")), loaded, models)


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def _shown(answer: httpx.Response) -> str:
    return f"{answer.request.url.path}: HTTP {answer.status_code}: {answer.text[:120]!r}"
