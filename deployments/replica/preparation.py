"""Converts a job to engine requests: prompts, points, tensors, readouts, grammars, and the operator's limits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from deployments.chat.prompts import Prompts
from deployments.chat.reader import AnswerReader
from deployments.chat.template import ChatFormat, ResponseFormats
from deployments.engine.engine import Engine
from deployments.engine.request import LensLayers, Request
from deployments.errors import RequestError, naming
from deployments.interventions.resolve import EditResolver
from deployments.interventions.stored_tensors import FetchedTensors, StoredTensors
from deployments.job import Job, Text
from deployments.messages import Piece
from deployments.model.attribution import By, attribute, check_length
from deployments.options import Options
from deployments.places.points import Points
from deployments.points.capture import MOST_INLINE_VALUES
from deployments.points.interventions import ChangeFeature
from deployments.points.logit_lens import LogitLens
from deployments.points.placement import Layout, placed
from deployments.points.token_choices import Tokens, Window, farthest, resolve_ahead
from deployments.readouts.monitors import MonitorSet
from deployments.readouts.resolver import NamedReadout, ReadoutCache, ReadoutResolver, point_of
from deployments.readouts.values import FittedLens, Readout
from deployments.replica.delivery import Charge, RunningChoice
from deployments.replica.monitoring import Monitors
from deployments.replica.runs import Runs
from deployments.turns import Turns

MOST_ENTRIES = MOST_INLINE_VALUES // 10  # of an answer; an entry is an object with text


class Preparation:
    """Makes a job's requests, and rejects jobs that cannot be served.

    Args:
        options: The operator's options.
        engine: The engine with the model.
        chat: The model's chat format.
        prompts: Makes the prompts of jobs.
        runs: The interface to the activation store.
        store: The activation store's handle, for tensors and readouts.
        reader: The handle of the store's reader, for stored rows.
        pool: Executes the work outside the event loop.
    """

    def __init__(
        self,
        options: Options,
        engine: Engine,
        chat: ChatFormat,
        prompts: Prompts,
        runs: Runs,
        *,
        store: Any,
        reader: Any,
        pool: Executor,
    ) -> None:
        self._options = options
        self._engine = engine
        self._model = engine.model
        self._chat = chat
        self._prompts = prompts
        self._runs = runs
        self._pool = pool
        self._attributions = Turns("attributions", most_waiting=1)
        self._attribute_at = 0.0  # monotonic seconds of the next one while requests run
        points = self._model.points
        self._response_formats = ResponseFormats(chat, self._model)
        self._lens_resolver = LensResolver(points, prompts.inner_ids, self._model.vocabulary)
        self._stored_tensors = StoredTensors(points, store, reader, options.max_request_tensor_bytes)
        self._readouts = ReadoutCache(
            options.served_name,
            self._model.device,
            store,
            options.max_request_tensor_bytes,
            pool,
            self._model.batch_invariant,
        )
        self._monitors = Monitors(options.monitors, options.served_name, points, self._readouts)
        # Special tokens are not in the text, where a stop string would be looked for.
        added = self._model.tokenizer.added_tokens_decoder.items()
        self._special = {token.content: id for id, token in added if token.special and id < self._model.vocabulary}
        self._edit_resolver = functools.partial(EditResolver, points, self._model.device)

    @contextlib.contextmanager
    def lending(self, job_id: str) -> Iterator[None]:
        """Keep the tensors and readouts that a job fetches in the block until the job ends."""
        with self._stored_tensors.lending(job_id), self._readouts.lending(job_id):
            yield

    async def choices(self, job: Job, streamed: bool) -> dict[str, RunningChoice]:
        """A job's choices by the ids of their requests.

        Raises:
            RequestError: The job cannot be served.
        """
        fetched = await self._stored_tensors.fetch(job)
        held = await self._readouts.fetch(job.id, _named_readouts(job))
        fitted = await self._fitted(job)
        loop = asyncio.get_running_loop()
        monitors = await self._monitors.of(job)  # whatever the job's fields and presets say
        prepare = functools.partial(self._choices, job, fetched, held, fitted, monitors, streamed)
        choices = await loop.run_in_executor(self._pool, prepare)
        await self._runs.check_room(job, [choice.request for choice in choices.values()])
        return choices

    async def check(self, job: Job) -> None:
        """Reject a job without prompts whose captures, interventions, readouts or lens do not fit the model.

        Raises:
            RequestError: They do not fit.
        """
        with self.lending(job.id):
            fetched = await self._stored_tensors.fetch(job)
            used = ReadoutResolver.of(
                self._model.points, await self._readouts.fetch(job.id, _named_readouts(job)), job.readouts
            )
            if job.stop_when:
                used.stop(job.stop_when, prompt=1)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, self._edit_resolver, job.all_changes, fetched, used)
            self._lens_resolver.of(job.logit_lens, await self._fitted(job))
        if job.capture:
            self._model.points.resolve(job.capture)

    async def _fitted(self, job: Job) -> FittedLens | None:
        """The fitted lens that a job names; None if it names none."""
        if not job.logit_lens or job.logit_lens.lens is None:
            return None
        return await self._readouts.fetch_lens(job.id, job.logit_lens.lens, job.reader("logit_lens.lens"))

    async def attribute(
        self, text: Text, targets: Sequence[str | int], by: By, owner: str | None, charge: Charge
    ) -> dict[str, Any]:
        """The parts of a logit after a text, or of the difference of two, as the answer has them.

        One is computed at a time, owners take turns, and running requests get twice its time before the next one.

        Raises:
            RequestError: The model has no such parts or tokens, or another attribution of the owner waits.
        """
        ids = [self._lens_resolver.target(target, f"targets[{i}]") for i, target in enumerate(targets)]
        with self._attributions.place(owner):
            tokens = await asyncio.get_running_loop().run_in_executor(self._pool, self._prompts.tokenize, text)
            check_length(tokens["tokens"])
            async with self._attributions.turn(owner):
                if self._engine.has_requests:
                    await asyncio.sleep(self._attribute_at - time.monotonic())
                call = self._engine.call(functools.partial(self._attribute, tokens["tokens"], ids, by))
                try:
                    logit, parts = await asyncio.wrap_future(call)
                finally:
                    if not call.done():  # the client left: what runs still has the turn
                        await asyncio.wait([asyncio.wrap_future(call)])
                    if not call.cancelled():
                        charge(owner, tokens["count"], 0)
        return {"logit": logit, "parts": [{"name": name, "values": values} for name, values in parts.items()]}

    def _attribute(self, *args: Any) -> tuple[float, dict[str, list[float]]]:
        began = time.monotonic()
        try:
            return attribute(self._model, *args)
        finally:
            self._attribute_at = time.monotonic() + 2 * (time.monotonic() - began)

    def _choices(
        self,
        job: Job,
        fetched: FetchedTensors,
        held: Mapping[str, Readout],
        fitted: FittedLens | None,
        monitors: MonitorSet | None,
        streamed: bool,
    ) -> dict[str, RunningChoice]:
        """All preparation that takes time and so runs outside the event loop."""
        prompts = self._prompts.of(job)
        if job.capture:
            job.capture.check_prompts(len(prompts))
        points = self._model.points.resolve(job.capture) if job.capture else ()
        lens = self._lens_resolver.of(job.logit_lens, fitted)
        used = ReadoutResolver.of(self._model.points, held, job.readouts)
        resolver = self._edit_resolver(job.all_changes, fetched, used, job.report)
        chat = self._chat.calling(job.tool_call_format)
        texts = ["" if job.ending == "turn" else prompt.text or "" for prompt in prompts]  # begin the answers
        grammars = [self._response_formats.grammar(job, text) for text in texts]
        choices: dict[str, RunningChoice] = {}
        for index in range(len(prompts) * job.n):
            at = index // job.n
            with naming(at, len(prompts)):
                prompt = prompts[at]
                reader: AnswerReader | None = None
                if job.messages is not None:
                    reader = chat.reader(texts[at], job.tools, job.parallel_calls, streamed)
                request = self._request(job, index, prompt.ids, points, streamed)
                if index % job.n == 0:
                    ends = functools.cache(functools.partial(self._prompts.offsets, prompt))
                    turns = functools.cache(functools.partial(self._prompts.turns, job, prompt, request.max_tokens > 0))
                follow = functools.partial(self._prompts.reasoning, job, prompt)
                of_chat = turns if job.messages is not None else None
                layout = Layout(ends, len(prompt.ids), request.max_tokens > 0, of_chat, follow)
                request = replace(request, capture=job.capture and job.capture.placed(layout))
                changes, most = job.changes(index % job.n), len(prompt.ids) + request.max_tokens
                edits = resolver.of(changes, len(prompt.ids), most, layout)
                markers = chat.markers(job.tools) if reader else {}
                seen = lens
                if lens and job.logit_lens:
                    seen = self._lens_resolver.placed(lens, job.logit_lens, len(prompt.ids), request.max_tokens, layout)
                asked = used.values(len(prompt.ids), most, layout)
                stop = used.stop(job.stop_when, len(prompt.ids)) if job.stop_when else None
                request = replace(request, grammar=grammars[at], markers=markers, edits=edits, lens=seen)
                request = replace(request, readouts=asked, stop_when=stop, monitors=monitors, parts=layout.parts)
                if index % job.n == 0:
                    self._engine.check(request)
                    echo = self._prompts.echo(prompt) if job.echo else None
                run = self._runs.open(job, request, index, layout) if job.capture else None
                prompt_ids = tuple(prompt.ids) if job.token_ids else ()
                first = Piece(index, echo.text if echo else "", prompt_ids=prompt_ids, lens=[] if seen else None)
                choices[request.id] = RunningChoice(request, first, reader, run, echo)
        requests = [choice.request for choice in choices.values()]
        self._runs.check(requests)
        self._lens_resolver.check(requests)
        _check_readouts_size(requests)
        _check_logprobs_size(job.logprobs, requests)
        return choices

    def _request(self, job: Job, index: int, prompt: list[int], points: Any, streamed: bool) -> Request:
        max_tokens = job.max_tokens
        if max_tokens is None:
            max_tokens = self._engine.room(len(prompt))
        if job.capture and job.capture.mode == "trace":
            max_tokens = 0
        sampling = job.sampling
        if sampling.seed is not None and index % job.n and not job.variants:
            sampling = replace(sampling, seed=sampling.seed + index % job.n)
        return Request(
            id=f"{job.id}-{index}",
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=job.stop,
            stop_token_ids=job.stop_token_ids
            + tuple(self._special[text] for text in job.stop if text in self._special),
            ignore_eos=job.ignore_eos,
            logprobs=0 if job.ranked and job.logprobs is None else job.logprobs,
            prompt_logprobs=job.logprobs if job.echo else None,
            points=points,
            continues=job.messages is None or job.ending == "message",
            streamed=streamed,
            owner=job.account.owner,
        )


def _named_readouts(job: Job) -> dict[str, NamedReadout]:
    """The readouts that a job's fields name."""
    names = {asked.name: f"readouts[{i}].name" for i, asked in enumerate(job.readouts)}
    fields = dict[str, str]()
    for field, condition in job.conditions.items():
        if condition.readout not in names:
            message = f"the request does not use the readout {condition.readout!r}: name it in readouts"
            raise RequestError(message, f"{field}.readout", "readout_not_used")
        fields[f"{field}.readout"] = condition.readout
    for field, spec in job.all_changes.items():
        if isinstance(spec, ChangeFeature):
            fields[f"{field}.sae"] = spec.sae
    for field, name in fields.items():
        if job.reader(names.setdefault(name, field)) != job.reader(field):
            message = f"the preset's readout {name!r} is another one than that of {names[name]}: leave out one of them"
            raise RequestError(message, field, "readout_not_used")
    return {name: NamedReadout(field, job.reader(field)) for name, field in names.items()}


