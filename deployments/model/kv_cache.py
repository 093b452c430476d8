"""Keys and values of all running sequences, in pages."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from transformers.cache_utils import Cache

from deployments.model.batch import PAGE, Batch, SequenceKv
from deployments.model.native import attention_kernel
from deployments.model.states import States

_Call = tuple[int, int]  # a layer, and the number of a call of attention since the layer's `update`
LANES = 16  # with the C kernel, a page's values are padded to a multiple of these features


class LayerPages(NamedTuple):
    """One layer's pages, in one of two layouts."""

    keys: torch.Tensor  # [pages, PAGE, kv_heads, head_dim]; for the C kernel [pages, kv_heads, head_dim, PAGE]
    values: torch.Tensor  # [pages, PAGE, kv_heads, features]; there [pages, kv_heads, PAGE, padded features]
    by_heads: bool  # whether they have the C kernel's layout

    def keys_of(self, pages: Any) -> torch.Tensor:
        """[tokens, kv_heads, head_dim] keys in pages of these numbers."""
        keys = self.keys[pages]
        return (keys.permute(0, 3, 1, 2) if self.by_heads else keys).flatten(0, 1)

    def values_of(self, pages: Any) -> torch.Tensor:
        """[tokens, kv_heads, features] values in pages of these numbers, padded in the C kernel's layout."""
        values = self.values[pages]
        return (values.transpose(1, 2) if self.by_heads else values).flatten(0, 1)


class _RowOffsets:
    """What models add to the numbers of a forward pass's rows to get positions: another number for each row."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __radd__(self, rows: torch.Tensor) -> torch.Tensor:
        position = self._batch.places(rows.device).position
        return rows + position - torch.arange(len(position), device=rows.device)


class PagedCache(Cache):
    """The KV memory of all sequences: pages at fixed addresses, which sequences refer to by number.

    Keys and values are those that attention reads, which may differ from those that a layer gives to `update`: a model
    with latent attention gives it latents, and expands them. Each call of attention has pages of its own, unless it
    reads the same tensors as an earlier one of the same forward pass, in a layer that shares another's.

    On a CPU, the system allocates a page's memory when it is first written to, in chunks of 2 MiB if it can.
    """

    def __init__(
        self, pages: int = 1, like: PagedCache | None = None, layers: Sequence[Any] = (), slots: int = 1
    ) -> None:
        """Allocate pages and slots of states, as large as in `like`, a cache after a forward pass.

        Without it, the first forward pass allocates them; `layers` are transformers' cache layers, if some have states.
        """
        self.states: States = States(layers, slots, like.states if like else None)
        super().__init__(layers=list(self.states.layers))
        self._pages = pages
        self._layers: dict[_Call, LayerPages] = {}
        self._windows: dict[_Call, int] = dict(like._windows) if like is not None else {}
        self.begin(None)
        for index, layer in (like._layers if like is not None else {}).items():
            own, of_values = (_allocated(part, pages, *part.shape[1:]) for part in (layer.keys, layer.values))
            self._layers[index] = LayerPages(own, of_values, layer.by_heads)

    def begin(self, batch: Batch | None) -> None:
        """Begin a forward pass of a batch; None to end it."""
        self._batch = batch
        self._call: _Call | None = None  # of the next call of attention
        self._read: dict[_Call, tuple[ref[torch.Tensor], ref[torch.Tensor]]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Have the next call of attention use this layer's pages; returns the new keys and values as they are."""
        self._call = layer_idx, 0
        return key_states, value_states

    def pages_for(self, key: torch.Tensor, value: torch.Tensor, window: int) -> LayerPages:
        """The pages of a call of attention with new keys and values [1, kv_heads, rows, features].

        A row reads at most `window` tokens, itself included; 0 for all before it.

        Raises:
            TypeError: The model has no layer that keeps keys and values, or a layer's window has changed.
        """
        call = self._call
        if call is None:
            raise TypeError("its attention keeps no keys and values")
        if call[1]:  # not the first since `update`
            shared = (of for of, (keys, values) in self._read.items() if keys() is key and values() is value)
            call = next(shared, call)
        if call == self._call:
            self._read[call], self._call = (ref(key), ref(value)), (call[0], call[1] + 1)
        if self._windows.setdefault(call, window) != window:
            raise TypeError("its attention's window changes")
        if call not in self._layers:
            self._layers[call] = self._new_layer(key, value)
        return self._layers[call]

    def _new_layer(self, keys: torch.Tensor, values: torch.Tensor) -> LayerPages:
        """Memory for a layer with such keys and values [1, kv_heads, rows, features]."""
        (_, heads, _, size), width = keys.shape, values.shape[3]
        by_heads = keys.device.type == "cpu" and attention_kernel(keys.dtype) is not None
        shapes = ((PAGE, heads, size), (PAGE, heads, width))
        if by_heads:
            shapes = ((heads, size, PAGE), (heads, PAGE, -(-width // LANES) * LANES))
        own, of_values = (_allocated(keys, self._pages, *shape) for shape in shapes)
        return LayerPages(own, of_values, by_heads)

    @property
    def window(self) -> int:
        """The most tokens that a row reads in any layer, itself included; 0 if a layer reads all tokens before it."""
        return max(self._windows.values(), default=0) if all(self._windows.values()) else 0

    def zero(self, page: int) -> None:
        """Fill a page with zeros."""
        for part in self._tensors():
            part[page].zero_()

    def of(self, kv: SequenceKv, tokens: int) -> list[torch.Tensor]:
        """[tokens, kv_heads, features] keys and values of a sequence's first tokens, layer by layer."""
        pages, layers = list(kv.pages), self._layers.values()
        return [part[:tokens] for layer in layers for part in (layer.keys_of(pages), layer.values_of(pages))]

    def release_from(self, page: int) -> None:
        """Return the memory of all pages from this one on to the system, on a CPU; their contents are lost."""
        for part in self._tensors():
            if page < len(part):
                _advise(part, part[page].data_ptr(), "MADV_DONTNEED")

    @property
    def page_bytes(self) -> Counter[torch.device]:
        """Bytes of one page over all layers on each device, because layers may be on several."""
        sizes: Counter[torch.device] = Counter()
        for part in self._tensors():
            sizes[part.device] += part[:1].nbytes
        return sizes

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (part for layer in self._layers.values() for part in (layer.keys, layer.values))

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """0, because each forward pass receives its positions; for a layer, what makes row numbers positions."""
        return 0 if layer_idx is None or self._batch is None else _RowOffsets(self._batch)


def _allocated(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """New memory of a shape. With huge pages, a decode's attention takes a tenth to a fifth less time."""
    part = like.new_empty(shape)
    _advise(part, part.data_ptr(), "MADV_HUGEPAGE")
    return part


def _advise(part: torch.Tensor, begin: int, advice: str) -> None:
    """Tell the system how a tensor's memory is used from an address on, on a CPU, if it can be told."""
    begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (part.data_ptr() + part.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if part.device.type == "cpu" and size > 0 and hasattr(mmap, advice):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), getattr(mmap, advice))
