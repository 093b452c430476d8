"""Resolves the readouts of a request for one model: values to compute, gates, and conditions that end an answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import torch

from deployments.accounts import Account
from deployments.conditions import Condition
from deployments.errors import RequestError
from deployments.places.hook_site import Point
from deployments.places.points import Points
from deployments.points.placement import Layout, placed
from deployments.points.token_choices import Tokens, farthest, resolve
from deployments.readouts.files import define, define_lens
from deployments.readouts.gates import Gate, Source
from deployments.readouts.sequence import ResolvedReadout
from deployments.readouts.spec import DEFAULT_TOP_K, AskedReadout
from deployments.readouts.values import FittedLens, Readout


class ReadoutResolver:
    """The readouts that a request's fields name."""

    def __init__(self, sources: Mapping[str, tuple[Source, Point]], asked: Mapping[str, AskedReadout]) -> None:
        """`sources` has the readouts by name; the request wants the values of `asked`, which conditions refer to."""
        self._sources, self._asked = sources, asked

    @classmethod
    def of(cls, points: Points, held: Mapping[str, Readout], asked: Sequence[AskedReadout]) -> ReadoutResolver:
        """Look up the points of every readout that a request names, of which it wants the values of `asked`.

        RequestError if the model has no such point, or rows of another length there.
        """
        fields = {wanted.name: f"readouts[{i}]" for i, wanted in enumerate(asked)}
        sources = {}
        for name, readout in held.items():
            field = fields.get(name, "interventions")
            point = point_of(points, readout.spec.point, readout.hidden, field)
            sources[name] = Source(readout, point.place, name), point
        return cls(sources, {wanted.name: wanted for wanted in asked})

    def values(self, prompt: int, most: int, layout: Layout) -> tuple[ResolvedReadout, ...]:
        """The readouts of a sequence with `prompt` tokens, and `most` with those that are generated.

        RequestError, which names the field, if it cannot have such tokens, or features of a readout without any.
        """
        resolved = []
        for i, asked in enumerate(self._asked.values()):
            field = f"readouts[{i}]"
            source, _ = self._sources[asked.name]
            is_sae = source.readout.spec.kind == "sae"
            if asked.top_k is not None and not is_sae:
                raise RequestError(f"{asked.name} has no features to choose from: leave top_k out", f"{field}.top_k")
            choice = placed(asked.tokens, layout, f"{field}.tokens")
            tokens = resolve(choice, prompt, f"{field}.tokens")
            if farthest(choice) >= most:
                raise RequestError(f"prompt and answer have positions 0 to {most - 1}", f"{field}.tokens")
            resolved.append(ResolvedReadout(source, tokens, (asked.top_k or DEFAULT_TOP_K) if is_sae else None))
        return tuple(resolved)

    def autoencoder(self, name: str, field: str) -> tuple[Source, Point]:
        """An autoencoder and its point; RequestError if the readout is none."""
        source, point = self._sources[name]
        if source.readout.spec.kind != "sae":
            raise RequestError(f"{name} is not a sparse autoencoder", field)
        return source, point

    def gate(self, condition: Condition, point: Point, tokens: Tokens, prompt: int, field: str) -> Gate:
        """The gate of an edit of these tokens at this point; `prompt` is the number of prompt tokens.

        RequestError if it does not fit the request's readouts, or acts too late for the prompt's tokens.
        """
        source, column = self.value(condition, field)
        lag = int(source.place.order > point.place.order)
        if lag and tokens.first < prompt:
            message = (
                f"{condition.readout} is read after {point.name}, so the gate acts on the next token's row: "
                "choose generated tokens"
            )
            raise RequestError(message, field, "gate_too_late")
        return Gate(source, column, condition, tokens, lag, here=source.place == point.place)

    def stop(self, condition: Condition, prompt: int, field: str = "stop_when") -> Gate:
        """The condition that ends a sequence's answer; it reads from the row that predicts the first new token.

        RequestError if it does not fit the request's readouts.
        """
        return Gate(*self.value(condition, field), condition, Tokens(prompt - 1))

    def value(self, condition: Condition, field: str) -> tuple[Source, int]:
        """The readout of a condition, and the index of its value.

        RequestError if it does not fit the request's readouts.
        """
        if condition.readout not in self._asked:
            message = f"the request does not use the readout {condition.readout!r}: name it in readouts"
            raise RequestError(message, f"{field}.readout", "readout_not_used")
        source, _ = self._sources[condition.readout]
        readout = source.readout
        column = readout.column(condition.feature, condition.label)
        if column is None:
            has = f"labels {', '.join(readout.spec.labels)}" if readout.spec.labels else f"{readout.count} values"
            name = "label" if condition.label is not None else "feature"
            raise RequestError(f"{condition.readout} has {has}: name one of them", f"{field}.{name}")
        side, limit = ("below", condition.below) if condition.above is None else ("above", condition.above)
        if readout.spec.activation == "sigmoid" and limit is not None and not 0 <= limit <= 1:
            message = f"the values of {condition.readout} are probabilities: choose a number from 0 to 1"
            raise RequestError(message, f"{field}.{side}")
        return source, column


