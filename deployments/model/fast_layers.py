"""Faster linear layers and RMS norms, which a model's forward passes in the engine run instead of its own."""

from __future__ import annotations

import functools
import inspect
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deployments.model.device_memory import is_out_of_memory, unreserved_bytes
from deployments.model.native import rms_norm_kernel, triton_kernels, worthwhile_threads
from deployments.tiles import in_tiles

SHARE = 0.1  # of the free memory, which the copies of the weights may take; replicas may load at the same time
AVAILABLE = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")  # not tried on other processors
ROWS = 32  # for which oneDNN chooses the layout; it suits any other number, too
# oneDNN compiles code for each number of rows and shape of weights, takes half a millisecond and half a MiB for it, and
# keeps it. So there are 50 numbers, each at most an eighth above the one before from 32 on.
SIZES = (
    *(1, 2, *range(4, 64, 4), *range(64, 128, 8), *range(128, 256, 16), *range(256, 512, 32)),
    *range(512, 1025, 64),
)
UNPADDED = frozenset(SIZES)
THREAD_NUMBERS = 65_536  # about 20 microseconds of a thread
PROBE_ROWS = 64
DIFFERING = 0.01  # of a probe's numbers: sums in another order change the rounding of a few
ROUNDINGS = 2  # of a number's last digit, by which those few differ at most
PROGRAM_NUMBERS = 2048  # of a program in Triton: of several short rows, or at least of one row
WARP_NUMBERS = 512  # 16 of each thread

logger = logging.getLogger(__name__)


class Switch:
    """Whether layers run the engine's functions, or as in transformers: clients' code differentiates those."""

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def turned_on(self) -> Iterator[None]:
        """Run the engine's functions while open."""
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before


# ---- linear layers


def replace_linear_layers(hf: nn.Module, name: str, switch: Switch) -> None:
    """Let a model's linear layers multiply by oneDNN while a switch is on.

    For the 32 rows of a decode that takes half of the time of MKL, which torch uses for float32, and two thirds of what
    torch takes for bfloat16, as it arranges the weights anew in each call; prompts gain less. The copies in oneDNN's
    layout take as much memory as the weights. Without free memory for them the weights are used as they are, in two
    thirds of MKL's time; 32 rows then have the same bits, which `batch_invariant` needs.

    The weights must not change any more. Layers on other devices stay as they are. `name` is the model's.
    """
    layers: list[Any] = [module for module in hf.modules() if _supported(module)]
    own = (layer.weight if isinstance(layer, nn.Linear) else layer.weight.t() for layer in layers)
    weights: Sequence[torch.Tensor] = list(own)  # [outputs, inputs] each
    if sum(weight.nbytes for weight in weights) <= SHARE * unreserved_bytes(torch.device("cpu"), name):
        weights = _copies(weights)
    for layer, weight in zip(layers, weights, strict=True):
        layer.forward = functools.partial(_linear_forward, switch, layer.forward, weight, layer.bias)


def _linear_forward(
    switch: Switch,
    plain: Callable[..., torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *x: Any,
    **named: Any,
) -> torch.Tensor:
    """Multiply x [..., inputs] by oneDNN, where that is on; returns [..., outputs]."""
    if not switch.on or not x or x[0].dtype != weight.dtype or not x[0].numel():
        return plain(*x, **named)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    if x[0].numel() // x[0].shape[-1] in UNPADDED and x[0].is_contiguous():
        return product(x[0])  # as `in_tiles`, in a tenth less time
    return in_tiles(x[0], weight.shape[0], product, SIZES)


def _copies(weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The weights in oneDNN's layout; as they are, if there is no memory after all."""
    try:
        return [torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS) for weight in weights]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return weights


def _supported(layer: Any) -> bool:
    """Whether a module is a plain linear layer whose weights oneDNN can multiply here."""
    if type(layer).forward not in (nn.Linear.forward, Conv1D.forward) or "forward" in vars(layer):
        return False
    weight, tensors = layer.weight, [layer.weight, *([] if layer.bias is None else [layer.bias])]
    if any(type(tensor) is not nn.Parameter or tensor.dtype != weight.dtype for tensor in tensors):
        return False  # quantized, or computed from others
    if not AVAILABLE or weight.device.type != "cpu" or not weight.numel():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(weight.dtype == torch.float32)


# ---- RMS norms


# How norms of some architectures scale their rows: the offset that is added to the weight, and whether numbers are
# rounded to their dtype before they are scaled.
KINDS = ((0, True), (1, False), (0, False))

_Normalize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], None]  # x, scale, out, epsilon, rounded


