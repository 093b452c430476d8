"""One model's replica: asyncio in front of the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ray import serve

from deployments.activations.store import connect
from deployments.delivery import Choice, Delivery, Ticket
from deployments.demo_model import WEIGHTS
from deployments.engine.request import Request
from deployments.errors import RequestError
from deployments.messages import End, Job, Message, Refusal
from deployments.metrics import Metrics
from deployments.options import DEMO, Options

if TYPE_CHECKING:  # Serve's controller and proxies import this module too, and need no torch
    from deployments.engine.engine import Engine

logger = logging.getLogger("ray.serve")
ENGINE_ENDED = "the replica's engine has ended; another takes its place: try again"


@serve.deployment(max_ongoing_requests=100_000, graceful_shutdown_timeout_s=60, health_check_period_s=5)
class ModelReplica:
    """Holds one copy of a model and one engine.

    Admission is its own: Serve's limits stand above `max_running + max_queued`.
    """

    def __init__(self, options: Options, store: Any = None) -> None:
        """Load the model and start the engine's thread.

        Args:
            options: The operator's.
            store: The activation store's handle; by default that of the operator's directory.
        """
        from deployments.chat import ChatFormat
        from deployments.runs import Runs
        from deployments.spelling import Spelling

        self._options = options
        loaded: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run_engine, args=(loaded,), name="engine", daemon=True)
        self._thread.start()
        self._engine = loaded.result()
        self._model = self._engine.model
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="replica")
        self._runs = Runs(options, self._model, store or connect(options.activations_dir), self._pool)
        self._chat = ChatFormat(self._model.tokenizer, self._model.hf)
        self._delivery = Delivery(self._engine, Spelling(self._model.tokenizer))
        self._metrics = Metrics(options.served_name)
        self._created = int(time.time())
        self._preparing = 0  # choices on their way to a ticket
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- what the ingress and Serve call

    async def stream(self, job: Job) -> AsyncGenerator[list[Message]]:
        """Run a job; each item holds all messages that gathered since the last."""
        async with contextlib.aclosing(self._run(job, streamed=True)) as items:
            async for gathered in items:
                yield gathered

    async def complete(self, job: Job) -> list[Message]:
        """Run a job and give all its messages at once."""
        async with contextlib.aclosing(self._run(job, streamed=False)) as items:
            return [message async for gathered in items for message in gathered]

    async def _run(self, job: Job, streamed: bool) -> AsyncGenerator[list[Message]]:
        limit = self._options.request_timeout_s
        late = Refusal(f"not done after the server's limit of {limit:g} s", None, "timeout", 504)
        deadline = asyncio.get_running_loop().time() + limit
        try:
            async with asyncio.timeout_at(deadline):
                ticket = await self._admit(job, streamed)
        except RequestError as refused:
            named = job.fields.get(refused.field or "", refused.field)
            yield [Refusal(refused.message, named, refused.code, refused.status)]
            return
        except TimeoutError:
            yield [late]
            return
        try:
            while ticket.open:
                gathered = await _gather(ticket.messages, deadline)
                ticket.open -= sum(isinstance(message, End) for message in gathered)
                yield gathered
                if any(isinstance(message, Refusal) for message in gathered):
                    return
        except TimeoutError:
            yield [late]
        finally:
            self._delivery.drop(ticket)

    async def describe(self) -> dict[str, Any]:
        """The model as `/v1/models` shows it."""
        return {"created": self._created, "max_model_len": self._model.context}

    async def statistics(self) -> dict[str, Any]:
        """What the engine is doing now."""
        return asdict(self._engine.statistics)

    def check_health(self) -> None:
        """Raise RuntimeError where the engine's thread has ended or one step takes too long.

        Serve asks every few seconds, which is when the metrics follow, too.
        """
        self._metrics.update(self._engine.statistics)
        if not self._thread.is_alive():
            raise RuntimeError("the engine's thread has ended; its error is in this replica's log")
        began = self._engine.step_began
        since = time.monotonic() - began if began is not None else 0
        if since > self._options.stuck_after_s:
            raise RuntimeError(f"the engine has been in one step for {since:.0f} s")

    def __del__(self) -> None:
        # Serve calls this when the replica's requests are done.
        if hasattr(self, "_thread"):
            self._engine.stop()
            self._thread.join(timeout=10)
            self._pool.shutdown(wait=False)

    # ---- the engine's side

    def _run_engine(self, loaded: Future[Engine]) -> None:
        """Load the model and run its engine.

        Both on this thread: OpenMP keeps a team of threads for each thread that has computed, and where all teams
        together have more threads than the machine has cores, they sleep instead of spin between operations, which
        made a small model's steps half as long again.
        """
        try:
            engine = _load(self._options)
        except BaseException as error:  # noqa: BLE001 - raised again where the replica is being made
            loaded.set_exception(error)
            return
        loaded.set_result(engine)
        try:
            engine.run(lambda events: self._on_loop(self._delivery.deliver, events))
        except BaseException:
            logger.exception("the engine has ended")
            # Serve replaces the replica at its next health check; who waits here learns it now.
            self._on_loop(self._delivery.fail_all, ENGINE_ENDED)
            raise

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Go over from the engine's thread to the event loop, which is there once a job is."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call, *args)

    # ---- a job's way in

    async def _admit(self, job: Job, streamed: bool) -> Ticket:
        """Render, tokenize, check and queue a job.

        Raises:
            RequestError: It cannot be served as it is.
        """
        self._loop = asyncio.get_running_loop()
        wanted, room = max(1, len(job.prompts)) * job.n, self._options.max_running + self._options.max_queued
        if len(self._delivery) + self._preparing + wanted > room:
            raise RequestError(f"all {room} places of this replica are taken", None, "server_busy", 429)
        self._preparing += wanted
        try:
            choices = await self._loop.run_in_executor(self._pool, self._choices, job, streamed)
        finally:
            self._preparing -= wanted
        ticket = self._delivery.open(job, choices, streamed)
        if not self._thread.is_alive():  # after submitting: who came before its end is told by `fail_all`
            self._delivery.drop(ticket)
            raise RequestError(ENGINE_ENDED, None, "unavailable", 503)
        return ticket

    def _choices(self, job: Job, streamed: bool) -> dict[str, Choice]:
        """Everything that is to be done before the engine: off the event loop, since it takes time."""
        prompts, texts = self._prompts(job)
        points = self._model.points.resolve(job.capture) if job.capture else ()
        choices: dict[str, Choice] = {}
        for index in range(len(prompts) * job.n):
            request = self._request(job, index, prompts[index // job.n], points, streamed)
            if index % job.n == 0:
                self._engine.check(request)
                self._runs.check(request)
            reader = self._chat.reader(texts[index // job.n], job.tools) if job.tools else None
            run = self._runs.open(job, request) if job.capture else None
            choices[request.id] = Choice(index, request, reader, run)
        return choices

    def _prompts(self, job: Job) -> tuple[list[list[int]], list[str]]:
        """Each prompt's token ids, and its text where it is a chat's."""
        if job.messages is not None:
            text = self._chat.render(job.messages, job.tools)
            self._check_length(text)
            return [self._chat.tokenize(text)], [text]
        ids = []
        for prompt in job.prompts:
            if isinstance(prompt, str):
                self._check_length(prompt)
                prompt = self._model.tokenizer(prompt)["input_ids"]
            ids.append(prompt)
        return ids, [""] * len(ids)

    def _check_length(self, text: str) -> None:
        """Refuse a text before its tokens are counted, where the longest of tokens could not make it fit."""
        most = self._model.context * self._model.longest_token
        if len(text) > most:
            message = f"{len(text)} characters are more than this model's context of {self._model.context} tokens holds"
            raise RequestError(message, "prompt", "context_length_exceeded")

    def _request(self, job: Job, index: int, prompt: list[int], points: Any, streamed: bool) -> Request:
        max_tokens = job.max_tokens
        if max_tokens is None:
            max_tokens = self._engine.room(len(prompt))
        if job.capture and job.capture.mode == "trace":
            max_tokens = 0
        sampling = job.sampling
        if sampling.seed is not None and index % job.n:
            sampling = replace(sampling, seed=sampling.seed + index % job.n)
        return Request(
            id=f"{job.id}-{index}",
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=job.stop,
            stop_token_ids=job.stop_token_ids,
            ignore_eos=job.ignore_eos,
            logprobs=job.logprobs,
            capture=job.capture,
            points=points,
            streamed=streamed,
        )


def _load(options: Options) -> Engine:
    """The model in an engine, on this thread."""
    import torch

    from deployments.engine.engine import Engine
    from deployments.engine.model import load

    # Ray sets OMP_NUM_THREADS to the actor's CPUs, a fraction here, hence one thread.
    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // options.num_replicas))
    model = load(
        str(WEIGHTS) if options.model == DEMO else options.model,
        revision=options.revision,
        dtype=options.dtype,
        device=options.device,
        device_map=options.device_map,
        trust_remote_code=options.trust_remote_code,
        context=options.max_seq_len,
    )
    return Engine(
        model,
        max_running=options.max_running,
        prefill_tokens=options.prefill_tokens,
        kv_bytes=options.kv_bytes,
        kv_fraction=options.kv_fraction,
        capture_bytes=options.capture_memory_bytes,
    )


async def _gather(messages: asyncio.Queue[Message], deadline: float) -> list[Message]:
    """The next message, and all that are there already.

    Raises:
        TimeoutError: None came before the loop's clock said `deadline`.
    """
    async with asyncio.timeout_at(deadline):
        gathered = [await messages.get()]
    while not messages.empty():
        gathered.append(messages.get_nowait())
    return gathered
