"""From the logit lens that a request asks for to the one that the engine reads through."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.activations.logit_lens import LogitLens
from deployments.activations.points import Points
from deployments.engine.request import Lens, Request
from deployments.errors import RequestError

WEIGHT = 10  # numbers that an entry counts for: each is an object with text


class Lensing:
    """One model's way from a lens asked for to its layers."""

    def __init__(self, points: Points, limit: int) -> None:
        """Take a model's points, and how many numbers one answer may hold."""
        self._points = points
        self._limit = limit

    def of(self, spec: LogitLens | None) -> Lens | None:
        """Look up the layers, each once and in the model's order.

        Raises:
            RequestError: One is not there, or its output cannot be read; names the field.
        """
        if spec is None:
            return None
        count, found = self._points.layer_count, {}
        for i, layer in enumerate(range(count) if spec.layers == "all" else spec.layers):
            field = "logit_lens.layers" if spec.layers == "all" else f"logit_lens.layers[{i}]"
            (found[layer % count],) = self._points.named(f"layers.{layer}.output", field)
        layers = sorted(found)
        return Lens(tuple(layers), tuple(found[layer] for layer in layers), spec.top_k)

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse more than an answer may hold.

        Args:
            requests: All choices of one job, which ask alike.

        Raises:
            RequestError: There could be more.
        """
        lens = requests[0].lens
        if lens is None:
            return
        tokens = sum(request.max_tokens for request in requests)
        count = len(lens.layers) * lens.top_k * tokens
        if count * WEIGHT > self._limit:
            message = (
                f"{lens.top_k} tokens of {len(lens.layers)} layers for each of up to {tokens} generated ones are "
                f"{count} in one answer, the limit is {self._limit // WEIGHT}: ask for fewer, or set max_tokens"
            )
            raise RequestError(message, "logit_lens", "logit_lens_too_large")
