"""How the memory that a user grants is shared out, and how freed memory really goes back."""

import ctypes
import sys

from model.checkpoint.direct import BUFFER_BYTES
from model.checkpoint.layout import FilePlan

M_MMAP_THRESHOLD = -3
"""glibc's malloc.h."""

MMAP_THRESHOLD = 256 << 10

OVERHEAD = 6 << 20
"""What a build needs besides bands: threads, digests, file buffers."""

PLAN_BYTES = 1 << 10
"""What headers and plan hold for each output tensor, as Python objects: 100 MB for DeepSeek-V3 in 16 shards."""


def band_memory(max_memory: int, workers: int, plans: tuple[FilePlan, ...]) -> int:
    """Bytes that each of ``workers`` may use for the bands of tensors it holds at a time."""
    targets = sum(len(plan.targets) for plan in plans)
    return max(0, max_memory - OVERHEAD - PLAN_BYTES * targets) // workers


def write_buffer(memory: int) -> int:
    """Bytes of each of a worker's two write buffers, out of its ``memory``."""
    return min(BUFFER_BYTES, memory // 8)


def return_freed_memory() -> None:
    """Have every freed band go back to the system at once.

    glibc raises the size from which it does so to that of the largest block freed so far (up to 32 MB) and keeps what
    is smaller: three times the cap was seen. Setting the size, to any value, turns that off.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none and need none
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
