"""What `test_triton.py` runs in a process of its own: compiles the kernels as calls on GPUs would, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from deployments.model import fast_layers, triton_kernels
from deployments.model.attention.reference import Softmax
from deployments.model.attention.triton_decode import decode_attention
from deployments.model.batch import PagePlaces
from deployments.model.kv_cache import LayerPages

SHARED = 99 << 10  # bytes that a program has at least, on an L4


def driver(capability):
    """Of a GPU that is not there."""
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
    )


def compiled(kernel):
    """What a kernel's calls have compiled from now on, instead of running."""
    run, made = kernel.run, {}

    def only_compile(*given, warmup, **named):
        code = run(*given, warmup=True, **named)
        made[id(code)] = code

    kernel.run = only_compile
    return made


def attend(rows, splits, window):
    query, key = (torch.empty(rows, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    pages = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16)
    numbers = torch.zeros(3 * rows + 1, dtype=torch.int32)[1:].split(rows)  # at any address
    position, start, of_sequences = numbers
    places = PagePlaces(position, position, position, start, of_sequences)
    layer = LayerPages(pages, pages, by_heads=False)
    decode_attention(query, key, key, layer, places, Softmax(0.1, window), splits, torch.empty_like(query))


def main():
    """What the kernels compile for two kinds of GPU."""
    decode, join, rms_norm = map(compiled, (triton_kernels.decode, triton_kernels.join, triton_kernels.rms_norm))
    for capability in (80, 90):
        triton.runtime.driver.set_active(driver(capability))
        attend(rows=1, splits=1, window=0)
        attend(rows=1, splits=2, window=0)
        found = len(decode), len(join)
        for rows in (2, 3, 16, 128):
            attend(rows, 1, 0)
            attend(rows, 32, rows)
        assert (len(decode), len(join)) == found, "other rows, splits or windows compile anew"
    for rows in (1, 2, 16, 77):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16)
        fast_layers._by_triton(x, torch.ones(4096), x, 1e-6, True)
    assert [len(made) for made in (decode, join, rms_norm)] == [4, 2, 1]
    assert all("mma" in code.asm["ptx"] and code.metadata.shared <= SHARED for code in decode.values())


main()
