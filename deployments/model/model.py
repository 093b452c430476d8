"""One copy of a model's weights: loaded, and probed for how its sequences may run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from deployments.model.attention import configs_of, packed_attention
from deployments.model.hooks import Hooks, Readers, Visit
from deployments.model.invariance import make_batch_invariant
from deployments.model.kv_cache import Packed, PagedCache, TokenSpan
from deployments.model.packing import UnsupportedModelError, find_packing
from deployments.model.unembedding import Unembedding
from deployments.model.weights import SharedWeights
from deployments.places.place import Place
from deployments.places.points import Points

NO_READERS: Readers = MappingProxyType({})


def import_nnsight() -> Any:
    """Import nnsight without the `.save` that it gives every object in the process: other libraries trip over that."""
    import nnsight
    from nnsight._c import unmount

    if unmount is not None and hasattr(object, "save"):
        unmount("save")
    return nnsight


class Model:
    """A causal language model ready to be batched.

    Attributes:
        name: What it was loaded from.
        hf: The Hugging Face module; every forward goes through it whole.
        tokenizer: Its tokenizer.
        points: Its capture points.
        context: The most tokens a sequence may have.
        longest_token: The most characters one token stands for.
        eos: Token ids that end a text.
        head: The path of the module that gives the logits.
        packs: Whether sequences share a forward; others run one at a time.
        batch_invariant: Whether a sequence has the same bits in any company.
        shared: What other processes need to run it on the same weights, where they may.
        revision: Which files it was loaded from, as `revision_of` says it.
        unembedding: From a layer's output to logits.
    """

    def __init__(
        self,
        hf: Any,
        tokenizer: Any,
        name: str,
        context: int | None = None,
        shared: SharedWeights | None = None,
        revision: str | None = None,
        batch_invariant: bool = False,
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
        self._hooks = Hooks(hf)
        self._configs = configs_of(hf)
        self._wanted: torch.Tensor | None = None
        hf.get_output_embeddings().register_forward_pre_hook(self._narrow)
        self.packs = True
        self.batch_invariant = False
        find_packing(self)
        self.batch_invariant = batch_invariant
        if batch_invariant:
            make_batch_invariant(self)
        self.unembedding = Unembedding(hf, self.points)

    @functools.cached_property
    def nnsight(self) -> Any:
        """The same modules as nnsight's `LanguageModel`, made at its first use: the engine has no need of it.

        Raises:
            ImportError: nnsight is not installed.
        """
        return import_nnsight().LanguageModel(self.hf, tokenizer=self.tokenizer)

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

    def forward(
        self,
        ids: Sequence[int],
        spans: Sequence[TokenSpan],
        wanted: Sequence[int],
        cache: PagedCache,
        places: Sequence[Place] = (),
        visit: Visit | None = None,
        every_logit: bool = False,
        readers: Readers = NO_READERS,
    ) -> torch.Tensor:
        """Run tokens of many sequences, one after the other, through the Hugging Face module.

        Args:
            ids: Token ids of all rows.
            spans: Whose rows they are; a single one where the model's sequences share no forward.
            wanted: The rows whose logits are wanted.
            cache: Where their keys and values lie.
            places: What to visit.
            visit: Called with each place and its value [rows, ...], of attention patterns a list of
                [tokens, heads, keys] for each reader; may give what takes its place.
            every_logit: Run the head over every row instead of those whose logits are wanted, for who reads its rows.
            readers: Of each place of attention patterns, the spans that are visited.

        Returns:
            [wanted, vocabulary] logits.
        """
        packed = Packed(spans)
        rows = torch.tensor(wanted, dtype=torch.long, device=self.device)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([list(ids)], device=self.device),
            "position_ids": torch.from_numpy(packed.positions)[None].to(self.device),
        }
        self._wanted = None if every_logit else rows
        try:
            if self.packs:
                cache.packed = packed
                with packed_attention(self._configs, cache, self.batch_invariant):
                    logits = self._visited(inputs | {"past_key_values": cache}, places, visit, readers)
            else:
                (span,) = spans
                lone = span.kv.lone = span.kv.lone or DynamicCache()
                _cut_back(lone, span.start)  # a forward that failed may have left more in some layers
                logits = self._visited(inputs | {"past_key_values": lone}, places, visit, readers)
        finally:
            self._wanted = None
        return logits[0, rows] if every_logit else logits[0]

    def _visited(
        self, inputs: dict[str, Any], places: Sequence[Place], visit: Visit | None, readers: Readers
    ) -> torch.Tensor:
        """One forward of the Hugging Face module, [1, rows or wanted, vocabulary]."""
        call = functools.partial(self.hf, **inputs, use_cache=True)
        if not places:
            self._hooks.rest()
            return call().logits  # type: ignore[no-any-return]
        assert visit is not None

        def shaped(place: Place, value: Any) -> torch.Tensor | None:
            if place.grows:
                return visit(place, [patterns.transpose(0, 1) for patterns in value])
            new = visit(place, value.view(-1, *place.shape))
            return None if new is None else new.view(value.shape)

        return self._hooks.visit(places, shaped, call, readers).logits  # type: ignore[no-any-return]

    def _narrow(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Narrow the head's input to the rows whose logits are wanted: those of all of a prompt's are many."""
        if self._wanted is None:
            return None
        hidden = args[0]  # [1, rows, hidden]
        return (hidden[:, self._wanted.to(hidden.device)], *args[1:])


def _cut_back(cache: DynamicCache, length: int) -> None:
    for layer in cache.layers:
        held: Any = layer
        if held.is_initialized and held.keys.shape[-2] > length:
            held.keys, held.values = held.keys[..., :length, :], held.values[..., :length, :]


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