@torch.inference_mode()
def replace_rms_norms(hf: nn.Module, switch: Switch) -> None:
    """Let a model's RMS norms run by one function while a switch is on, instead of torch's six operations.

    On a CPU that is compiled C, which takes a third to a tenth of the time, on a GPU a kernel in Triton, which has not
    run on a GPU yet. Each norm is tried first: one with other results stays as it is. The weights must not change any
    more.
    """
    modules: Iterator[Any] = hf.modules()
    for module in modules:
        if not _looks_like_one(module) or (normalize := _function_for(module.weight)) is None:
            continue
        plain, x, eps = module.forward, _probe(module), _eps(module)
        assert eps is not None, "it looks like a norm"
        try:
            wanted = plain(x)
        except Exception:  # noqa: BLE001 - it needs other inputs, so it is another function
            continue
        differing = {}
        for offset, rounded in KINDS:
            scale = module.weight.detach().float() + offset
            fast = functools.partial(_norm_forward, switch, plain, x.dtype, normalize, scale, eps, rounded)
            with switch.turned_on():
                differing[fast] = _differing(fast(x), wanted)
        if min(differing.values()) <= DIFFERING:
            module.forward = min(differing, key=differing.__getitem__)


def _looks_like_one(module: Any) -> bool:
    parameters = [*module.parameters(recurse=False)]
    if "RMSNorm" not in type(module).__name__ or "forward" in vars(module) or len(parameters) != 1:
        return False
    if type(parameters[0]) is not nn.Parameter or parameters[0].ndim != 1:
        return False
    given = inspect.signature(module.forward).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in given) == 1 and _eps(module) is not None


def _eps(module: Any) -> float | None:
    """The number that a norm adds to the mean square."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _probe(module: Any) -> torch.Tensor:
    """[rows, size] numbers of several sizes, one row's as small as the root of the norm's epsilon."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_ROWS, len(module.weight), generator=generator)
    x *= torch.logspace(-3, 3, PROBE_ROWS)[:, None]
    x[0] *= 1e3 * (_eps(module) or 0) ** 0.5
    return x.to(module.weight)


def _differing(values: torch.Tensor, wanted: torch.Tensor) -> float:
    """The part of the numbers that are not those of the module itself; 1 if one differs by more than roundings."""
    if values.dtype != wanted.dtype or values.shape != wanted.shape:
        return 1.0
    values, wanted, rounding = values.float(), wanted.float(), torch.finfo(values.dtype).eps
    if not torch.isclose(values, wanted, rtol=max(1e-5, ROUNDINGS * rounding), atol=0).all():
        return 1.0
    return torch.isclose(values, wanted, rtol=1e-5, atol=0).logical_not().float().mean().item()


def _function_for(weight: torch.Tensor) -> _Normalize | None:
    """The function that normalizes rows of a weight's device, dtype and length; None if there is none."""
    if weight.device.type == "cpu":
        run = rms_norm_kernel(weight.dtype)
        return functools.partial(_by_kernel, run) if run else None
    return _by_triton if _runs_triton(weight.device, weight.dtype, len(weight)) else None


@functools.cache
def _runs_triton(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the kernel in Triton runs on a device; the log says why not."""
    if device.type != "cuda" or (kernels := triton_kernels()) is None:
        return False
    row = torch.ones(size, device=device, dtype=dtype)
    try:
        _by_triton(row, row.float(), torch.empty_like(row), 1e-6, True)
    except kernels.FAILURES as error:
        logger.warning("the model's own RMS norms of %d run, as the kernel in Triton does not: %s", size, error)
        return False
    return True


def _by_triton(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, eps: float, rounded: bool) -> None:
    """Normalize rows x [..., size] by the kernel in Triton. Not run on a GPU yet."""
    kernels: Any = triton_kernels()
    size = len(scale)
    rows, block = x.numel() // size, kernels.triton.next_power_of_2(size)
    of_program = max(1, PROGRAM_NUMBERS // block)  # rows
    with torch.cuda.device(x.get_device()):
        kernels.rms_norm[(-(-rows // of_program),)](
            *(x, scale, out, rows, eps, size, rounded, of_program, block),
            num_warps=min(16, of_program * block // WARP_NUMBERS),
            enable_fp_fusion=True,
        )


def _by_kernel(
    run: Callable[..., None], x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, eps: float, rounded: bool
) -> None:
    """Normalize rows x [..., size] by the compiled function `run`."""
    numbers, size = x.numel(), len(scale)
    threads = worthwhile_threads(numbers, THREAD_NUMBERS)
    run(x.data_ptr(), scale.data_ptr(), out.data_ptr(), numbers // size, size, eps, rounded, threads)


def _norm_forward(
    switch: Switch,
    plain: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    normalize: _Normalize,
    scale: torch.Tensor,
    eps: float,
    rounded: bool,
    *given: Any,
    **named: Any,
) -> torch.Tensor:
    if not switch.on or len(given) != 1 or named or given[0].dtype != dtype or given[0].shape[-1] != len(scale):
        return plain(*given, **named)
    x = given[0].contiguous()
    normalize(x, scale, out := torch.empty_like(x), eps, rounded)
    return out
