"""Whether a Vitrine server answers at a URL."""

from typing import Any, NamedTuple

import httpx

from deployments import __version__
from evals.config import EvalError
from evals.server.keys import headers

ROUTES = frozenset(
    {
        "/health",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/model/structure",
        "/v1/activations/session/{session_id}",
        "/v1/activations/session/{session_id}/data",
    }
)
TITLE = "Vitrine"
PATIENCE_S = 10.0  # for each question
NO_ROUTES = "Route table is not populated yet."  # Serve's proxy, before the first application


class UnknownServer(EvalError):
    """What answers is no Vitrine server; the text says by what that shows."""


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
        """Whether the model can answer."""
        return self.status == "ok" and model in self.loaded


def look(base_url: str) -> FoundServer | None:
    """The Vitrine server at a URL that ends in `/v1`; None where nothing listens, or Ray Serve without an application.

    Raises:
        UnknownServer: Something else answers.
        NotReady: It cannot say yet what it is.
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
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnknownServer(f"{root} answers, but not as a Vitrine server: {type(error).__name__}: {error}") from error


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


HINT = "--fresh restarts a server that --serve started; or give another --base-url"


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
        raise UnknownServer(f"{root} answers, but is no Vitrine server: {_shown(described)}")
    paths = page.get("paths")
    if missing := sorted(ROUTES - set(paths if isinstance(paths, dict) else ())):
        raise UnknownServer(f"{root} calls itself {TITLE}, but has no {', '.join(missing)}")
    health = _json(client.get("/health"))
    if not isinstance(health, dict) or not isinstance(health.get("loaded_models"), list):
        raise NotReady(f"{root}/health does not say which models are loaded: {health!r:.200}")
    loaded, replicas = frozenset(map(str, health["loaded_models"])), health.get("replicas")
    models = loaded | frozenset(replicas if isinstance(replicas, dict) else ())
    found = FoundServer(str(info.get("version")), str(health.get("status")), loaded, models)
    if found.status == "ok":
        _check_models(client, root, found)
    return found


def _check_models(client: httpx.Client, root: str, found: FoundServer) -> None:
    """Check that the list of models is OpenAI's, and that each model has a structure."""
    client.headers.update(headers())
    answer = client.get("/v1/models")
    if answer.status_code == 401:
        raise EvalError(f"{root} needs a key: set OPENAI_API_KEY")
    listed = _json(answer)
    try:
        ids = {model["id"] for model in listed["data"]}
    except (TypeError, KeyError):
        raise UnknownServer(f"{root}/v1/models is no list of models: {_shown(answer)}") from None
    if not ids >= found.loaded:
        raise UnknownServer(f"{root}/v1/models lists {sorted(ids)}, and /health {sorted(found.loaded)}")
    for model in found.loaded:
        answer = client.get("/v1/model/structure", params={"model": model})
        structure = _json(answer)
        if not isinstance(structure, dict) or structure.get("id") != model or not structure.get("points"):
            raise UnknownServer(f"{root}/v1/model/structure does not say what {model} is made of: {_shown(answer)}")


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def _shown(answer: httpx.Response) -> str:
    return f"{answer.request.url.path}: HTTP {answer.status_code}: {answer.text[:120]!r}"
