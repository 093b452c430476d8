"""One copy of a model's weights: loaded, instrumented by nnsight, and probed for how it may be batched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from nnsight import LanguageModel
from nnsight._c import unmount

from deployments.model.hooks import Hooks, Readers, Visit
from deployments.model.kv_cache import SlotCache
from deployments.model.mask_search import UnsupportedModelError, find_masks
from deployments.model.masks import Masks
from deployments.model.unembedding import Unembedding
from deployments.model.weights import SharedWeights
from deployments.places.place import Place
from deployments.places.points import Points

NO_READERS: Readers = MappingProxyType({})

if unmount is not None:
    # nnsight gives every object in the process a `.save`, which other libraries' classes trip over.
    unmount("save")


class InstrumentedModel(LanguageModel):  # type: ignore[misc]
    """nnsight's language model over weights that are already loaded."""


class Model:
    """A causal language model ready to be batched.

    Attributes:
        name: What it was loaded from.
        hf: The Hugging Face module; every forward goes through it whole.
        nnsight: nnsight's view of the same modules.
        tokenizer: Its tokenizer.
        points: Its capture points.
        context: The most tokens a sequence may have.
        longest_token: The most characters one token stands for.
        eos: Token ids that end a text.
        head: The path of the module that gives the logits.
        shared: What other processes need to run it on the same weights, where they may.
        revision: Which files it was loaded from, as `revision_of` says it.
        readout: From a layer's output to logits.
    """

    def __init__(
        self,
        hf: Any,
        tokenizer: Any,
        name: str,
        context: int | None = None,
        shared: SharedWeights | None = None,
        revision: str | None = None,
    ) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UnsupportedModelError(f"{name} has no fast tokenizer, which streaming text needs")
        self.name = name
        self.hf = hf.eval().requires_grad_(False)
        lay_out_for_few_rows(self.hf)
        self.tokenizer = tokenizer
        self.config = hf.config.get_text_config()
        self.context = _context(self.config, context)
        self.shared = shared
        self.revision = revision
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        self.eos = _end_tokens(hf, tokenizer)
        self.head = next(path for path, module in hf.named_modules() if module is hf.get_output_embeddings())
        self.points = Points.learn(hf)
        self.nnsight = InstrumentedModel(hf, tokenizer=tokenizer)
        self._hooks = Hooks(hf)
        self._wanted: tuple[torch.Tensor, torch.Tensor] | None = None
        hf.get_output_embeddings().register_forward_pre_hook(self._narrow)
        self.masks: Masks
        find_masks(self)
        self.unembedding = Unembedding(hf, self.points)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return torch.device(self.hf.device)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.hf.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """Token ids go from 0 to below this."""
        return self.hf.get_input_embeddings().num_embeddings  # type: ignore[no-any-return]

    def new_cache(self) -> SlotCache:
        """An empty KV memory for this model."""
        return SlotCache(self.config.num_hidden_layers)

    def prefill(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        cache: SlotCache,
        places: Sequence[Place] = (),
        visit: Visit | None = None,
        every_logit: bool = False,
        start: int = 0,
        beside: Sequence[tuple[int, range]] = (),
        readers: Readers = NO_READERS,
    ) -> torch.Tensor:
        """Run prompts, padded on the right, which causal attention never reads; or one prompt's next piece.

        Args:
            ids: [batch, longest] token ids.
            lengths: [batch] tokens of each row.
            cache: Set to prefill from `start` on.
            places: What to visit.
            visit: Called with each place and its value [batch, longest, ...], of attention patterns [readers, longest,
                heads, keys]; may give what takes its place.
            every_logit: Run the head over every token instead of those whose logits are wanted, for who reads its rows.
            start: The first token's position; behind 0 the batch is one row, which attends to its slot.
            beside: Rows and which of their tokens, from 0, have wanted logits, too.
            readers: Of each place of attention patterns, whose are visited.

        Returns:
            [batch + beside, vocabulary] logits of each row's last token, then of those beside.
        """
        rows, at = torch.arange(len(lengths), device=ids.device), lengths - 1
        if beside:
            more = torch.tensor([(row, token) for row, tokens in beside for token in tokens], device=ids.device)
            rows, at = torch.cat([rows, more[:, 0]]), torch.cat([at, more[:, 1]])
        stop = start + ids.shape[1]
        positions = torch.arange(start, stop, device=ids.device).expand(ids.shape)
        mask = self.masks.build(positions, stop) if start else None
        self._wanted = None if every_logit else (rows, at)
        try:
            logits = self._forward(ids, positions, mask, cache, places, visit, readers)
        finally:
            self._wanted = None
        return logits[rows, at] if every_logit else logits[0]

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
        cache: SlotCache,
        places: Sequence[Place] = (),
        visit: Visit | None = None,
        readers: Readers = NO_READERS,
    ) -> torch.Tensor:
        """Run one token of each running row.

        Args:
            ids: [batch] token ids.
            positions: [batch] their positions.
            longest: The longest row after this token.
            cache: Set to decode.
            places: What to visit.
            visit: Called with each place and its value [batch, 1, ...], of attention patterns [readers, 1, heads,
                keys]; may give what takes its place.
            readers: Of each place of attention patterns, whose are visited.

        Returns:
            [batch, vocabulary] logits.
        """
        positions = positions[:, None]
        mask = self.masks.build(positions, longest)
        return self._forward(ids[:, None], positions, mask, cache, places, visit, readers)[:, -1]

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        cache: SlotCache,
        places: Sequence[Place],
        visit: Visit | None,
        readers: Readers,
    ) -> torch.Tensor:
        """One forward of the Hugging Face module."""
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        call = functools.partial(self.hf, **inputs, past_key_values=cache, use_cache=True)
        if not places:
            self._hooks.rest()
            return call().logits  # type: ignore[no-any-return]
        assert visit is not None
        batch = len(ids)

        def shaped(place: Place, value: torch.Tensor) -> torch.Tensor | None:
            if place.layout == "batched":
                return visit(place, value)
            if place.layout == "patterns":
                return visit(place, value.transpose(1, 2))
            new = visit(place, value.view(batch, -1, *place.shape))
            return None if new is None else new.view(value.shape)

        return self._hooks.visit(places, shaped, call, readers).logits  # type: ignore[no-any-return]

    def _narrow(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Narrow the head's input to the tokens whose logits are wanted: those of all of a prompt's are many."""
        if self._wanted is None:
            return None
        rows, at = self._wanted  # [wanted] each
        hidden = args[0]  # [batch, tokens, hidden]
        return (hidden[rows.to(hidden.device), at.to(hidden.device)][None], *args[1:])


def lay_out_for_few_rows(hf: Any) -> None:
    """Store float32 weights of linear layers by columns where they are on a CPU.

    MKL multiplies the few rows of a decode by such a matrix in four fifths of the time (32 rows; `benchmarks`),
    and many rows in the same. Shapes, values and memory stay as they are. A weight that is the embedding's, too,
    is left as it is, since its rows are looked up.
    """
    embedding = hf.get_input_embeddings().weight
    for module in hf.modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not embedding:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous():
                weight.data = weight.data.t().contiguous().t()


def _context(config: Any, asked: int | None) -> int:
    """The most tokens of a sequence: the model's, or fewer where asked for."""
    known = [length for length in (asked, getattr(config, "max_position_embeddings", None)) if length]
    if not known:
        raise UnsupportedModelError("the model's config states no context length, and none was asked for")
    context = min(known)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original = kind.get("original_max_position_embeddings")
        # One row longer than that would turn the positions of all rows in its batch.
        if kind.get("rope_type") == "longrope" and original and context > original:
            message = f"its rotary embedding changes beyond {original} tokens; load it with a context of {original}"
            raise UnsupportedModelError(message)
    return context


def _end_tokens(hf: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(hf.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(id for id in (*ids, tokenizer.eos_token_id) if id is not None)
