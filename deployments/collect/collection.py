"""Collects activations: from a data file to a stored session."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import ValidationError

from deployments.activations.facts import check_session_id
from deployments.collect.examples import LOST, DataError, Example, Fields, Outcome, Settings, number, read, together
from deployments.errors import LoadError
from deployments.options import GGUF, SETTINGS, Options, home, mistakes
from deployments.points.token_choices import TokensError
from vitrine.connection.blocking import wait
from vitrine.server_error import RequestFailed

if TYPE_CHECKING:
    from deployments.collect.engines import Engines
    from deployments.collect.remote import Sender

BLOCK = 512  # examples that are grouped into requests together
URL = "http://127.0.0.1:8000/v1"  # of a server with the default port
VARIABLE = "VITRINE_BASE_URL"  # names the server for the command
NEVER_S = 1e9  # an engine that serves no one else has no latency limit

Data = str | os.PathLike[str] | Sequence[Mapping[str, Any]]


class CollectError(Exception):
    """A collection ended early; the message has the reason. Runs that are stored stay."""


class Collected(NamedTuple):
    """The result of a collection.

    Attributes:
        session: The session of the runs.
        runs: The number of stored runs.
        failed: The number of examples that could not be stored.
        tokens: Tokens of the stored runs, including generated ones.
        seconds: From the first prompt to the last durable row.
        tokens_per_second: The rate of these.
        already_stored: The number of examples that were stored before.
    """

    session: str
    runs: int
    failed: int
    tokens: int
    seconds: float
    tokens_per_second: float
    already_stored: int


def collect(
    data: Data,
    *,
    session: str,
    points: Sequence[str],
    model: str | None = None,
    base_url: str | None = None,
    tokens: str = "prompt_last",
    max_tokens: int = 0,
    label: str | None = None,
    group: str | None = None,
    tags: Sequence[str] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    store: str | os.PathLike[str] | None = None,
    actors: int | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[Outcome], None] = lambda outcome: None,
    starting: Callable[[str], None] = lambda step: None,
) -> Collected:
    """Run prompts through a model and store their activations, each example once.

    Called again with the same arguments, it continues where an earlier call ended.

    Args:
        data: A file of examples, or the examples: `prompt`, `text` or `messages`, and optionally `id`, `label` and
            `group`; further fields become tags.
        session: The session to store them in.
        points: Points to record, with wildcards: `layers.*.output`.
        model: The model to load, as in the server's option; with `base_url`, the id of a model that it serves.
        base_url: The server to use instead of loading a model here; without `model`, port 8000 of this machine.
        tokens: The tokens to record: `prompt_last`, `prompt_last:3`, `all`, `prompt`, `generated` and others.
        max_tokens: Tokens to generate after each prompt, greedily.
        label: The field that becomes the tag `label`.
        group: The field that becomes the tag `group`.
        tags: The other fields that become tags; all by default.
        on_error: Whether an example that cannot be stored ends the collection or is skipped.
        store: The store's directory or URI; by default the server's own default.
        actors: The number of engines to load; by default one for each GPU, or one for each node without GPUs.
        options: Further options of the model, as in the server.
        progress: Called with the outcome of each block of examples.
        starting: Called with the name of each step before the first prompt, which may take a minute.

    Raises:
        DataError: The data cannot be read, an argument is invalid, or the server rejects the requests.
        CollectError: An example could not be stored, and `on_error` is `stop`; or Ray failed.
        LoadError: The model cannot be loaded.
    """
    of_engines = {"store": store, "actors": actors, "set": options}
    hint = "" if base_url or model else "; --model loads a model here instead"
    base_url = base_url if base_url or model else URL
    if base_url is not None and (given := [name for name, value in of_engines.items() if value]):
        raise DataError(f"--{given[0]} is of a model loaded here: give --model, and neither --base-url nor {VARIABLE}")
    if actors is not None and actors < 1:
        raise DataError(f"--actors: {actors} is less than 1")
    rows = Path(data).expanduser().absolute() if isinstance(data, (str, os.PathLike)) else data
    examples = read(rows, Fields(label, group, tags))
    settings = functools.partial(_settings, session=session, points=tuple(points), tokens=tokens, max_tokens=max_tokens)
    if base_url is not None:
        from deployments.collect import remote

        server = remote.connect(base_url)
        try:
            chosen = settings(model or remote.first_model(server))
            return _summed(_outcomes(examples, chosen, remote.Sender(server, chosen)), session, on_error, progress)
        except RequestFailed as error:
            raise DataError(f"--base-url {base_url}: {error}{hint}") from error
        finally:
            wait(server.close())
    assert model is not None
    loading = _loading(model, options)
    chosen = settings(loading.served_name, loaded=loading.model_dump_json(include=SETTINGS | {"model"}))
    starting("joining or starting Ray")
    with _cluster():
        from deployments.collect.engines import Engines

        with _named_options():
            placed = _placed(loading, {"activations_dir": _store(store)}, actors)
        starting(f"loading {model} (engines: {placed[1]}); --base-url would use a server that has it loaded")
        with closing(Engines(chosen, *placed)) as engines:
            return _summed(_outcomes(examples, chosen, engines), session, on_error, progress)


def _settings(model: str, *, session: str, max_tokens: int, **given: Any) -> Settings:
    """The settings of all requests.

    Raises:
        DataError: An argument is invalid.
    """
    settings = Settings(model, session, max_tokens=max_tokens, **given)
    if max_tokens < 0:
        raise DataError(f"--max-tokens: {max_tokens} is less than 0")
    try:
        check_session_id(session)
    except ValueError as error:
        raise DataError(f"--session: {error}") from error
    with _named_options():
        try:
            settings.capture([])  # checks points and tokens
        except TokensError as error:
            raise DataError(f"--tokens: {error}") from error
    return settings


def _loading(model: str, options: Mapping[str, Any] | None) -> Options:
    """The options of the model that is loaded here, checked before Ray starts."""
    if model.endswith(GGUF):
        model = os.fspath(Path(model).expanduser().absolute())  # an engine may have another working directory
    with _named_options():
        return Options.model_validate({"model": model, "request_timeout_s": NEVER_S, **(options or {})})


@contextmanager
def _named_options() -> Iterator[None]:
    """Report pydantic's errors by the option that caused them.

    Raises:
        DataError: Lists all mistakes.
    """
    try:
        yield
    except ValidationError as error:
        if error.title == Options.__name__:
            flags = {"activations_dir": "store", "model": "model"}
            wrong = [(flags.get(name, f"set {name}"), message) for name, message in mistakes(error)]
        else:
            mistake = error.errors()[0]
            wrong = [(str(mistake["loc"][0]).replace("_", "-"), mistake["msg"])]
        raise DataError("; ".join(f"--{flag}: {message}" for flag, message in wrong)) from error


async def _outcomes(
    items: Iterator[Example | str], settings: Settings, runner: Engines | Sender
) -> AsyncGenerator[Outcome]:
    """The outcomes of each request's examples, in the order in which they end."""
    running: dict[asyncio.Task[Outcome], int] = {}
    seen = set[int]()
    began: float | None = None
    try:
        while block := list(islice(items, BLOCK)):
            named = {settings.name(item): item for item in block if isinstance(item, Example)}
            new = {name: item for name, item in named.items() if number(name) not in seen}
            seen.update(map(number, new))
            for name in await runner.stored(list(new)):
                del new[name]
            invalid = [item for item in block if isinstance(item, str)]
            if known := len(block) - len(invalid) - len(new):
                yield Outcome(already_stored=known)
            if invalid:
                yield Outcome(failures=invalid)
            for request in together(new.values()):
                began = began or time.monotonic()
                running[asyncio.create_task(_outcome(runner, request, began))] = len(request)
                while sum(running.values()) >= runner.in_flight:
                    for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                        del running[task]
                        yield task.result()
        for task in list(running):
            yield await task
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _outcome(runner: Engines | Sender, examples: list[Example], began: float) -> Outcome:
    """Run the examples of one request; if it is rejected, those without a run one by one, to find the failing one."""
    outcome = Outcome()
    left, reason = await runner.send(examples, outcome)
    is_lost = reason.code == LOST
    for example in left:
        failed = left
        if len(examples) > 1:
            failed, reason = await runner.send([example], outcome, again=is_lost)
        if failed:
            outcome.refuse(example.place, reason)
        if outcome.refusal:
            break
    outcome.seconds = time.monotonic() - began
    return outcome


