"""Reads and changes modules' values during a forward pass: one hook per place, for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deployments.places.attention_patterns import showing
from deployments.places.hook_site import HookSite
from deployments.places.watching import attention_weights, first_argument, first_tensor, with_first, with_first_argument

Visit = Callable[[HookSite, Any], torch.Tensor | None]  # returns the replacement of the value, or None
Readers = Mapping[HookSite, Sequence[int]]  # place of attention patterns -> spans of the forward pass, ascending


class Hooks:
    """torch's forward hooks at the places that recent forward passes have visited.

    An nnsight block over the whole batch reads the same values, but it intercepts the calls of all modules, which slows
    a small model's decode by a twentieth or more. Hooks only cost time at their places. nnsight is for clients' blocks.
    """

    def __init__(self, hf: torch.nn.Module) -> None:
        self._hf = hf
        self._places: frozenset[HookSite] = frozenset()
        self._handles: list[Any] = []
        self._visit: Visit | None = None
        self._readers: Readers = {}

    def visit(self, places: Sequence[HookSite], visit: Visit, forward: Callable[[], Any], readers: Readers) -> Any:
        """Run a forward pass, and read and change values in it.

        Args:
            places: The places to visit.
            visit: Called with each place that the forward pass reaches and its value; must copy what it keeps, because
                modules may overwrite theirs, and must not change the value itself.
            forward: Runs the model.
            readers: For each place of attention patterns, the spans that are visited.
        """
        self._stand_at(frozenset(places))
        self._visit, self._readers = visit, readers
        try:
            with showing({self._hf.get_submodule(place.module): rows for place, rows in readers.items()}):
                return forward()
        finally:
            self._visit = None

    def _stand_at(self, places: frozenset[HookSite]) -> None:
        if places == self._places:
            return
        for handle in self._handles:
            handle.remove()
        # Hooks of one module run in the order of registration. Its input is read after a change of the stream.
        in_order = sorted(places, key=lambda place: (place.order, place.stream is None))
        self._handles = [self._hook(place) for place in in_order]
        self._places = places

    def _hook(self, place: HookSite) -> Any:
        module = self._hf.get_submodule(place.module)

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            new = self._see(place, value := first_argument(args, kwargs))
            if new is None:
                return None
            if place.stream:
                value.copy_(new)  # the layer adds to the same tensor later
                return None
            return with_first_argument(args, kwargs, new)

        def weights(_: Any, args: tuple[Any, ...], output: Any) -> None:
            patterns, readers = attention_weights(output), self._readers.get(place, ())
            if patterns is not None and readers and self._visit is not None:
                self._visit(place, list(patterns))  # [heads, tokens, keys] each

        if place.side == "weights":
            return module.register_forward_hook(weights)
        if place.side == "input":
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(lambda _, args, output: self._see(place, output))

    def _see(self, place: HookSite, value: Any) -> Any:
        """The replacement of the value in its original form; None to keep it."""
        if self._visit is None or (tensor := first_tensor(value)) is None:
            return None
        new = self._visit(place, tensor)
        if new is None or new is tensor:
            return None
        return with_first(value, new)
