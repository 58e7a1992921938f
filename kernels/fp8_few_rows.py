"""The blockwise FP8 product for few rows, which only reads weights: split over K until the whole GPU reads.

The weights are the left operand, since their many rows suit the tensor cores and the few activations would not. Each
part writes a float32 sum; the last part of a tile to arrive adds them in their order, so that the result never depends
on which came first.

Shapes: a (M, K), a_s (M, ceil(K/128)); b (N, K), b_s (ceil(N/128), ceil(K/128)); result (M, N).
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import functools

import torch

from kernels.device import begin, jit, overlapping, tl, triton

BLOCK = 128  # of every scale, along K and along N
COLUMNS = 64  # rows of the weight that one program multiplies
PROGRAMS = 396  # at most three for each multiprocessor of a large GPU
MOST_ROWS = 64  # of one program
LEAST_BLOCKS = 14  # of K for one part: less, and its sums cost more to write and read than its reading gains


def fp8_few_rows(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``kernels.fp8_gemm.fp8_gemm`` on a GPU, meant for M up to 64; see there for the operands."""
    a, b, b_s = a.contiguous(), b.contiguous(), b_s.contiguous()
    M, K = a.shape
    N = b.shape[0]
    out = torch.empty(M, N, dtype=dtype, device=a.device)
    rows = min(max(16, triton.next_power_of_2(M)), MOST_ROWS)
    tiles, row_tiles = triton.cdiv(N, COLUMNS), triton.cdiv(M, rows)
    blocks = triton.cdiv(K, BLOCK)
    parts = max(1, min(PROGRAMS // tiles, blocks // LEAST_BLOCKS))
    blocks_of_part = triton.cdiv(blocks, parts)
    parts = triton.cdiv(blocks, blocks_of_part)
    sums = torch.empty(parts, M, N, dtype=torch.float32, device=a.device) if parts > 1 else out
    with torch.cuda.device(a.device):
        _few_rows_kernel[(row_tiles, tiles, parts)](
            a, a_s, b, b_s, out, sums, _arrivals(a.device, torch.cuda.current_stream(a.device).cuda_stream),
            M, N, K, a_s.stride(0), a_s.stride(1), blocks_of_part,
            PARTS=parts, ROWS=rows, COLUMNS=COLUMNS, BLOCK=BLOCK, WHOLE_K=K % BLOCK == 0,
            num_warps=4, num_stages=6 if rows <= 32 else 4, **overlapping(a.device),
        )  # fmt: skip
    return out


@functools.cache
def _arrivals(device: torch.device, stream: int) -> torch.Tensor:
    """Counters of parts that have arrived, one a tile; every launch leaves them at zero. Streams do not share them."""
    assert not torch.cuda.is_current_stream_capturing(), "run once on this stream before it is captured"
    return torch.zeros(8192, dtype=torch.int32, device=device)


@jit(do_not_specialize=["M", "blocks_of_part"])
def _few_rows_kernel(
    a_ptr: tl.tensor,
    a_s_ptr: tl.tensor,
    b_ptr: tl.tensor,
    b_s_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    M: int,
    N: int,
    K: int,
    a_s_stride_m: int,
    a_s_stride_k: int,
    blocks_of_part: int,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE_K: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """COLUMNS of the result for all rows, summed over one part of K."""
    begin(OVERLAP)
    row_tile, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    m = row_tile * ROWS + tl.arange(0, ROWS)
    blocks = tl.cdiv(K, BLOCK)
    first = part * blocks_of_part
    step = tl.arange(0, BLOCK)
    a_tile = a_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K + step[:, None]
    b_tile = b_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + step[None, :]
    a_scale = a_s_ptr + tl.minimum(m, M - 1) * a_s_stride_m
    b_scale = b_s_ptr + tile * COLUMNS // BLOCK * blocks

    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for block in range(first, tl.minimum(first + blocks_of_part, blocks)):
        if WHOLE_K:
            b = tl.load(b_tile + block * BLOCK)
            a = tl.load(a_tile + block * BLOCK)
        else:
            within = step < K - block * BLOCK
            b = tl.load(b_tile + block * BLOCK, mask=within[None, :], other=0.0)
            a = tl.load(a_tile + block * BLOCK, mask=within[:, None], other=0.0)
        scale = tl.load(a_scale + block * a_s_stride_k)[None, :] * tl.load(b_scale + block)
        total += tl.dot(b, a) * scale

    place = m.to(tl.int64)[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if PARTS == 1:
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(sums_ptr + part.to(tl.int64) * M * N + place, total, mask=inside)
        tl.debug_barrier()  # every thread's sums are written before the one thread that counts them says so
        arrivals = arrivals_ptr + row_tile * tl.num_programs(1) + tile
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
        if arrived == PARTS - 1:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            for other in range(PARTS):
                total += tl.load(sums_ptr + other * M * N + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(arrivals, 0)