def _check_readouts_size(requests: Sequence[Request]) -> None:
    """Reject requests whose answer could have more numbers than `MOST_INLINE_VALUES`.

    Raises:
        RequestError: It could have more.
    """
    count = 0
    for request in requests:
        most = len(request.prompt) + request.max_tokens
        for readout in request.readouts:
            count += len(readout.tokens.of(most)) * readout.width * (2 if readout.top_k else 1)
    if count > MOST_INLINE_VALUES:
        message = (
            f"up to {count} numbers would be returned; the limit is {MOST_INLINE_VALUES}: choose fewer tokens, or set "
            "max_tokens"
        )
        raise RequestError(message, "readouts", "readouts_too_large")


def _check_logprobs_size(top: int | None, requests: Sequence[Request]) -> None:
    """Reject requests whose answer could have more logprobs than `MOST_INLINE_VALUES`, `top` more for each token.

    Raises:
        RequestError: It could have more.
    """
    if top is None:
        return
    scored = sum(len(request.prompt) for request in requests if request.prompt_logprobs is not None)
    count = (scored + sum(request.max_tokens for request in requests)) * (top + 1)
    if count > MOST_INLINE_VALUES:
        message = (
            f"up to {count} logprobs would be returned; the limit is {MOST_INLINE_VALUES}: request fewer alternatives "
            "or choices, or set max_tokens"
        )
        raise RequestError(message, "logprobs", "logprobs_too_large")


