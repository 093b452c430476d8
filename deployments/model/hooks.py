"""Reads and changes modules' values during a forward pass: one hook per place, for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from deployments.places.attention_patterns import showing
from deployments.places.hook_site import HookSite
from deployments.places.watching import first_tensor, listen, with_first

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
        self._standing = ExitStack()  # removes the hooks
        self._visit: Visit | None = None
        self._readers: Readers = {}

    def visit(self, places: Sequence[HookSite], visit: Visit, forward: Callable[[], Any], readers: Readers) -> Any:
        """Run a forward pass, and read and change values in it.

        `visit` is called with each of the places that the forward pass reaches and its value; it must copy what it
        keeps, because modules may overwrite theirs, and must not change the value itself.
        """
        self._stand_at(frozenset(places))
        self._visit, self._readers = visit, readers
        try:
            # A module may pass on what another one in it computes.
            attentions = [(self._hf.get_submodule(place.module), rows) for place, rows in readers.items()]
            with showing({module: rows for attention, rows in attentions for module in attention.modules()}):
                return forward()
        finally:
            self._visit = None

    def _stand_at(self, places: frozenset[HookSite]) -> None:
        if places == self._places:
            return
        self._standing.close()
        # Hooks of one module run in the order of registration. Its input is read after a change of the stream.
        in_order = sorted(places, key=lambda place: (place.order, place.stream is None))
        for place in in_order:
            module = self._hf.get_submodule(place.module)
            self._standing.enter_context(listen(module, place.side, partial(self._see, place)))
        self._places = places

    def _see(self, place: HookSite, value: Any) -> Any:
        """The replacement of the value in its original form; None to keep it."""
        if self._visit is None or value is None:
            return None
        if place.grows:
            if self._readers.get(place):
                self._visit(place, list(value))  # [heads, tokens, keys] each
            return None
        tensor = first_tensor(value)
        if tensor is None or (place.side == "logits" and tensor.shape[-1] != place.shape[-1]):
            return None  # of another linear map in the module
        new = self._visit(place, tensor)
        if new is None or new is tensor:
            return None
        if place.stream:
            tensor.copy_(new)  # the layer adds to the same tensor later
            return None
        return with_first(value, new)