def _summed(
    made: AsyncGenerator[Outcome], session: str, on_error: str, progress: Callable[[Outcome], None]
) -> Collected:
    """The sum over all outcomes.

    Raises:
        CollectError: An example could not be stored, and `on_error` is `stop`.
        DataError: No example can be stored.
    """
    whole, failed = Outcome(), 0

    async def following() -> Outcome | None:
        return await anext(made, None)

    async def closed() -> None:
        # An interrupt cancels what is awaited, which then still ends its requests.
        while getattr(made, "ag_running", False):
            await asyncio.sleep(0.01)
        await made.aclose()

    try:
        while outcome := wait(following()):
            whole += outcome
            failed += len(outcome.failures)
            progress(outcome)
            if outcome.refusal:
                raise (DataError if outcome.refusal.startswith("--") else CollectError)(outcome.refusal)
            if outcome.failures and on_error == "stop":
                raise CollectError(f"{outcome.failures[0]}; use --on-error skip to skip such examples")
    finally:
        wait(closed())
    rate = whole.tokens_per_second
    return Collected(session, whole.runs, failed, whole.tokens, whole.seconds, rate, whole.already_stored)


@contextmanager
def _cluster() -> Iterator[None]:
    """Use this machine's Ray cluster, or start one while the block runs.

    Raises:
        LoadError: The model could not be loaded.
        CollectError: Ray failed.
    """
    import ray

    from deployments.clusters import join

    was_there = ray.is_initialized()
    try:
        if not was_there:
            join()
        yield
    except ConnectionError as error:
        raise CollectError(f"{error}; does the cluster need RAY_AUTH_MODE=token?") from error
    except ray.exceptions.RayError as error:
        raise LoadError.quoted(str(error)) or CollectError(str(error).strip().splitlines()[-1]) from error
    finally:
        if not was_there:
            ray.shutdown()


