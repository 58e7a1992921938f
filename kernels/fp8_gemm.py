"""The blockwise FP8 product: activations scaled per 1x128, weights per 128x128, summed in float32.

Shapes: a (..., M, K), a_s (..., M, ceil(K/128)); b (N, K), b_s (ceil(N/128), ceil(K/128)); result (..., M, N).
Within a block of 128 along K the tensor cores sum with fewer bits than float32 has; so each block's product is
scaled and added to a float32 sum outside them (DeepSeek-V3 technical report, section 3.3.2).
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernels.device import has_fp8_product, jit, tl, triton
from kernels.fp8_few_rows import fp8_few_rows

BLOCK = 128  # of every scale, along K and along N
FEW_ROWS = 64  # up to here reading weights is all that counts
GROUP_M = 8  # tiles of rows that run side by side, to share the weights they read through the L2 cache

# (BLOCK_M, BLOCK_N, warps, stages): what the autotuner tries. BLOCK_N divides BLOCK: a tile has one weight scale.
TILES = [
    (16, 32, 4, 6),
    (16, 64, 4, 6),
    (16, 128, 4, 5),
    (32, 32, 4, 6),
    (32, 64, 4, 5),
    (32, 128, 4, 4),
    (64, 32, 4, 6),
    (64, 64, 4, 5),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (128, 64, 4, 4),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
]


def fp8_gemm(
    a: torch.Tensor,
    a_s: torch.Tensor,
    b: torch.Tensor,
    b_s: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``(a * a_s) @ (b * b_s).T`` (..., M, N), summed in float32 and rounded once to ``dtype``.

    ``a`` and ``b`` are float8_e4m3fn, ``a_s`` and ``b_s`` their float32 scales, as ``act_quant`` gives them and as
    DeepSeek-V3's checkpoints hold them (module docstring for the shapes). N and K need not divide by 128.
    Raises ValueError for other dtypes, and for shapes that do not fit, naming them.
    """
    _check(a, a_s, b, b_s)
    if not has_fp8_product(a.device):
        return fp8_gemm_reference(a, a_s, b, b_s, dtype)
    rows, scales = a.reshape(-1, a.shape[-1]), a_s.reshape(-1, a_s.shape[-1])
    return _product(len(rows), b, dtype)(rows, scales, b, b_s, dtype).view(*a.shape[:-1], b.shape[0])


