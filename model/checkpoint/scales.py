"""A look at every FP8 scale before anything is written: a NaN or infinity there spoils a whole block of weights."""

import torch

from model.checkpoint.dtypes import decode_scale
from model.checkpoint.reader import TensorReader
from model.checkpoint.source import Source, shortened
from model.errors import InputError


def check_scales(source: Source) -> None:
    """Raise ``InputError`` naming each scale that is not finite, its block, and its byte where it is E8M0.

    Reads all scales, one four-thousandth of the FP8 weights they belong to.
    """
    problems = []
    with TensorReader(source.headers) as reader:
        for tensor in source.tensors.values():
            scale = source.scale(tensor.name) if tensor.name in source.weight_names else None
            if scale is None:
                continue
            stored = reader.read(scale)
            broken = ~decode_scale(stored).isfinite()
            if broken.any():
                block = [int(index) for index in broken.nonzero()[0]]
                value = stored[tuple(block)]
                what = "byte 255 (NaN)" if stored.dtype.itemsize == 1 else str(float(value))
                problems.append(
                    f"{scale.file}: scale {scale.name!r} is not finite in {int(broken.sum())} blocks, first in block "
                    f"{block}: {what}; fetch the file again"
                )
    if problems:
        raise InputError(shortened(problems))


def nan_codes(codes: torch.Tensor) -> tuple[int, list[int]]:
    """How many FP8 E4M3 codes of a matrix are NaN (0x7F, 0xFF), and the index of the first."""
    nan = (codes.view(torch.uint8) & 0x7F) == 0x7F
    count = int(nan.sum())
    return count, [int(index) for index in nan.nonzero()[0]] if count else []
