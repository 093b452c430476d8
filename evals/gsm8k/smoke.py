"""One captured request from end to end: `--smoke`. Each step is said with its time; the first that fails ends it.

completion -> stored run -> the same over HTTP -> deleted
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from evals.activations_meta import points_of, shape_of, why_not_stored
from evals.config import Config, EvalError
from evals.server.answers import RequestFailed
from evals.server.client import ChatClient
from evals.server.inline import UNREADABLE
from evals.server.stored_runs import array_of, stored_run
from vitrine.runs.fetching import named

QUESTION = "Ann has 3 boxes of 12 pens. How many pens is that?"
NEW_TOKENS = 16


def smoke(config: Config) -> None:
    """Check a server's whole way of one request that records.

    Args:
        config: The run's, whose points are recorded where it names any.

    Raises:
        EvalError: A step did not do what it is to do; with the step and the reason.
    """
    began = time.monotonic()
    asyncio.run(_steps(config))
    print(f"smoke: all of it works, in {time.monotonic() - began:.2f} s", flush=True)


async def _steps(config: Config) -> None:
    session = f"smoke-{uuid.uuid4().hex}"
    where = f"activations/session/{session}"
    client = ChatClient(config.base_url, timeout=config.timeout, retries=0, parallel=1)
    try:
        with _step("completion") as say:
            run = await _completed(client, config, session)
            say(f"{run['tokens']} tokens, {len(points_of(run))} points, {run['run_id']}")
        with _step("stored run") as say:
            say(await _listed(client, where, run))
        with _step("read back") as say:
            say(await _read_back(client, run))
        with _step("deleted") as say:
            await client.delete(where)
            say(await _gone(client, where))
    except BaseException:  # delete what was stored, then re-raise
        with suppress(RequestFailed):  # the reason is the one above
            await client.delete(where)
        raise
    finally:
        await client.close()


@contextmanager
def _step(name: str) -> Iterator[Callable[[str], None]]:
    """Time a step and say what came of it; what it raises names the step."""
    began, said = time.monotonic(), list[str]()
    try:
        yield said.append
    except (EvalError, RequestFailed, *UNREADABLE) as error:
        reason = str(error) if isinstance(error, EvalError | RequestFailed) else f"{type(error).__name__}: {error}"
        raise EvalError(f"{name}: {reason}") from error
    print(f"smoke: {name:<12}{time.monotonic() - began:6.2f} s  {' '.join(said)}", flush=True)


async def _completed(client: ChatClient, config: Config, session: str) -> dict[str, Any]:
    """The run of one answered request, as the answer tells of it."""
    where = {"points": config.points, "layers": config.layers, "sites": config.sites}
    body = {
        "model": config.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "store_activations": True,
        "session_id": session,
        "capture": {name: value for name, value in where.items() if value},
    }
    answer = await client.chat(body)
    usage: dict[str, Any] = answer["usage"]
    meta: Any = answer.get("activations_meta")
    if answer["choices"][0]["message"]["role"] != "assistant" or not usage["completion_tokens"]:
        raise EvalError(f"no assistant's answer: {answer!r:.300}")
    if why := why_not_stored(meta):
        raise EvalError(f"the activations are not stored: {why}")
    run: dict[str, Any] = meta["runs"][0]
    if not points_of(run):
        raise EvalError("nothing was recorded")
    if run["tokens"] != usage["total_tokens"]:
        raise EvalError(f"the run has {run['tokens']} tokens, the answer counts {usage['total_tokens']}")
    return run


async def _gone(client: ChatClient, where: str) -> str:
    try:
        await client.read(where)
    except RequestFailed as failure:
        if failure.code != "session_not_found":
            raise
        return "the server knows it no more"
    raise EvalError("the session is still there")


async def _listed(client: ChatClient, where: str, run: dict[str, Any]) -> str:
    session = await client.read(where)
    ids = [listed["run_id"] for listed in session["runs"]]
    if ids != [run["run_id"]]:
        raise EvalError(f"the session lists the runs {ids}, not {run['run_id']} alone")
    return f"in {len(session['files'])} file"


async def _read_back(client: ChatClient, run: dict[str, Any]) -> str:
    """Every point has the shape that the answer named, and values that are numbers."""
    entry = (await named(client, [run["run_id"]]))[run["run_id"]]
    stored, total = await stored_run(client, entry), 0
    for name, point in points_of(run).items():
        values, said = array_of(stored, name), shape_of(point)
        # An axis that grows is as wide as the last token sees: all of them.
        if list(values.shape) != [run["tokens"] if size is None else size for size in said] or not values.size:
            raise EvalError(f"{name} is {list(values.shape)} over HTTP, and the answer said {said}")
        if not np.isfinite(values).all():
            raise EvalError(f"{name} holds values that are no finite numbers")
        total += values.size
    return f"{total:,} values, {entry['bytes']:,} bytes"
