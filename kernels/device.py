"""What a device can do, and the one place where Triton is imported.

Triton is optional: macOS has none, and a machine that only converts checkpoints needs none. Without it ``jit``
leaves a kernel an ordinary function that nobody calls, and the plain-torch references do all the work.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["has_fp8_product", "jit", "tl", "triton"]

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0). Older GPUs have no float8_e4m3fn in Triton, not even as a cast.


@functools.cache
def has_fp8_product(device: torch.device) -> bool:
    """Whether ``device`` runs this package's Triton kernels: a CUDA device of capability 8.9 or later, with Triton.

    Elsewhere every function of this package takes its plain-torch reference, on the operands' own device.
    """
    if device.type != "cuda" or torch.version.cuda is None or triton is None:
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def jit(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit(**options)`` where Triton is installed, else a decorator that changes nothing."""

    def decorate(kernel: Callable[..., None]) -> Any:
        return kernel if triton is None else triton.jit(kernel, **options)

    return decorate
