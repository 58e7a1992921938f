"""Stored dtypes as torch sees them, and block scales as the numbers they stand for."""

import torch

from model.checkpoint.headers import ITEMSIZE

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
"""The safetensors names. Their sizes are ``headers.ITEMSIZE``."""

assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == ITEMSIZE


def decode_scale(stored: torch.Tensor) -> torch.Tensor:
    """Block scales as float32, whatever they are stored as.

    E8M0 bytes, also where a release stores them as U8, stand for 2^(byte - 127), and 255 for NaN (OCP Microscaling
    Formats, MX v1.0). Float dtypes are taken as they are.
    """
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    return stored.float()
