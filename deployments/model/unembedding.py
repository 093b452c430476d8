"""Computes logits from a layer's output with the model's own modules after its layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from deployments.errors import RequestError
from deployments.model.fast_layers import Switch
from deployments.model.packing import TOLERANCE, relative_error
from deployments.places.points import Points
from deployments.places.watching import first_tensor, with_first

PROBE_IDS = [[5, 3, 8, 1, 13], [2, 9, 4, 7, 6]]  # of the test texts


class Unembedding:
    """Passes rows of the residual stream through the modules after a model's last layer.

    It runs the Hugging Face module's own forward pass with one module in place of all layers, which returns these rows.
    The final norm, a projection after it, the head, its scale and its soft-cap are therefore those of the model.

    Attributes:
        refusal: Why the model does not support it; None if it does.
        vocabulary: The number of logits of each row.
        device: The preferred device of rows.
    """

    @torch.inference_mode()
    def __init__(self, hf: Any, points: Points, fast_layers: Switch) -> None:
        """Test it with the last layer's output, whose logits are known; all arguments are of one model."""
        self._fast_layers = fast_layers
        self._hf = hf
        self._stem, _, self._name = points.layers.rpartition(".")
        self.vocabulary: int = hf.get_output_embeddings().out_features
        pad = getattr(hf.config.get_text_config(), "pad_token_id", None)
        self._id = 0 if pad != 0 else 1  # the token of each row; models warn about padding
        self.device = torch.device(hf.device)
        self._given: Any = None  # a layer's output: a tensor, or a tuple that starts with one
        self.refusal = self._failure(points)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] logits of the model if its last layer returned these rows [rows, hidden]."""
        stem = self._hf.get_submodule(self._stem)
        layers = stem._modules[self._name]
        ids = torch.full((len(rows), 1), self._id, device=self._hf.device)  # each row is a text of one token
        rows = rows.to(self.device)
        stem._modules[self._name] = nn.ModuleList([_Layers(with_first(self._given, rows[:, None]))])
        try:
            # The fast layers have no gradients, which fitting a lens needs.
            with nullcontext() if torch.is_grad_enabled() else self._fast_layers.turned_on():
                return self._hf(input_ids=ids, use_cache=False).logits[:, -1]  # type: ignore[no-any-return]
        finally:
            stem._modules[self._name] = layers

    def _failure(self, points: Points) -> str | None:
        try:
            outputs = points.named("layers.*.output", "logit_lens.layers")
        except RequestError as refused:
            return refused.message
        if len({point.shape for point in outputs}) > 1:
            return "its layers are of different widths"
        ids = torch.tensor(PROBE_IDS, device=self._hf.device) % self._hf.get_input_embeddings().num_embeddings
        kept: list[torch.Tensor] = []  # [texts * tokens, hidden]

        def keep(_: Any, args: tuple[Any, ...], output: Any) -> None:
            tensor = first_tensor(output)
            assert tensor is not None  # it is a point
            kept.append(tensor.flatten(0, 1).clone())  # other modules may overwrite it
            self._given, self.device = with_first(output, torch.empty(0)), tensor.device

        hook = self._hf.get_submodule(outputs[-1].place.module).register_forward_hook(keep)
        try:
            wanted = self._hf(input_ids=ids, use_cache=False).logits.flatten(0, 1)  # [texts * tokens, vocabulary]
        finally:
            hook.remove()
        try:
            got = self.logits(kept[0])
        except torch.OutOfMemoryError:
            raise  # not the model's fault
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            return f"its layers cannot be left out of a forward: {type(error).__name__}: {error}"
        worst = relative_error(got, wanted)
        if not worst <= TOLERANCE.get(wanted.dtype, 1e-1):
            return f"logits computed from its last layer's output differ from its own by {worst:.1%} of their norm"
        return None


class _Layers(nn.Module):
    """Replaces all layers of a model and returns one value for any input."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._value
