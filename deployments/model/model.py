"""One copy of a model's weights: loaded, and tested for how its sequences may run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from deployments.model.attention.registration import packed_attention
from deployments.model.batch import Batch
from deployments.model.fast_layers import Switch, replace_linear_layers, replace_rms_norms
from deployments.model.hooks import Hooks, Readers, Visit
from deployments.model.kv_cache import PagedCache
from deployments.model.packing import UnsupportedModelError, find_packing, make_batch_invariant
from deployments.model.states import Mixers, cache_of
from deployments.model.unembedding import Unembedding
from deployments.model.weights import SharedWeights
from deployments.places.attention_patterns import configs_of
from deployments.places.hook_site import HookSite
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
        name: The repository or directory that it was loaded from.
        hf: The complete Hugging Face module, which every forward pass runs.
        tokenizer: Its tokenizer.
        points: Its capture points.
        context: The most tokens of a sequence.
        longest_token: The most characters of a token.
        eos: Token ids that end a text.
        head: The path of the module that returns the logits.
        fast_layers: Lets linear layers and norms on a CPU run by faster functions, as forward passes here do.
        packs: Whether sequences share a forward pass; otherwise they run one at a time.
        mixers: Its modules with a state of each sequence, such as linear attention.
        has_states: Whether more than keys and values is kept of a sequence; only the state after its last token is.
        batch_invariant: Whether a sequence has the same bits beside any other sequences.
        shared: The data with which other processes run it on the same weights; None if they may not.
        revision: The identifier of its files from `revision_of`.
        adapter_revision: That of the adapter in its weights; None without one.
        quantization: The `method` of a quantized checkpoint, and whether its weights were `dequantized`; else None.
        unembedding: Computes logits from a layer's output.
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
        # cuDNN's attention makes a plan for each new shape, and nearly every step has one. A plan takes 23 to 37 ms.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.fast_layers = Switch()
        replace_linear_layers(self.hf, name, self.fast_layers)
        replace_rms_norms(self.hf, self.fast_layers)
        self.tokenizer = tokenizer
        self.config = hf.config.get_text_config()
        self.context = _context(self.config, context)
        self.shared = shared
        self.revision = revision
        self.adapter_revision: str | None = None
        self.quantization: dict[str, Any] | None = None
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        self.eos = _end_tokens(hf, tokenizer)
        self.head = next(path for path, module in hf.named_modules() if module is hf.get_output_embeddings())
        self.points = Points.learn(hf)
        self.mixers = Mixers(hf)
        self.has_states = self.mixers.has_states
        self._cache_argument = _cache_argument(hf)
        self._hooks = Hooks(hf)
        self._configs = configs_of(hf)
        self._wanted: torch.Tensor | None = None
        hf.get_output_embeddings().register_forward_pre_hook(self._narrow)
        self.packs = True
        self.batch_invariant = False
        find_packing(self)
        if not self.packs:
            self.points.forget_heads("its sequences run one at a time, through transformers' own cache")
        self.batch_invariant = batch_invariant
        if batch_invariant:
            make_batch_invariant(self)
        self.unembedding = Unembedding(hf, self.points, self.fast_layers)

    @functools.cached_property
    def nnsight(self) -> Any:
        """The same modules as nnsight's `LanguageModel`, made at its first use: the engine has no need of it.

        Raises:
            ImportError: nnsight is not installed.
        """
        # A subclass: nnsight says of its own class that it is deprecated.
        instrumented = type("InstrumentedModel", (import_nnsight().LanguageModel,), {})
        return instrumented(self.hf, tokenizer=self.tokenizer)

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of inputs."""
        return torch.device(self.hf.device)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.hf.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """Token ids are below this number."""
        return self.hf.get_input_embeddings().num_embeddings  # type: ignore[no-any-return]

    def new_cache(self, pages: int = 1, slots: int = 2, like: PagedCache | None = None) -> PagedCache:
        """A cache of this many pages, and slots of states; `like` has its layers' sizes, after a forward pass."""
        layers = cache_of(self.hf).layers if self.mixers.paths and like is None else ()
        return PagedCache(pages, like, layers, slots)

    def forward(
        self,
        batch: Batch,
        cache: PagedCache,
        places: Sequence[HookSite] = (),
        visit: Visit | None = None,
        every_logit: bool = False,
        readers: Readers = NO_READERS,
    ) -> torch.Tensor:
        """Run tokens of many sequences, concatenated, through the Hugging Face module.

        Args:
            batch: The rows; of a single sequence if the model's sequences do not share forward passes.
            cache: The pages of their keys and values.
            places: The places to visit.
            visit: Called with each place and its value [rows, ...]; for attention patterns, a list of
                [tokens, heads, keys] for each reader. May return a replacement.
            every_logit: Run the head over all rows instead of the wanted ones, for readers of the head's rows.
            readers: For each place of attention patterns, the spans that are visited.

        Returns:
            [wanted, vocabulary] logits.
        """
        if self.packs:
            past: Cache = cache
            attention: AbstractContextManager[None] = packed_attention(
                self._configs, batch, cache, self.batch_invariant
            )
        else:
            (span,) = batch.spans
            past = span.kv.lone = span.kv.lone or (cache_of(self.hf) if self.has_states else DynamicCache())
            layers: Sequence[Any] = () if self.has_states else past.layers
            for layer in layers:  # a failed forward pass may have left more in some
                layer.crop(min(0, span.start - layer.get_seq_length()))
            attention = nullcontext()
        ids, positions = batch.inputs()
        given = {"input_ids": ids, "position_ids": positions, self._cache_argument: past}
        call = functools.partial(self.hf, **given, use_cache=True)

        def shaped(place: HookSite, value: Any) -> torch.Tensor | None:
            assert visit is not None
            if place.grows:
                return visit(place, [patterns.transpose(0, 1) for patterns in value])
            new = visit(place, value.view(-1, *place.shape))
            return None if new is None else new.view(value.shape)

        self._wanted = None if every_logit else batch.wanted
        try:
            with attention, self.mixers.running(batch, cache.states), self.fast_layers.turned_on():
                logits: torch.Tensor = self._hooks.visit(places, shaped, call, readers).logits
        finally:
            self._wanted = None
        return logits[0, batch.wanted] if every_logit and batch.wanted is not None else logits[0]

    def _narrow(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Narrow the head's input to the wanted rows: the logits of a whole prompt would take much memory."""
        if self._wanted is None:
            return None
        hidden = args[0]  # [1, rows, hidden]
        return (hidden.index_select(1, self._wanted.to(hidden.device)), *args[1:])


def _cache_argument(hf: Any) -> str:
    for name in ("past_key_values", "cache_params"):
        if name in inspect.signature(hf.forward).parameters:
            return name
    raise UnsupportedModelError(f"{type(hf).__name__} cannot be served: it takes no cache of transformers")


def _context(config: Any, asked: int | None) -> int:
    """The most tokens of a sequence: the model's context, or fewer if requested."""
    stated = [getattr(config, field, None) for field in ("max_position_embeddings", "max_seq_len")]
    known = [length for length in (asked, *stated) if length]
    if not known:
        raise UnsupportedModelError("the model's config states no context length: set one with max_seq_len")
    context = min(known)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original = kind.get("original_max_position_embeddings")
        # A single longer row would change the rotary embedding of all rows in its batch.
        if kind.get("rope_type") == "longrope" and original and context > original:
            message = f"its rotary embedding changes beyond {original} tokens: set max_seq_len={original}"
            raise UnsupportedModelError(message)
    return context


def _end_tokens(hf: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(hf.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(id for id in (*ids, tokenizer.eos_token_id) if id is not None)
