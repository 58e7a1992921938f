"""The work itself: an output file's tensors, read, dequantised where needed and written, one row band at a time."""

from collections.abc import Callable, Iterator
from math import prod

import torch

from kernels.weight_dequant import weight_dequant
from model.checkpoint.dtypes import TORCH_DTYPES, decode_scale
from model.checkpoint.layout import FilePlan, Piece, Target
from model.checkpoint.reader import TensorReader
from model.checkpoint.writer import ShardWriter

BAND_BYTES = 8 << 20
"""Source bytes of one band: large enough for the storage, small enough to stay near the processor's caches."""

COPY_FACTOR = 3
DEQUANTIZE_FACTOR = 12
"""Memory that a band needs for each of its source bytes while the one before it is still held: read and joined, or
codes, values, products and BF16 result."""


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
        size = min(BAND_BYTES, memory // (DEQUANTIZE_FACTOR if target.scale else COPY_FACTOR))
        for band in _TargetBands(target, reader, block).bands(size):
            writer.append(band)
            advance(band.nbytes)


class _TargetBands:
    """The rows of one target in order, in the target's dtype."""

    def __init__(self, target: Target, reader: TensorReader, block: tuple[int, int]) -> None:
        self.target, self.reader, self.block = target, reader, block
        self.scale = decode_scale(reader.read(target.scale)) if target.scale else None

    def bands(self, size: int) -> Iterator[torch.Tensor]:
        """Bands of at most ``size`` source bytes each, but one row at least."""
        target = self.target
        row_bytes = prod(target.shape[1:]) * target.pieces[0].tensor.itemsize
        step = max(1, size // max(1, row_bytes))
        if target.axis == 1:
            for rows in _row_ranges(0, target.shape[0], step):
                parts = [self._band(piece, rows, (piece.start, piece.stop)) for piece in target.pieces]
                yield torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
            return
        for piece in target.pieces:
            first, last = (piece.start, piece.stop) if target.axis == 0 else (0, piece.tensor.rows)
            for rows in _row_ranges(first, last, step):
                yield self._band(piece, rows, (0, piece.tensor.columns))

    def _band(self, piece: Piece, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
        """A rectangle of one piece: copied, or float32(code) * scale rounded once to BF16."""
        if self.scale is None:
            return self.reader.read(piece.tensor, rows, columns)
        # A column range is widened to where its block begins, so that the scales fit, and cut afterwards.
        first, last = columns
        skipped = first % self.block[1]
        codes = self.reader.read(piece.tensor, rows, (first - skipped, last))
        scales = self.scale[:, (first - skipped) // self.block[1] : -(-last // self.block[1])]
        values = weight_dequant(codes, scales, self.block, TORCH_DTYPES[self.target.dtype], first_row=rows[0])
        return values[:, skipped:]


def _row_ranges(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, step):
        yield start, min(start + step, last)
