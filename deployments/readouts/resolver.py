"""Resolves the readouts of a request for one model: values to compute, gates, and conditions that end an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from deployments.errors import RequestError
from deployments.places.hook_site import Point
from deployments.places.points import Points
from deployments.points.token_choices import Ends, Tokens, farthest, placed, resolve
from deployments.readouts.gates import Gate, Source
from deployments.readouts.sequence import ResolvedReadout
from deployments.readouts.spec import DEFAULT_TOP_K, AskedReadout, Condition
from deployments.readouts.values import Readout


class ReadoutResolver:
    """The readouts that a request's fields name."""

    def __init__(self, sources: Mapping[str, tuple[Source, Point]], asked: Mapping[str, AskedReadout]) -> None:
        """Initialize with the resolved readouts.

        Args:
            sources: By their names, with their points.
            asked: The readouts whose values the request wants; conditions refer to these.
        """
        self._sources = sources
        self._asked = asked

    @classmethod
    def of(cls, points: Points, held: Mapping[str, Readout], asked: Sequence[AskedReadout]) -> ReadoutResolver:
        """Look up the points.

        Args:
            points: The model's points.
            held: Every readout that the request names.
            asked: The readouts whose values it wants.

        Raises:
            RequestError: The model has no such point, or rows of another length there.
        """
        fields = {one.name: f"readouts[{i}]" for i, one in enumerate(asked)}
        sources = {}
        for name, readout in held.items():
            field = fields.get(name, "interventions")
            point = point_of(points, readout.spec.point, readout.hidden, field)
            sources[name] = Source(readout, point.place, name), point
        return cls(sources, {one.name: one for one in asked})

    def values(self, prompt: int, most: int, ends: Ends) -> tuple[ResolvedReadout, ...]:
        """The readouts of a sequence.

        Args:
            prompt: Tokens of its prompt.
            most: Tokens of its prompt and the most that are generated.
            ends: As `token_choices.placed` has it.

        Raises:
            RequestError: It cannot have such tokens, or features of a readout without any; names the field.
        """
        found = []
        for i, one in enumerate(self._asked.values()):
            field = f"readouts[{i}]"
            source, _ = self._sources[one.name]
            is_sae = source.readout.spec.kind == "sae"
            if one.top_k is not None and not is_sae:
                raise RequestError(f"{one.name} has no features to choose from: leave top_k out", f"{field}.top_k")
            choice = placed(one.tokens, ends, f"{field}.tokens")
            tokens = resolve(choice, prompt, f"{field}.tokens")
            if farthest(choice) >= most:
                raise RequestError(f"prompt and answer have positions 0 to {most - 1}", f"{field}.tokens")
            found.append(ResolvedReadout(source, tokens, (one.top_k or DEFAULT_TOP_K) if is_sae else None))
        return tuple(found)

    def autoencoder(self, name: str, field: str) -> tuple[Source, Point]:
        """An autoencoder and its point.

        Raises:
            RequestError: The readout is not an autoencoder.
        """
        source, point = self._sources[name]
        if source.readout.spec.kind != "sae":
            raise RequestError(f"{name} is not a sparse autoencoder", field)
        return source, point

    def gate(self, condition: Condition, point: Point, tokens: Tokens, prompt: int, field: str) -> Gate:
        """The gate of one edit.

        Args:
            condition: The condition in the request.
            point: The edit's point.
            tokens: The edit's tokens.
            prompt: The number of prompt tokens.
            field: The condition's field.

        Raises:
            RequestError: It refers to a readout that the request does not use, or acts too late for the prompt's
                tokens.
        """
        source, column = self._value(condition, field)
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

        Raises:
            RequestError: It refers to a readout that the request does not use.
        """
        return Gate(*self._value(condition, field), condition, Tokens(prompt - 1))

    def _value(self, condition: Condition, field: str) -> tuple[Source, int]:
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
        return source, column


def point_of(points: Points, name: str, hidden: int, field: str) -> Point:
    """The point that a readout reads.

    Raises:
        RequestError: The model has none of the name, or rows of another length there.
    """
    found = points.named(name, field)
    if len(found) != 1:
        raise RequestError(f"{name} matches {len(found)} points, but a readout reads only one", field)
    if not found[0].place.dtype.is_floating_point:
        raise RequestError(f"{name} holds no activations", field)
    if (width := math.prod(found[0].shape)) != hidden:
        message = f"the readout needs rows of {hidden} entries, but those of {name} have {width}"
        raise RequestError(message, field, "wrong_size")
    return found[0]