def _store(given: str | os.PathLike[str] | None) -> str:
    """The store of the runs: the given one, else the one that runs in this cluster, else the default.

    Raises:
        DataError: Several stores run, or one whose keys are unknown here.
    """
    from deployments.clusters import STORE, detached_names

    if given:
        text = os.fspath(given)
        return text if "://" in text else str(Path(text).expanduser().absolute())
    stores = detached_names(STORE)
    if len(stores) > 1 or any("://" in name for name in stores):
        raise DataError(f"--store: choose the store to write to; running here: {', '.join(stores)}")
    return stores[0] if stores else str(home() / "activations")


def _placed(loading: Options, given: dict[str, Any], actors: int | None) -> tuple[Options, int]:
    """The options of each engine, and the number of engines: one for each GPU, else one for each node.

    Raises:
        CollectError: The cluster has too few resources for them.
    """
    import ray

    nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
    gpus = 0 if loading.on_cpu else int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    count = actors or gpus or nodes
    shared = math.ceil(count / nodes)  # engines per node, which share its cores
    kept = loading.model_dump(exclude_unset=True)
    options = Options.model_validate({"num_gpus": 1 if gpus else 0, "num_replicas": shared} | kept | given)
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    for name, each in (("CPU", options.num_cpus), ("GPU", options.num_gpus or 0)):
        if count * each > free.get(name, 0):
            wanted = f"{count} engines need {count * each:g} {name}, and {free.get(name, 0):g} are free"
            raise CollectError(f"{wanted}: load fewer with --actors, or use the server that holds them with --base-url")
    return options, count
