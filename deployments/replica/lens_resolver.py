"""Resolves a request's logit lens for one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployments.engine.request import LensLayers, Request
from deployments.errors import RequestError
from deployments.places.points import Points
from deployments.points.capture import MOST_INLINE_VALUES
from deployments.points.logit_lens import LogitLens
from deployments.points.token_choices import Ends, Positions, Tokens, placed, resolve_ahead

MOST_ENTRIES = MOST_INLINE_VALUES // 10  # of an answer; an entry is an object with text


class LensResolver:
    """Resolves logit lens requests for one model."""

    def __init__(self, points: Points, tokenize: Callable[[str], list[int]], vocabulary: int) -> None:
        """Initialize the resolver.

        Args:
            points: The model's points.
            tokenize: Tokenizes a part of a text.
            vocabulary: The number of tokens of the model.
        """
        self._points = points
        self._tokenize = tokenize
        self._vocabulary = vocabulary

    def of(self, spec: LogitLens | None) -> LensLayers | None:
        """Resolve the layers, each once and in the model's order.

        Raises:
            RequestError: A layer does not exist or cannot be read, or a target is no token; names the field.
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
        """Resolve the lens for one prompt.

        Args:
            lens: The result of `of`.
            spec: The request's field.
            prompt: The number of prompt tokens.
            new: The most new tokens.
            ends: See `token_choices.placed`.

        Raises:
            RequestError: The prompt does not have these tokens; names the field.
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
        """Reject requests whose answer could exceed `MOST_ENTRIES`.

        Args:
            requests: All choices of one job, which have the same lens.

        Raises:
            RequestError: The answer could exceed it.
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
        if count > MOST_ENTRIES:
            message = (
                f"{each} tokens in each of {len(lens.layers)} layers at up to {tokens} positions are {count} entries; "
                f"the limit is {MOST_ENTRIES}: request fewer, or set max_tokens"
            )
            raise RequestError(message, "logit_lens", "logit_lens_too_large")
