"""One model's replica: asyncio in front of the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client, _get_internal_replica_context  # there are no public ways
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.activations.nodes import connect_writer
from deployments.client_code.job import CodeJob
from deployments.errors import LoadError, RequestError
from deployments.exposure import check_ray
from deployments.job import Job, Text
from deployments.messages import ENGINE_ENDED, NOT_TAKEN, End, Message, Refusal
from deployments.options import SETTINGS, Options
from deployments.replica.delivery import Delivery, Ticket
from deployments.replica.engine_loading import description, load_engine
from deployments.replica.metrics import EngineMetrics, RequestMetrics
from deployments.serve_actors import MODELS, check_environment

if TYPE_CHECKING:  # Serve's controller and proxies also import this module, without torch
    from deployments.client_code.runner import CodeRunner
    from deployments.engine.engine import Engine
    from deployments.engine.request import Event
    from deployments.model.attribution import By

logger = logging.getLogger("ray.serve")
EXIT_S = 5.0  # how long a replica whose engine has ended waits until its requests are answered
STUCK_AFTER_S = 300.0  # in one engine step; then the replica counts as dead, and is replaced
MOST_TEXTS = 64  # texts that are being tokenized or detokenized, or wait for it


# One that hangs is replaced after half a minute: three checks that are not answered.
@serve.deployment(max_ongoing_requests=100_000, health_check_period_s=5, health_check_timeout_s=10)
class ModelReplica:
    """Holds one copy of a model and one engine.

    It does its own admission: Serve's limits are above `max_running + max_queued`.
    """

    def __init__(self, options: Options, store: Any = None, named: bool = False) -> None:
        """Load the model and start the engine's thread.

        Args:
            options: The operator's options.
            store: The activation store's handle; by default the store of the operator's directory.
            named: Whether its application must be named after the model.

        Raises:
            LoadError: The model cannot be loaded, Ray's ports are open to everyone, the application has another name,
                or the actor lacks variables.
        """
        check_ray(options)
        serving = _get_internal_replica_context()  # type: ignore[no-untyped-call]  # None in a program without Serve
        if serving:
            check_environment(options, "ModelReplica")
        if serving and named:
            _check_name(serving.app_name, options.served_name)
        from deployments.chat.prompts import Prompts
        from deployments.chat.template import ChatFormat
        from deployments.chat.token_texts import TokenTexts
        from deployments.places.points import structure
        from deployments.replica.monitoring import MonitorLog
        from deployments.replica.preparation import Preparation
        from deployments.replica.runs import Runs

        self._options = options
        loaded: Future[Engine] = Future()
        self._ended = False
        self._thread = threading.Thread(target=self._run_engine, args=(loaded,), name="engine", daemon=True)
        self._thread.start()
        self._engine = loaded.result()
        self._model = self._engine.model
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="replica")
        self._texts_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="texts")  # delays no generation
        self._texts = 0  # number of texts in the pool
        writer = reader = store  # tests pass a store that does everything
        if store is None:
            store = connect(options.activations_dir, options.archive, options.archive_cache_bytes)
            reader = connect_reader(options.activations_dir, options.archive)
            writer = connect_writer(options.activations_dir, store)
        token_texts = TokenTexts(self._model.tokenizer)
        chat = ChatFormat(self._model.tokenizer, self._model.hf)
        self._prompts = Prompts(self._model, chat, token_texts)
        runs = Runs(options, self._model, token_texts, writer, self._pool)
        self._preparation = Preparation(
            options, self._engine, chat, self._prompts, runs, store=store, reader=reader, pool=self._pool
        )
        log = options.monitor_log
        self._monitor_log = MonitorLog(log, options.served_name) if log else None
        self._delivery = Delivery(self._engine, token_texts, self._monitor_log, self._charge)
        self._ingress = None
        if serving:
            self._ingress = serve.get_deployment_handle("Ingress", serving.app_name.partition(MODELS)[0], False)
        self._charging = set[asyncio.Task[None]]()  # asyncio itself holds tasks by weak references
        self._structure = structure(self._model.hf, self._model.points, self._model.context)
        self._metrics = EngineMetrics(options.served_name)
        self._requests = RequestMetrics(options.served_name)
        self._described = {"created": int(time.time())} | description(options, self._model)
        device = self._described["device_name"] or self._model.device
        logger.info("%s serves on %s", options.served_name, device)
        self._preparing = Counter[str | None]()  # by owner: choices that have no ticket yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client_code = self._runner() if options.allow_client_code else None
        if _has_own_process():
            gc.collect()
            gc.freeze()  # the model and the libraries stay: a full collection of garbage would walk them all

    # ---- called by the ingress and Serve

    async def stream(self, job: Job) -> AsyncGenerator[list[Message]]:
        """Run a job; each item holds all messages since the last one."""
        async with contextlib.aclosing(self._run(job, streamed=True)) as items:
            async for gathered in items:
                yield gathered

    async def complete(self, job: Job) -> list[Message]:
        """Run a job and return all its messages at once."""
        async with contextlib.aclosing(self._run(job, streamed=False)) as items:
            return [message async for gathered in items for message in gathered]

    async def _run(self, job: Job, streamed: bool) -> AsyncGenerator[list[Message]]:
        with self._requests.measure(job, streamed) as meter, self._preparation.lending(job.id):
            deadline = asyncio.get_running_loop().time() + self._options.request_timeout_s
            ticket = await self._admitted(job, streamed, deadline)
            if isinstance(ticket, Refusal):
                meter.last([ticket])
                yield [ticket]
                return
            timer = asyncio.get_running_loop().call_at(deadline, self._end_late, ticket)
            try:
                while ticket.open:
                    gathered = await _gather(ticket.messages)
                    if meter.first_s is None:
                        meter.first()
                    last = [message for message in gathered if isinstance(message, (End, Refusal))]
                    if last:
                        meter.last(last)
                    ticket.open -= sum(isinstance(message, End) for message in last)
                    yield gathered
                    if any(isinstance(message, Refusal) for message in last):
                        return
            finally:
                timer.cancel()
                self._delivery.drop(ticket)

    async def _admitted(self, job: Job, streamed: bool, deadline: float) -> Ticket | Refusal:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._admit(job, streamed)
        except RequestError as refused:
            return job.refusal(refused)
        except TimeoutError:
            return self._late(begun=False)

    def _end_late(self, ticket: Ticket) -> None:
        """End a job whose time limit has passed."""
        ticket.messages.put_nowait(self._late(begun=any(map(self._engine.has_begun, ticket.choices))))

    def _late(self, begun: bool) -> Refusal:
        state, code = ("was not done", "timeout") if begun else ("was still queued", "not_started")
        message = f"the request {state} after the server's limit of {self._options.request_timeout_s:g} s"
        return Refusal(message, None, code, 504)

    async def run_code(self, job: CodeJob) -> None:
        """Run a client's code; its updates go to the job board.

        Raises:
            RequestError: The operator does not allow it, it names another model, or too many jobs wait.
        """
        if self._client_code is None:
            raise RequestError("this model was loaded without allow_client_code", None, "client_code_off", 403)
        await self._client_code.run(job)

    async def tokenize(self, text: Text) -> dict[str, Any] | Refusal:
        """The tokens of a text."""
        return await self._off_loop(self._prompts.tokenize, text)

    async def detokenize(self, tokens: Sequence[int], strings: bool = False) -> dict[str, Any] | Refusal:
        """The text of tokens; with `strings`, also each token's own text."""
        return await self._off_loop(self._prompts.detokenize, tokens, strings)

    async def attribute(
        self, text: Text, targets: Sequence[str | int], by: By, owner: str | None = None
    ) -> dict[str, Any] | Refusal:
        """The parts of a logit after a text, or of the difference of two, in the turn of an owner, who is charged."""
        try:
            return await self._preparation.attribute(text, targets, by, owner, self._charge)
        except RequestError as refused:
            return Refusal(refused.message, refused.field, refused.code, refused.status)

    async def _off_loop(self, call: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any] | Refusal:
        if self._texts >= MOST_TEXTS:
            message = f"this replica is tokenizing {MOST_TEXTS} texts already: try again later"
            return Refusal(message, None, "server_busy", 429)
        self._texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._texts_pool, call, *args)
        except RequestError as refused:
            return Refusal(refused.message, refused.field, refused.code, refused.status)
        finally:
            self._texts -= 1

    async def check(self, job: Job) -> dict[str, Any] | Refusal:
        """Empty if the captures and interventions of a job without prompts fit the model; otherwise the refusal."""
        try:
            await self._preparation.check(job)
        except RequestError as refused:
            return job.refusal(refused)
        return {}

    async def check_readout(self, field: str, point: str, hidden: int) -> dict[str, Any] | Refusal:
        """Empty if a point of the model has rows of `hidden` entries; otherwise the refusal, which names a field."""
        from deployments.readouts.resolver import point_of

        try:
            point_of(self._model.points, point, hidden, field)
        except RequestError as refused:
            return Refusal(refused.message, refused.field, refused.code, refused.status)
        return {}

    async def describe(self) -> dict[str, Any]:
        """The model's description in `/v1/models`."""
        return self._described

    async def structure(self) -> dict[str, Any]:
        """The model's modules and points."""
        return self._structure

    async def settings(self) -> dict[str, Any]:
        """The settings of the loaded model, in the form of `/models/load`."""
        return self._options.model_dump(mode="json", include=SETTINGS)

    async def statistics(self) -> dict[str, Any]:
        """The engine's statistics now."""
        return asdict(self._engine.statistics)

    def check_health(self) -> None:
        """Raise RuntimeError if the engine's thread has ended or one step takes too long.

        Serve calls this every few seconds; the call also updates the metrics.
        """
        self._metrics.update(self._engine.statistics)
        if not self._thread.is_alive():
            raise RuntimeError("the engine's thread has ended; its error is in this replica's log")
        began = self._engine.step_began
        since = time.monotonic() - began if began is not None else 0
        if since > STUCK_AFTER_S:
            raise RuntimeError(f"the engine has been in one step for {since:.0f} s")

    def __del__(self) -> None:
        # Serve calls this after the replica's requests have ended, Python if the model could not be loaded.
        if (client_code := getattr(self, "_client_code", None)) is not None:
            client_code.close()
        if (log := getattr(self, "_monitor_log", None)) is not None:
            log.close()
        if hasattr(self, "_engine"):
            self._engine.stop()
            self._thread.join(timeout=10)
        for name in ("_pool", "_texts_pool"):
            if (pool := getattr(self, name, None)) is not None:
                pool.shutdown(wait=False)

    def _runner(self) -> CodeRunner:
        from deployments.client_code.runner import runner

        serve_client = _get_global_client()
        assert serve_client is not None
        return runner(self._options, self._model, serve_client.http_config.host)

    # ---- the engine's thread

    def _run_engine(self, loaded: Future[Engine]) -> None:
        """Load the model and run its engine.

        Both run on this thread, because OpenMP keeps a team of threads for each thread that has computed. If all teams
        together have more threads than the machine has cores, they sleep instead of spinning between operations. A
        small model's steps then took half as long again (measured without `GOMP_SPINCOUNT`).
        """
        try:
            engine = load_engine(self._options)
        except BaseException as error:  # noqa: BLE001 - raised again in the constructor
            loaded.set_exception(error)
            return
        loaded.set_result(engine)
        try:
            engine.run(lambda events: self._on_loop(self._deliver, events))
        except BaseException:  # any error of the engine's thread fails all requests and replaces the replica
            logger.exception("the engine has ended")
            if self._loop is None:  # no job has arrived yet
                self._fail_all()
            self._on_loop(self._fail_all)
            if _has_own_process():
                self._exit()
            raise

    def _deliver(self, events: list[Event]) -> None:
        """Deliver one step's events; export at once that nothing runs, as the next health check is seconds away."""
        self._delivery.deliver(events)
        statistics = self._engine.statistics
        if not statistics.running and not statistics.waiting:
            self._metrics.update(statistics)

    def _charge(self, owner: str | None, prompt: int, completion: int) -> None:
        """Report tokens to the ingress that no answer contains; runs on the event loop."""
        if self._ingress and prompt + completion:
            task = asyncio.ensure_future(self._report(self._ingress, owner, prompt, completion))
            self._charging.add(task)
            task.add_done_callback(self._charging.discard)

    async def _report(self, ingress: DeploymentHandle[Any], owner: str | None, prompt: int, completion: int) -> None:
        try:
            await ingress.charge.remote(owner, prompt, completion)
        except (RayError, RayServeException) as error:
            logger.warning("%d tokens of %s are not counted: %s", prompt + completion, owner, error)

    def _fail_all(self) -> None:
        """Fail the jobs that arrived before the engine ended; runs on the event loop, so later jobs see the failure."""
        self._ended = True
        self._delivery.fail_all(ENGINE_ENDED)

    def _exit(self) -> None:
        """End this process once its waiting requests are answered.

        Serve notices a lost process at once. A replica with failing health checks would receive requests for many more
        seconds, and more than the others, because it has none running.
        """
        limit = time.monotonic() + EXIT_S
        while len(self._delivery) and time.monotonic() < limit:
            time.sleep(0.05)
        time.sleep(0.2)  # the last answers are still being sent
        os._exit(1)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Call from the engine's thread onto the event loop, which exists once a job has arrived."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call, *args)

    # ---- admission

    async def _admit(self, job: Job, streamed: bool) -> Ticket:
        """Render, tokenize, check and queue a job.

        Raises:
            RequestError: The job cannot be served.
        """
        self._loop = asyncio.get_running_loop()
        wanted, room = job.choices, self._options.max_running + self._options.max_queued
        owner = job.account.owner
        if wanted > room:
            raise RequestError(f"{wanted} choices, but a replica holds at most {room} sequences: request fewer", "n")
        held, most = len(self._delivery) + self._preparing.total(), room
        if owner is not None and held + wanted > self._options.max_running:  # one owner leaves others as much as it has
            most -= self._delivery.held_of(owner) + self._preparing[owner]
        if held + wanted > most:
            limit = "" if most == room else ", and of one owner no more than it has left"
            message = f"this replica's queue is full: it holds at most {room} sequences{limit}; try again later"
            raise RequestError(message, None, "server_busy", 429)
        self._preparing[owner] += wanted
        try:
            choices = await self._preparation.choices(job, streamed)
        finally:
            self._preparing[owner] -= wanted
        ticket = self._delivery.open(job, choices)
        # After submitting: `_fail_all` answers the jobs that arrived before the engine's end.
        if self._ended or not self._thread.is_alive():
            self._delivery.drop(ticket)
            raise RequestError(NOT_TAKEN, None, "unavailable", 503)
        return ticket


def _check_name(application: str, model: str) -> None:
    """Raise LoadError if an ingress would not find the model by its application's name."""
    ingress = application.partition(MODELS)[0] if MODELS in application else "default"
    right = f"{ingress}{MODELS}{model.replace('/', '--')}"
    if application != right:
        message = f"the application {application!r} of the model {model!r} must have the name {right!r}"
        raise LoadError(message, "name", "wrong_name", 500)


def _has_own_process() -> bool:
    """Whether this is an actor, rather than an object in another program."""
    return ray.is_initialized() and bool(ray.get_runtime_context().get_actor_id())


async def _gather(messages: asyncio.Queue[Message]) -> list[Message]:
    """Wait for the next message, and return it with all others that have arrived."""
    gathered = [await messages.get()]
    while not messages.empty():
        gathered.append(messages.get_nowait())
    return gathered
