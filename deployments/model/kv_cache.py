"""Keys and values of all running sequences, in pages."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from deployments.model.batch import PAGE, SequenceKv
from deployments.model.native import attention_kernel

LANES = 16  # with the C kernel, a page's values are padded to a multiple of these features


class LayerPages(NamedTuple):
    """One layer's pages, in one of two layouts.

    Attributes:
        keys: [pages, PAGE, kv_heads, head_dim]; for the C kernel [pages, kv_heads, head_dim, PAGE].
        values: [pages, PAGE, kv_heads, features]; for the C kernel [pages, kv_heads, PAGE, padded features].
        by_heads: Whether they have the C kernel's layout.
    """

    keys: torch.Tensor
    values: torch.Tensor
    by_heads: bool

    def keys_of(self, pages: Any) -> torch.Tensor:
        """[tokens, kv_heads, head_dim] keys in pages of these numbers."""
        keys = self.keys[pages]
        return (keys.permute(0, 3, 1, 2) if self.by_heads else keys).flatten(0, 1)

    def values_of(self, pages: Any) -> torch.Tensor:
        """[tokens, kv_heads, features] values in pages of these numbers, padded in the C kernel's layout."""
        values = self.values[pages]
        return (values.transpose(1, 2) if self.by_heads else values).flatten(0, 1)


class PagedCache(Cache):
    """The KV memory of all sequences: pages at fixed addresses, which sequences refer to by number.

    On a CPU, the system allocates a page's memory when it is first written to, in chunks of 2 MiB if it can.
    """

    def __init__(self, pages: int = 1, like: PagedCache | None = None) -> None:
        """Allocate a number of pages.

        Args:
            pages: The number of pages.
            like: A cache after a forward pass, which has the layers' sizes; without it, the first forward pass
                allocates the memory.
        """
        super().__init__(layers=[])
        self._pages = pages
        self._layers: dict[int, LayerPages] = {}
        self._windows: dict[int, int] = dict(like._windows) if like is not None else {}
        self._new: tuple[int, torch.Tensor, torch.Tensor] | None = None
        for index, layer in (like._layers if like is not None else {}).items():
            own, of_values = (_allocated(part, pages, *part.shape[1:]) for part in (layer.keys, layer.values))
            self._layers[index] = LayerPages(own, of_values, layer.by_heads)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new keys and values [1, kv_heads, rows, features] until attention writes them to pages."""
        self._new = layer_idx, key_states, value_states
        return key_states, value_states

    def take_new(self, key: torch.Tensor, window: int) -> LayerPages:
        """The layer whose new keys `update` has just received.

        Args:
            key: The keys.
            window: The most tokens that a row of this layer reads, itself included; 0 for all before it.

        Raises:
            TypeError: They belong to another layer or were changed since, or the layer's window has changed.
        """
        new, self._new = self._new, None
        if new is None or new[1] is not key:
            raise TypeError("its attention reads other keys than those it has just kept")
        index, keys, values = new
        if self._windows.setdefault(index, window) != window:
            raise TypeError("its attention's window changes")
        if index not in self._layers:
            self._layers[index] = self._new_layer(keys, values)
        return self._layers[index]

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: each forward pass receives its positions."""
        return 0


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
