"""RMS norms, on a CPU each by one compiled function, on a GPU by two operations instead of six.

On a CPU, torch's six operations take three to ten times as long.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from deployments.model.native import rms_norm_kernel, worthwhile_threads
from deployments.model.switch import Switch

THREAD_NUMBERS = 65_536  # about 20 microseconds of a thread
PROBE_ROWS = 64
DIFFERING = 0.01  # of a probe's numbers: sums in another order change the rounding of a few
ROUNDINGS = 2  # of a number's last digit, by which those few differ at most


class _Kind(NamedTuple):
    """How a norm scales its rows; architectures differ.

    Attributes:
        offset: Added to the weight.
        rounded: Whether numbers are rounded to their dtype before they are scaled.
    """

    offset: int
    rounded: bool


KINDS = (_Kind(0, True), _Kind(1, False), _Kind(0, False))


@torch.inference_mode()
def replace_rms_norms(hf: nn.Module, switch: Switch) -> None:
    """Let a model's RMS norms run by faster functions while a switch is on.

    Each norm is tried first: one with other results stays as it is. The weights must not change any more.

    Args:
        hf: The Hugging Face module.
        switch: Turned on during forward passes of the engine.
    """
    for module in hf.modules():
        if not _looks_like_one(module) or not (candidates := _candidates(module)):
            continue
        plain, x = module.forward, _probe(module)
        try:
            wanted = plain(x)
        except Exception:  # noqa: BLE001 - it needs other inputs, so it is another function
            continue
        differing, fast = min(((_differing(one(x), wanted), one) for one in candidates), key=lambda pair: pair[0])
        if differing <= DIFFERING:
            module.forward = functools.partial(_forward, switch, fast, plain, x.dtype, x.shape[-1])


def _looks_like_one(module: Any) -> bool:
    parameters = [*module.parameters(recurse=False)]
    if "RMSNorm" not in type(module).__name__ or "forward" in vars(module) or len(parameters) != 1:
        return False
    if type(parameters[0]) is not nn.Parameter or parameters[0].ndim != 1:
        return False
    given = inspect.signature(module.forward).parameters.values()
    return sum(one.default is one.empty for one in given) == 1 and _eps(module) is not None


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


def _differing(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The part of the numbers that are not those of the module itself; 1 if one differs by more than roundings."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return 1.0
    found, wanted, rounding = found.float(), wanted.float(), torch.finfo(found.dtype).eps
    if not torch.isclose(found, wanted, rtol=max(1e-5, ROUNDINGS * rounding), atol=0).all():
        return 1.0
    return torch.isclose(found, wanted, rtol=1e-5, atol=0).logical_not().float().mean().item()


def _candidates(module: Any) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """A faster function for each kind of norm that there is; none where there is no compiler."""
    if module.weight.device.type != "cpu":
        return [_by_torch(module, kind) for kind in KINDS]
    run = rms_norm_kernel(module.weight.dtype)
    return [_fast(module, run, kind) for kind in KINDS] if run else []


def _by_torch(module: Any, kind: _Kind) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm of rows x [..., size] by torch's own, which computes in float32 and rounds once."""
    weight, size, eps = module.weight.detach(), module.weight.shape, _eps(module)
    if kind.rounded:
        return lambda x: functional.rms_norm(x, size, None, eps) * weight
    scale = weight.float() + kind.offset
    return lambda x: functional.rms_norm(x.float(), size, scale, eps).to(x.dtype)


def _fast(module: Any, run: Callable[..., None], kind: _Kind) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm, computed by the compiled function `run`."""
    scale, eps, size = module.weight.detach().float() + kind.offset, _eps(module), len(module.weight)

    def normalize(x: torch.Tensor) -> torch.Tensor:
        """Normalize rows x [..., size]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        numbers = x.numel()
        threads = worthwhile_threads(numbers, THREAD_NUMBERS)
        run(x.data_ptr(), scale.data_ptr(), out.data_ptr(), numbers // size, size, eps, kind.rounded, threads)
        return out

    return normalize


def _forward(
    switch: Switch,
    fast: Callable[[torch.Tensor], torch.Tensor],
    plain: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    size: int,
    *x: Any,
    **named: Any,
) -> torch.Tensor:
    if switch.on and len(x) == 1 and not named and x[0].dtype == dtype and x[0].shape[-1] == size:
        return fast(x[0])
    return plain(*x, **named)
