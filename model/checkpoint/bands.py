"""The work itself: an output file's tensors, read, dequantised where needed and written, one row band at a time."""

from collections.abc import Callable, Iterator

import torch

from kernels.weight_dequant import weight_dequant
from model.checkpoint.dtypes import TORCH_DTYPES, decode_scale
from model.checkpoint.plan import FilePlan, Target
from model.checkpoint.reader import TensorReader
from model.checkpoint.writer import ShardWriter

BAND_BYTES = 8 << 20
"""Source bytes of one band: large enough for the storage, small enough to stay near the processor's caches."""

DEQUANTIZE_FACTOR = 12
"""Memory a dequantised band needs for each of its source bytes: codes, float32 values, products, BF16 result."""


def write_bands(
    plan: FilePlan,
    reader: TensorReader,
    writer: ShardWriter,
    block: tuple[int, int],
    memory: int,
    advance: Callable[[int], None],
) -> None:
    """Fill ``writer`` with every tensor of ``plan``, holding about ``memory`` bytes at most.

    ``advance`` is told of the output's bytes.
    """
    for target in plan.targets:
        factor = DEQUANTIZE_FACTOR if target.scale else 2
        scale = decode_scale(reader.read(target.scale)) if target.scale else None
        for rows in row_bands(target, min(BAND_BYTES, memory // factor)):
            band = _band(target, rows, reader, scale, block)
            writer.append(band)
            advance(band.nbytes)


def row_bands(target: Target, size: int) -> Iterator[tuple[int, int]]:
    """Source rows ``[first, last)`` in order, each band at most ``size`` source bytes, but one row at least."""
    first, stop = (target.start, target.stop) if target.axis == 0 else (0, target.source.rows)
    row_bytes = target.source.columns * target.source.itemsize
    step = max(1, size // max(1, row_bytes))
    while first < stop:
        yield first, min(first + step, stop)
        first += step


def _band(
    target: Target, rows: tuple[int, int], reader: TensorReader, scale: torch.Tensor | None, block: tuple[int, int]
) -> torch.Tensor:
    """Rows of the target in its own dtype: copied, or float32(code) * scale rounded once to BF16."""
    first, last = (target.start, target.stop) if target.axis == 1 else (0, target.source.columns)
    if scale is None:
        return reader.read(target.source, rows, (first, last))
    # A column range is widened to where its block begins, so that the scales fit, and cut afterwards.
    skipped = first % block[1]
    codes = reader.read(target.source, rows, (first - skipped, last))
    scales = scale[:, (first - skipped) // block[1] : -(-last // block[1])]
    values = weight_dequant(codes, scales, block, TORCH_DTYPES[target.dtype], first_row=rows[0])
    return values[:, skipped:]
