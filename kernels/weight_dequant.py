"""Dequantisation of block-scaled FP8 weights: exactly ``float32(w) * s``, rounded once to the result's dtype."""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import torch

from kernels.device import has_fp8_product, jit, tl, triton

BAND_ELEMENTS = 1 << 20  # what the reference decodes at a time, with 6 MiB of scratch; less is slower
TILE_ROWS = 2  # rows and, side by side, blocks for each Triton program: long runs of memory
TILE_BLOCKS = 16


def weight_dequant(
    w: torch.Tensor,
    s: torch.Tensor,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    first_row: int | None = None,
) -> torch.Tensor:
    """Dequantise ``w`` (N, K) float8_e4m3fn, one scale for each block of ``block_size`` values; edges may be partial.

    ``s`` is float32 (ceil(N / block_size[0]), ceil(K / block_size[1])). With ``first_row``, ``w`` is a band of a
    taller matrix that starts at that row of it, on a block boundary or not, and ``s`` is the whole matrix's grid.
    Returns (N, K) of ``dtype``, the same values on every device (scales below 2**120 in magnitude).
    The format is that of the ``weight_scale_inv`` tensors in DeepSeek-V3's checkpoints.
    Raises ValueError for another dtype, and for a grid that does not fit, naming the shapes.
    """
    _check(w, s, block_size, first_row)
    dequantise = weight_dequant_triton if has_fp8_product(w.device) else weight_dequant_reference
    return dequantise(w, s, block_size, dtype, first_row)


