"""What a device can do, and the one place where Triton is imported.

Triton is optional: macOS has none, and a machine that only converts checkpoints needs none. Without it ``jit``
leaves a kernel an ordinary function that nobody calls, and the plain-torch references do all the work.
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import functools
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

__all__ = ["begin", "has_fp8_product", "jit", "overlapping", "tl", "triton"]

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0). Older GPUs have no float8_e4m3fn in Triton, not even as a cast.


@functools.cache
def has_fp8_product(device: torch.device) -> bool:
    """Whether ``device`` runs this package's Triton kernels: a CUDA device of capability 8.9 or later, with Triton.

    Elsewhere every function of this package takes its plain-torch reference, on the operands' own device.
    """
    if device.type != "cuda" or torch.version.cuda is None or triton is None:
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


@functools.cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that calls ``begin``: where the device can, it is launched before the last one ends.

    That hides the launch itself (CUDA's programmatic dependent launch), of which a decode step has hundreds.
    """
    can = gdc_wait is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if can else {"OVERLAP": False}


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit(**options)`` where Triton is installed, else a decorator that changes nothing."""

    def decorate(kernel: Callable[..., Any]) -> Any:
        return kernel if triton is None else triton.jit(kernel, **options)

    return decorate


@jit()
def begin(OVERLAP: tl.constexpr) -> None:
    """First line of a kernel: let the next one be launched, and wait for the results of the one before."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