def point_of(points: Points, name: str, hidden: int, field: str) -> Point:
    """The point that a readout reads; RequestError if there is none, or its rows have another length."""
    matching = points.named(name, field)
    if len(matching) != 1:
        raise RequestError(f"{name} matches {len(matching)} points, but a readout reads only one", field)
    if not matching[0].place.dtype.is_floating_point:
        raise RequestError(f"{name} holds no activations", field)
    if (width := math.prod(matching[0].shape)) != hidden:
        message = f"the readout or lens needs rows of {hidden} entries, but those of {name} have {width}"
        raise RequestError(message, field, "wrong_size")
    return matching[0]


MOST_NAMED = 100  # in a message
# By what the store calls them: a word for one, its definition from the bytes of a file, and its class.
KINDS: dict[str, tuple[str, Callable[[bytes], Any], type[Readout | FittedLens]]] = {
    "readouts": ("readout", define, Readout),
    "lenses": ("lens", define_lens, FittedLens),
}


class NamedReadout(NamedTuple):
    """The field of a request that names a readout, and the account that may read it."""

    field: str
    reader: Account


class ReadoutCache:
    """The readouts and fitted lenses used last; those of running requests are kept."""

    def __init__(
        self,
        model: str,
        device: torch.device,
        store: Any,
        most: int,
        pool: Executor,
        batch_invariant: bool = False,
    ) -> None:
        """An empty cache of at most `most` bytes for the model of this id; `store` is the activation store's actor."""
        self._model, self._device, self._store, self._most, self._pool = model, device, store, most, pool
        self._batch_invariant = batch_invariant
        self._held: OrderedDict[str, Readout | FittedLens] = OrderedDict()  # by id
        self._used: dict[str, set[str]] = {}  # job -> ids
        self._bringing = asyncio.Lock()

    @contextlib.contextmanager
    def lending(self, job: str) -> Iterator[None]:
        """Keep a job's readouts until the job ends."""
        self._used[job] = set()
        try:
            yield
        finally:
            self._used.pop(job, None)

    async def fetch(self, job: str, named: Mapping[str, NamedReadout]) -> dict[str, Readout]:
        """The readouts that the job of this id names, by their names.

        Raises:
            RequestError: A readout does not exist, is for another model, or does not fit; names the field.
            StoreError: The disk fails.
        """
        return {name: await self._fetch("readouts", job, name, of) for name, of in named.items()}

    async def fetch_lens(self, job: str, name: str, reader: Account) -> FittedLens:
        """The fitted lens that the job of this id names; raises as `fetch`."""
        lens: FittedLens = await self._fetch("lenses", job, name, NamedReadout("logit_lens.lens", reader))
        return lens

    async def _fetch(self, kind: str, job: str, name: str, named: NamedReadout) -> Any:
        (noun, define, made), (field, reader) = KINDS[kind], named
        known: Mapping[str, Any] | None = await self._store.client_data.remote(kind, "get", name, reader)
        if known is None or known["model"] != self._model:
            wrong = f"there is no {noun} {name!r}"
            if known:
                wrong = f"the {noun} {name!r} is for the model {known['model']!r}"
            listed = await self._store.client_data.remote(kind, "list", MOST_NAMED, None, reader)
            others = ", ".join(one["name"] for one in listed if one["model"] == self._model)
            raise RequestError(f"{wrong}; for {self._model!r} there is: {others or 'none'}", field, f"{noun}_not_found")
        id = known["id"]
        async with self._bringing:
            if id not in self._held:
                data: bytes | None = await self._store.client_data.remote(kind, "read", name, reader)
                if data is None:  # deleted meanwhile
                    raise RequestError(f"there is no {noun} {name!r}", field, f"{noun}_not_found")
                self._make_room(len(data), job, field)
                self._held[id] = await asyncio.get_running_loop().run_in_executor(
                    self._pool, lambda: made(define(data), self._device, self._batch_invariant)
                )
                self._make_room(0, job, field, keep=id)
            self._held.move_to_end(id)
            self._used.setdefault(job, set()).add(id)
            return self._held[id]

    def _make_room(self, size: int, job: str, field: str, keep: str | None = None) -> None:
        """Drop readouts that no request uses, the oldest first, until `size` more bytes fit."""
        used = {id for ids in self._used.values() for id in ids} | {keep}
        for id in [id for id in self._held if id not in used]:
            if self._bytes + size <= self._most:
                return
            del self._held[id]
        if self._bytes + size <= self._most:
            return
        if keep:
            size += self._held.pop(keep).bytes
        own = sum(self._held[id].bytes for id in self._used.get(job, ()))
        if own + size > self._most or own == self._bytes:
            limit = f"the server's max_request_tensor_bytes is {self._most}"
            message = f"the request's readouts and lens take {own + size} bytes or more; {limit}"
            raise RequestError(message, field, "readouts_too_large")
        message = "other requests' readouts and lenses take the memory that this one needs: try again later"
        raise RequestError(message, field, "server_busy", 429)

    @property
    def _bytes(self) -> int:
        return sum(readout.bytes for readout in self._held.values())