def _check(w: torch.Tensor, s: torch.Tensor, block_size: tuple[int, int], first_row: int | None) -> None:
    if w.dtype != torch.float8_e4m3fn or s.dtype != torch.float32:
        raise ValueError(f"weight_dequant: w is {w.dtype} and s {s.dtype}, expected float8_e4m3fn and float32")
    if w.dim() != 2 or s.dim() != 2:
        raise ValueError(f"weight_dequant: w {tuple(w.shape)} and s {tuple(s.shape)} must both be matrices")
    if min(block_size) < 1 or (first_row or 0) < 0:
        raise ValueError(f"weight_dequant: block size {block_size} or first row {first_row} is out of range")
    last_row = (first_row or 0) + w.shape[0]
    grid = (-(-last_row // block_size[0]), -(-w.shape[1] // block_size[1]))
    enough_rows = s.shape[0] == grid[0] if first_row is None else s.shape[0] >= grid[0]
    if not enough_rows or s.shape[1] != grid[1]:
        at_least = "" if first_row is None else "at least "
        raise ValueError(
            f"weight_dequant: scales {tuple(s.shape)} do not fit w {tuple(w.shape)} from row {first_row or 0} "
            f"in blocks of {tuple(block_size)}: expected {at_least}{grid}"
        )


class Scratch:
    """Working memory of the reference, kept from call to call: fresh pages cost as much as the arithmetic on them."""

    def __init__(self, elements: int = BAND_ELEMENTS, device: torch.device | str = "cpu") -> None:
        self.elements = elements
        self._bits = torch.empty(elements, dtype=torch.int16, device=device)
        self._values = torch.empty(elements, dtype=torch.float32, device=device)

    def band(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int16 and float32 matrices of (rows, columns); a longer row than was thought of makes it grow."""
        count = rows * columns
        if count > self.elements:
            self.elements = count
            self._bits, self._values = (torch.empty(count, dtype=t.dtype, device=t.device) for t in self._both())
        bits, values = self._both()
        return bits[:count].view(rows, columns), values[:count].view(rows, columns)

    def _both(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._bits, self._values


def weight_dequant_reference(
    w: torch.Tensor,
    s: torch.Tensor,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    first_row: int | None = None,
    *,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """``weight_dequant`` in plain torch, for any device.

    The codes are decoded by integer shifts into float16, whose conversion to float32 is vectorised: faster than a table
    of all values, and far faster than torch's own conversion of float8. ``out`` (N, K) of ``dtype`` and ``scratch``
    are used where they are given.
    """
    N, K = w.shape
    if out is None:
        out = torch.empty(N, K, dtype=dtype, device=w.device)
    if out.numel() == 0:
        return out
    s = s * 256.0  # what _decode leaves out: exact, and so is the product's single rounding
    scratch = scratch or Scratch(min(N * K, BAND_ELEMENTS), w.device)
    band_rows = max(1, scratch.elements // K)
    codes = w.view(torch.int8)
    for start in range(0, N, band_rows):
        band = codes[start : start + band_rows]
        bits, values = scratch.band(*band.shape)
        _decode(band, bits, values)
        matrix_rows = torch.arange(band.shape[0], device=w.device) + (first_row or 0) + start
        _scale_columns(values, s[matrix_rows // block_size[0]], block_size[1])
        out[start : start + band.shape[0]] = values
    return out


def _decode(codes: torch.Tensor, bits: torch.Tensor, values: torch.Tensor) -> None:
    """Write float32(FP8 of ``codes``) / 256 into ``values``; codes int8, bits int16 scratch, all of one shape.

    FP8 ``s eeee mmm`` becomes float16 ``s 0eeee mmm0000000``: the same number, subnormal or not, but for the biases
    of the exponents, 15 - 7 = 8. The shift drags a copy of the sign into float16's top exponent bit: it is cleared.
    """
    bits.copy_(codes)
    bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    values.copy_(bits.view(torch.float16))
    # The codes 0x7f and 0xff are NaN. They are the largest int8 and the largest uint8, which is quick to ask.
    if codes.amax() == 0x7F or codes.view(torch.uint8).amax() == 0xFF:
        values.masked_fill_(codes.bitwise_and(0x7F) == 0x7F, float("nan"))


def _scale_columns(values: torch.Tensor, s: torch.Tensor, block: int) -> None:
    """Multiply ``values`` (n, K) in place by ``s`` (n, ceil(K / block)), each scale over ``block`` columns."""
    n, K = values.shape
    whole = K // block
    values[:, : whole * block].view(n, whole, block).mul_(s[:, :whole, None])
    values[:, whole * block :].mul_(s[:, whole:])


def weight_dequant_triton(
    w: torch.Tensor,
    s: torch.Tensor,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    first_row: int | None = None,
) -> torch.Tensor:
    """``weight_dequant`` as one Triton kernel. Rows may be strided (a column slice), values may not."""
    N, K = w.shape
    out = torch.empty(N, K, dtype=dtype, device=w.device)
    if out.numel() == 0:
        return out
    if w.stride(1) != 1:
        w = w.contiguous()
    s = s.contiguous()
    grid = (-(-N // TILE_ROWS) * -(-s.shape[1] // TILE_BLOCKS),)
    with torch.cuda.device(w.get_device()):
        _weight_dequant_kernel[grid](
            w,
            s,
            out,
            N,
            K,
            w.stride(0),
            first_row or 0,
            BLOCK_ROWS=block_size[0],
            BLOCK_COLUMNS=block_size[1],
            TILE_ROWS=TILE_ROWS,
            TILE_BLOCKS=TILE_BLOCKS,
            TILE_COLUMNS=triton.next_power_of_2(block_size[1]),
        )
    return out


@jit(do_not_specialize=["first_row"])
def _weight_dequant_kernel(
    w_ptr: tl.tensor,
    s_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: int,
    K: int,
    row_stride: int,
    first_row: int,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """TILE_ROWS rows of TILE_BLOCKS blocks side by side. Its rows may lie in two blocks, so each has its scale."""
    tiles = tl.cdiv(tl.cdiv(K, BLOCK_COLUMNS), TILE_BLOCKS)
    tile_row = tl.program_id(0) // tiles * TILE_ROWS
    row = tl.arange(0, TILE_ROWS)[:, None, None]
    block = (tl.program_id(0) % tiles * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS))[None, :, None]
    column_in_block = tl.arange(0, TILE_COLUMNS)[None, None, :]
    column = block * BLOCK_COLUMNS + column_in_block
    row_inside = tile_row + row < N
    inside = row_inside & (column_in_block < BLOCK_COLUMNS) & (column < K)

    scale_row = (first_row + tile_row + row) // BLOCK_ROWS
    blocks = tl.cdiv(K, BLOCK_COLUMNS)
    s = tl.load(s_ptr + scale_row * blocks + block, mask=row_inside & (block < blocks), other=0.0)
    # 64-bit arithmetic for the tile's first row alone: a matrix may hold more than 2**31 values, a tile may not
    w_ptr += tile_row.to(tl.int64) * row_stride
    out_ptr += tile_row.to(tl.int64) * K
    w = tl.load(w_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * K + column, (w * s).to(out_ptr.dtype.element_ty), mask=inside)