def _product(M: int, b: torch.Tensor, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The fastest product of that many rows, as measured on an H200 (``benchmarks.kernels``)."""
    if M <= FEW_ROWS:
        return fp8_few_rows
    fits = b.shape[0] % 16 == 0 and b.shape[1] % (4 * BLOCK) == 0  # cuBLAS reads scales by fours
    if dtype == torch.bfloat16 and fits and _torch_has_product(b.device):
        return fp8_gemm_torch
    return fp8_gemm_triton


@functools.cache
def _torch_has_product(device: torch.device) -> bool:
    """Whether torch's block-scaled product takes these operands: by version of CUDA, and by GPU."""
    codes = torch.zeros(128, 4 * BLOCK, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones(128, 4, device=device)
    try:
        fp8_gemm_torch(codes, scales, codes, scales[:1], torch.bfloat16)
    except (RuntimeError, ValueError, AttributeError):
        return False
    return True


def fp8_gemm_torch(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """``fp8_gemm`` by cuBLAS, through ``torch._scaled_mm``.

    It wants the activations' scales column by column, and rows by fours: missing ones are added and cut off again.
    """
    M = len(a)
    if M % 4:
        a, a_s = (
            torch.nn.functional.pad(part.view(torch.uint8), (0, 0, 0, -M % 4)).view(part.dtype) for part in (a, a_s)
        )
    out: torch.Tensor = torch._scaled_mm(a, b.t(), scale_a=a_s.t().contiguous().t(), scale_b=b_s.t(), out_dtype=dtype)
    return out[:M]


def _check(a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor) -> None:
    if (a.dtype, b.dtype) != (torch.float8_e4m3fn,) * 2 or (a_s.dtype, b_s.dtype) != (torch.float32,) * 2:
        raise ValueError(
            f"fp8_gemm: a {a.dtype}, a_s {a_s.dtype}, b {b.dtype}, b_s {b_s.dtype}: "
            "expected float8_e4m3fn with float32 scales"
        )
    if b.dim() != 2 or a.shape[-1:] != b.shape[-1:]:
        raise ValueError(f"fp8_gemm: a {tuple(a.shape)} and b {tuple(b.shape)}: expected (..., M, K) and (N, K)")
    blocks_n, blocks_k = (-(-size // BLOCK) for size in b.shape)
    expected = {"a_s": (*a.shape[:-1], blocks_k), "b_s": (blocks_n, blocks_k)}
    for name, scales in (("a_s", a_s), ("b_s", b_s)):
        if tuple(scales.shape) != expected[name]:
            raise ValueError(
                f"fp8_gemm: {name} is {tuple(scales.shape)}, expected {expected[name]} "
                f"for a {tuple(a.shape)} and b {tuple(b.shape)} in blocks of {BLOCK}"
            )


def fp8_gemm_reference(
    a: torch.Tensor,
    a_s: torch.Tensor,
    b: torch.Tensor,
    b_s: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``fp8_gemm`` in plain torch, for any device: one float32 product for each block along K."""
    N, K = b.shape
    out = torch.zeros(*a.shape[:-1], N, dtype=torch.float32, device=a.device)
    b_s = b_s.repeat_interleave(BLOCK, dim=0)[:N]  # (N, ceil(K / 128))
    for block, start in enumerate(range(0, K, BLOCK)):
        columns = slice(start, start + BLOCK)
        product = a[..., columns].float() @ b[:, columns].float().T
        out += product * a_s[..., block, None] * b_s[:, block]
    return out.to(dtype)


def fp8_gemm_triton(
    a: torch.Tensor,
    a_s: torch.Tensor,
    b: torch.Tensor,
    b_s: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``fp8_gemm`` as one Triton kernel, its tile tuned once for each N, K and range of M."""
    N, K = b.shape
    out = torch.empty(*a.shape[:-1], N, dtype=dtype, device=a.device)
    if out.numel() == 0:
        return out
    M = out.numel() // N

    def grid(tile: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"]),)

    with torch.cuda.device(a.get_device()):
        _tuned_kernel()[grid](
            a.contiguous(),
            a_s.contiguous(),
            b.contiguous(),
            b_s.contiguous(),
            out,
            M,
            N,
            K,
            m_range(M),
            BLOCK_K=BLOCK,
            WHOLE_K=K % BLOCK == 0,
            GROUP_M=GROUP_M,
        )
    return out


def m_range(M: int) -> int:
    """The range of M that shares a tile: its upper end, a power of two of at least 16, or 4096 for all above."""
    return min(max(16, 1 << (M - 1).bit_length()), 4096)


@functools.cache
def _tuned_kernel() -> Any:
    configs = [
        triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages)
        for block_m, block_n, warps, stages in TILES
    ]
    prune = {"early_config_prune": _worth_trying}
    tune = triton.autotune(configs, key=["N", "K", "M_RANGE"], prune_configs_by=prune, cache_results=True)
    return tune(_fp8_gemm_kernel)


def _worth_trying(configs: list[Any], arguments: dict[str, Any], **_: Any) -> list[Any]:
    """The tiles whose rows suit M's range. 64 always does: the least that Hopper's wgmma takes."""
    largest = arguments["M_RANGE"]
    return [config for config in configs if min(largest, 64) <= config.kwargs["BLOCK_M"] <= max(largest, 64)]


@jit(do_not_specialize=["M", "M_RANGE"])
def _fp8_gemm_kernel(
    a_ptr: tl.tensor,
    a_s_ptr: tl.tensor,
    b_ptr: tl.tensor,
    b_s_ptr: tl.tensor,
    out_ptr: tl.tensor,
    M: int,
    N: int,
    K: int,
    M_RANGE: int,  # read by the autotuner alone
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """One BLOCK_M x BLOCK_N tile of the result. BLOCK_K is the block of every scale, and BLOCK_N divides it."""
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_of_group = GROUP_M * tiles_n
    group_m = tile // tiles_of_group * GROUP_M
    group_size = tl.minimum(tiles_m - group_m, GROUP_M)
    first_m = (group_m + tile % tiles_of_group % group_size) * BLOCK_M
    first_n = tile % tiles_of_group // group_size * BLOCK_N

    # Rows past the edge read the last row again: they need no mask, and are not stored.
    row_m = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - first_m)
    row_n = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_n)
    column = tl.arange(0, BLOCK_K)
    blocks_k = tl.cdiv(K, BLOCK_K)
    a_tile = a_ptr + first_m.to(tl.int64) * K + row_m[:, None] * K + column[None, :]
    b_tile = b_ptr + first_n.to(tl.int64) * K + row_n[None, :] * K + column[:, None]
    a_scale = a_s_ptr + first_m.to(tl.int64) * blocks_k + row_m * blocks_k
    b_scale = b_s_ptr + first_n // BLOCK_K * blocks_k

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(blocks_k):
        if WHOLE_K:
            a = tl.load(a_tile)
            b = tl.load(b_tile)
        else:
            inside = column < K - block * BLOCK_K
            a = tl.load(a_tile, mask=inside[None, :], other=0.0)
            b = tl.load(b_tile, mask=inside[:, None], other=0.0)
        total += tl.dot(a, b) * (tl.load(a_scale)[:, None] * tl.load(b_scale))
        a_tile += BLOCK_K
        b_tile += BLOCK_K
        a_scale += 1
        b_scale += 1

    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    out = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
