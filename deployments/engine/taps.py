"""Reading modules' values while a forward runs: one hook a place, for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deployments.activations.points import Place
from deployments.activations.watching import first_tensor

Take = Callable[[Place, torch.Tensor], None]


class Taps:
    """torch's forward hooks at the places that the forwards of late have read.

    An nnsight block over the whole batch reads the same values, but while one is open nnsight takes every module's
    call into its hands, read or not, which costs a small model's decode a twentieth and more; hooks cost the places
    they stand at. nnsight is for blocks that clients write.
    """

    def __init__(self, hf: torch.nn.Module) -> None:
        self._hf = hf
        self._places: frozenset[Place] = frozenset()
        self._handles: list[Any] = []
        self._take: Take | None = None

    def read(self, places: Sequence[Place], take: Take, forward: Callable[[], Any]) -> Any:
        """Run a forward and read it on the way.

        Args:
            places: What to read.
            take: Called with each place that the forward comes to and its value when it is there; must copy what
                it keeps, since modules may write over theirs afterwards.
            forward: Runs the model.
        """
        self._stand_at(frozenset(places))
        self._take = take
        try:
            return forward()
        finally:
            self._take = None

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

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._see(place, next(iter((*args, *kwargs.values())), None))

        def after(_: Any, args: tuple[Any, ...], output: Any) -> None:
            self._see(place, output)

        if place.side == "input":
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after)

    def _see(self, place: Place, value: Any) -> None:
        if self._take is not None and (tensor := first_tensor(value)) is not None:
            self._take(place, tensor)
