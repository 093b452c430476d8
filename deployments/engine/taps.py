"""Reading and changing modules' values while a forward runs: one hook a place, for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deployments.activations.points import Place
from deployments.activations.watching import attention_weights, first_tensor, with_first

Visit = Callable[[Place, torch.Tensor], torch.Tensor | None]  # gives what is to take the value's place, or nothing


class Taps:
    """torch's forward hooks at the places that the forwards of late have visited.

    An nnsight block over the whole batch reads the same values, but while one is open nnsight takes every module's
    call into its hands, read or not, which costs a small model's decode a twentieth and more; hooks cost the places
    they stand at. nnsight is for blocks that clients write.
    """

    def __init__(self, hf: torch.nn.Module) -> None:
        self._hf = hf
        self._places: frozenset[Place] = frozenset()
        self._handles: list[Any] = []
        self._visit: Visit | None = None

    def visit(self, places: Sequence[Place], visit: Visit, forward: Callable[[], Any]) -> Any:
        """Run a forward and read and change it on the way.

        Args:
            places: What to visit.
            visit: Called with each place that the forward comes to and its value when it is there; must copy what
                it keeps, since modules may write over theirs afterwards, and leave the value itself as it is.
            forward: Runs the model.
        """
        self._stand_at(frozenset(places))
        self._visit = visit
        try:
            return forward()
        finally:
            self._visit = None

    def rest(self) -> None:
        """Take the hooks away: nobody reads."""
        self._stand_at(frozenset())

    def _stand_at(self, places: frozenset[Place]) -> None:
        if places == self._places:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = [self._hook(place) for place in places]
        self._places = places

    def _hook(self, place: Place) -> Any:
        module = self._hf.get_submodule(place.module)

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            new = self._see(place, next(iter((*args, *kwargs.values())), None))
            if new is None:
                return None
            if args:
                return (new, *args[1:]), kwargs
            first, *others = kwargs
            return (), {first: new} | {name: kwargs[name] for name in others}

        def after(_: Any, args: tuple[Any, ...], output: Any) -> Any:
            return self._see(place, output)

        def weights(_: Any, args: tuple[Any, ...], output: Any) -> None:
            self._see(place, attention_weights(output))

        if place.side == "weights":
            return module.register_forward_hook(weights)
        if place.side == "input":
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after)

    def _see(self, place: Place, value: Any) -> Any:
        """What is to take the value's place, in its form; None for itself."""
        if self._visit is None or (tensor := first_tensor(value)) is None:
            return None
        new = self._visit(place, tensor)
        if new is None or new is tensor:
            return None
        return with_first(value, new)
