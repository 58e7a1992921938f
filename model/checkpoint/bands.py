"""The work itself: an output file's tensors, read, dequantised where needed and written, one row band at a time."""

from collections.abc import Callable, Iterator
from math import prod

import torch

from kernels.weight_dequant import BAND_ELEMENTS, Scratch, weight_dequant_reference
from model.checkpoint.dtypes import decode_scale
from model.checkpoint.layout import FilePlan, Piece, Target
from model.checkpoint.reader import TensorReader
from model.checkpoint.writer import ShardWriter

BAND_BYTES = 4 << 20
"""Source bytes of one band: large enough for the storage, small enough to stay near the processor's caches."""

COPY_FACTOR = 2
DEQUANTIZE_FACTOR = 9
"""Memory that a band needs for each of its source bytes: read and joined, or codes, BF16 result and the working
memory of the dequantisation."""


class Buffers:
    """One worker's memory for bands, taken once: fresh pages for every band would cost as much as the work."""

    def __init__(self, memory: int) -> None:
        self.copied = min(BAND_BYTES, memory // COPY_FACTOR)
        self.dequantized = min(BAND_BYTES, memory // DEQUANTIZE_FACTOR)
        self.read = torch.empty(max(self.copied, self.dequantized), dtype=torch.uint8)
        self.result = torch.empty(self.dequantized, dtype=torch.bfloat16)
        self.scratch = Scratch(min(self.dequantized, BAND_ELEMENTS))


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
    buffers = Buffers(memory)
    for target in plan.targets:
        for band in _TargetBands(target, reader, block, buffers).bands():
            writer.append(band)
            advance(band.nbytes)


class _TargetBands:
    """The rows of one target in order, in the target's dtype. A band is valid until the next one."""

    def __init__(self, target: Target, reader: TensorReader, block: tuple[int, int], buffers: Buffers) -> None:
        self.target, self.reader, self.block, self.buffers = target, reader, block, buffers
        self.scale = decode_scale(reader.read(target.scale)) if target.scale else None

    def bands(self) -> Iterator[torch.Tensor]:
        """Bands of the size that the buffers allow, but one row at least."""
        target = self.target
        size = self.buffers.copied if self.scale is None else self.buffers.dequantized
        row_bytes = prod(target.shape[1:]) * target.pieces[0].tensor.itemsize
        step = max(1, size // max(1, row_bytes))
        if target.axis == 1:
            for rows in _row_ranges(0, target.shape[0], step):
                yield self._joined(rows)
            return
        for piece in target.pieces:
            first, last = (piece.start, piece.stop) if target.axis == 0 else (0, piece.tensor.rows)
            for rows in _row_ranges(first, last, step):
                yield self._band(piece, rows, (0, piece.tensor.columns))

    def _joined(self, rows: tuple[int, int]) -> torch.Tensor:
        """The same rows of all pieces, side by side."""
        if len(self.target.pieces) == 1:
            (piece,) = self.target.pieces
            return self._band(piece, rows, (piece.start, piece.stop))
        parts = [self.reader.read(piece.tensor, rows, (piece.start, piece.stop)) for piece in self.target.pieces]
        return torch.cat(parts, dim=1)

    def _band(self, piece: Piece, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
        """A rectangle of one piece: copied, or float32(code) * scale rounded once to BF16."""
        if self.scale is None:
            return self.reader.read(piece.tensor, rows, columns, self.buffers.read)
        # A column range is widened to where its block begins, so that the scales fit, and cut afterwards.
        first, last = columns
        skipped = first % self.block[1]
        codes = self.reader.read(piece.tensor, rows, (first - skipped, last), self.buffers.read)
        scales = self.scale[:, (first - skipped) // self.block[1] : -(-last // self.block[1])]
        count = codes.numel()
        out = self.buffers.result[:count].view(codes.shape) if count <= self.buffers.result.numel() else None
        values = weight_dequant_reference(
            codes, scales, self.block, torch.bfloat16, rows[0], out=out, scratch=self.buffers.scratch
        )
        return values[:, skipped:]


def _row_ranges(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, step):
        yield start, min(start + step, last)
