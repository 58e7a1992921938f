"""What the Triton kernels need to run in the interpreter, on the CPU, in a process with TRITON_INTERPRET=1."""

import contextlib
import types

import pytest
import torch


def pretend_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Launches find a device of capability 8.0, on which no launch overlaps the one before, and its only stream."""
    patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    patch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 0))
    patch.setattr(torch.cuda, "current_stream", lambda _=None: types.SimpleNamespace(cuda_stream=0))
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
