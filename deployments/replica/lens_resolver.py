"""Resolves the logit lens of a request for one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployments.engine.request import LensLayers, Request
from deployments.errors import RequestError
from deployments.places.points import Points
from deployments.points.logit_lens import LogitLens
from deployments.points.token_choices import Ends, Positions, Tokens, placed, resolve_ahead

NUMBERS_PER_ENTRY = 10  # numbers that an entry counts for: each is an object with text


class LensResolver:
    """Resolves requests for the logit lens for one model."""

    def __init__(self, points: Points, tokenize: Callable[[str], list[int]], vocabulary: int, limit: int) -> None:
        """Take a model's points.

        Args:
            points: The model's.
            tokenize: Makes tokens of a text, without special ones around it.
            vocabulary: How many tokens the model has.
            limit: How many numbers one answer may hold.
        """
        self._points = points
        self._tokenize = tokenize
        self._vocabulary = vocabulary
        self._limit = limit

    def of(self, spec: LogitLens | None) -> LensLayers | None:
        """Look up the layers, each once and in the model's order.

        Raises:
            RequestError: One is not there, or its output cannot be read, or a target is no token; names the field.
        """
        if spec is None:
            return None
        count, found = self._points.layer_count, {}
        for i, layer in enumerate(range(count) if spec.layers == "all" else spec.layers):
            field = "logit_lens.layers" if spec.layers == "all" else f"logit_lens.layers[{i}]"
            (found[layer % count],) = self._points.named(f"layers.{layer}.output", field)
        layers = sorted(found)
        points = tuple(found[layer] for layer in layers)
        if spec.targets == "last_layer":
            (last,) = self._points.named(f"layers.{count - 1}.output", "logit_lens.targets")
            return LensLayers(tuple(layers), points, spec.top_k, last=last)
        targets = tuple(self._target(one, f"logit_lens.targets[{i}]") for i, one in enumerate(spec.targets))
        return LensLayers(tuple(layers), points, spec.top_k, targets)

    def placed(self, lens: LensLayers, spec: LogitLens, prompt: int, new: int, ends: Ends) -> LensLayers:
        """The lens of one prompt.

        Args:
            lens: As `of` gave it.
            spec: The request's field.
            prompt: Tokens of the prompt.
            new: The most that are generated.
            ends: As `token_choices.placed` has it.

        Raises:
            RequestError: The prompt has no such tokens; names the field.
        """
        field = "logit_lens.tokens"
        choice = placed(spec.tokens or ("generated" if new else "prompt_last"), ends, field)
        tokens = resolve_ahead(choice, prompt, prompt + new, field)
        if isinstance(choice, Positions) and max(choice.positions) >= prompt:
            raise RequestError(f"the prompt has tokens 0 to {prompt - 1}; generated tokens come after them", field)
        among = tokens.of(prompt)
        chosen = Tokens(among[0], among[-1] + 1, tokens.few) if among else Tokens(0, 0)
        return lens._replace(prompt=chosen, generated=choice in ("all", "generated"))

    def _target(self, target: str | int, field: str) -> int:
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
        """Refuse more than an answer may hold.

        Args:
            requests: All choices of one job, which ask alike.

        Raises:
            RequestError: There could be more.
        """
        lens = requests[0].lens
        if lens is None:
            return
        tokens = sum(
            one.max_tokens * one.lens.generated + len(one.lens.prompt.within(0, len(one.prompt)))
            for one in requests
            if one.lens
        )
        each = lens.top_k + len(lens.targets) + (lens.last is not None)
        count = len(lens.layers) * each * tokens
        if count * NUMBERS_PER_ENTRY > self._limit:
            message = (
                f"{each} tokens in each of {len(lens.layers)} layers at up to {tokens} positions are {count} entries; "
                f"the limit is {self._limit // NUMBERS_PER_ENTRY}: request fewer, or set max_tokens"
            )
            raise RequestError(message, "logit_lens", "logit_lens_too_large")