class LensResolver:
    """Resolves logit lens requests for one model."""

    def __init__(self, points: Points, tokenize: Callable[[str], list[int]], vocabulary: int) -> None:
        """`tokenize` gives a text's token ids without special tokens; `vocabulary` is the model's number of tokens."""
        self._points, self._tokenize, self._vocabulary = points, tokenize, vocabulary

    def of(self, spec: LogitLens | None, fitted: FittedLens | None = None) -> LensLayers | None:
        """Resolve the layers, each once and in the model's order.

        Raises:
            RequestError: A layer does not exist or cannot be read, a target is no token, or the fitted lens has other
                layers or rows than the model; names the field.
        """
        if spec is None:
            return None
        if fitted:
            point_of(self._points, fitted.needs, fitted.hidden, "logit_lens.lens")
        count, by_layer = self._points.layer_count, {}
        for i, layer in enumerate(range(count) if spec.layers == "all" else spec.layers):
            field = "logit_lens.layers" if spec.layers == "all" else f"logit_lens.layers[{i}]"
            (by_layer[layer % count],) = self._points.named(f"layers.{layer}.output", field)
        layers = sorted(by_layer)
        points = tuple(by_layer[layer] for layer in layers)
        if spec.targets == "last_layer":
            (last,) = self._points.named(f"layers.{count - 1}.output", "logit_lens.targets")
            return LensLayers(tuple(layers), points, spec.top_k, last=last, fitted=fitted)
        targets = tuple(self.target(target, f"logit_lens.targets[{i}]") for i, target in enumerate(spec.targets))
        return LensLayers(tuple(layers), points, spec.top_k, targets, fitted=fitted)

    def placed(self, lens: LensLayers, spec: LogitLens, prompt: int, new: int, layout: Layout) -> LensLayers:
        """Resolve the result of `of` for a prompt of `prompt` tokens and at most `new` further ones.

        Raises:
            RequestError: The prompt does not have these tokens; names the field.
        """
        field = "logit_lens.tokens"
        choice = placed(spec.tokens or ("generated" if new else "prompt_last"), layout, field)
        tokens = resolve_ahead(choice, prompt, prompt + new, field)
        if farthest(choice) >= prompt:
            raise RequestError(f"the prompt has tokens 0 to {prompt - 1}; generated tokens come after them", field)
        among = tokens.of(prompt)
        chosen = Tokens(among[0], among[-1] + 1, tokens.few) if among else Tokens(0, 0)
        by_role = isinstance(choice, Tokens) and choice.stop is None
        is_open = by_role or (isinstance(choice, Window) and choice.to is None)
        return lens._replace(prompt=chosen, generated=is_open or choice in ("all", "generated"), part=tokens.part)

    def target(self, target: str | int, field: str) -> int:
        """The id of a token that is given by id or text; RequestError, which names the field, if it is not one."""
        if isinstance(target, int):
            if target >= self._vocabulary:
                raise RequestError(f"token ids go from 0 to {self._vocabulary - 1}", field)
            return target
        ids = self._tokenize(target)
        if len(ids) != 1:
            message = f"{target!r} is {len(ids)} tokens ({', '.join(map(str, ids[:8]))}): a target is one token"
            raise RequestError(message, field, "not_one_token")
        return ids[0]

    def check(self, requests: Sequence[Request]) -> None:
        """Reject all choices of one job, which have the same lens, if the answer could exceed `MOST_ENTRIES`.

        Raises:
            RequestError: The answer could exceed it.
        """
        lens = requests[0].lens
        if lens is None:
            return
        tokens = sum(
            request.max_tokens * request.lens.generated + len(request.lens.prompt.within(0, len(request.prompt)))
            for request in requests
            if request.lens
        )
        each = lens.top_k + len(lens.targets) + (lens.last is not None)
        count = len(lens.layers) * each * tokens
        if count > MOST_ENTRIES:
            message = (
                f"{each} tokens in each of {len(lens.layers)} layers at up to {tokens} positions are {count} entries; "
                f"the limit is {MOST_ENTRIES}: request fewer, or set max_tokens"
            )
            raise RequestError(message, "logit_lens", "logit_lens_too_large")
