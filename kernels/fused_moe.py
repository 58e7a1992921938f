"""The experts of a mixture, as two grouped products: gate with up and their SiLU product, then down.

Each tile multiplies a few tokens' rows with one expert's weights. With FP8, scales stand for 1x128 of activations and
128x128 of weights, and sums leave the tensor cores every 128 (see ``kernels.fp8_gemm``).

Shapes: T tokens, S choices a token, E routed experts, D width of the model, I inner width of an expert.
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kernels.act_quant import FP8_MAX, SMALLEST_AMAX, act_quant, scale_of
from kernels.device import begin, has_fp8_product, jit, overlapping, tl, triton
from kernels.fp8_gemm import fp8_gemm_reference
from kernels.moe_align import Tiles, align

BLOCK = 128


@dataclass(frozen=True)
class ExpertShapes:
    """Of one layer and rank: ``experts`` routed ones of ``inner`` width, and the shared ones together.

    Those are cut into ``shared`` further experts of ``shared_inner`` width, ids ``experts`` onwards.
    """

    experts: int
    dim: int
    inner: int
    shared: int = 0
    shared_inner: int = 0

    @property
    def count(self) -> int:
        """All experts."""
        return self.experts + self.shared

    def rows(self, routed: int, shared: int, block: int = 1) -> int:
        """Numbers in a stack whose experts have ``routed`` and ``shared`` x ``dim`` numbers, in blocks."""
        wide = -(-self.dim // block)
        return (self.experts * -(-routed // block) + -(-shared // block)) * wide


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one layer's experts, each kind in one piece of memory, so that a kernel finds any of them.

    ``gate_up`` holds for each routed expert gate (I, D) and up (I, D), then the shared experts' gate and up, whole;
    ``down`` each routed expert's (D, I), then the shared (D, shared * shared_inner). The scales of FP8 weights lie in
    ``gate_up_scale`` and ``down_scale`` in the same order.
    """

    shapes: ExpertShapes
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @classmethod
    def empty(cls, shapes: ExpertShapes, dtype: torch.dtype, device: torch.device | str) -> ExpertWeights:
        """Room for weights, to be filled through ``parts``; with scales where ``dtype`` is FP8."""
        size = 2 * shapes.rows(shapes.inner, shapes.shared * shapes.shared_inner)
        stacks = [torch.empty(count, dtype=dtype, device=device) for count in (size, size // 2)]
        if dtype == torch.float8_e4m3fn:
            blocks = shapes.rows(shapes.inner, shapes.shared * shapes.shared_inner, BLOCK)
            stacks += [torch.empty(count, dtype=torch.float32, device=device) for count in (2 * blocks, blocks)]
        return cls(shapes, *stacks)

    def parts(self, expert: int | None) -> dict[str, torch.Tensor]:
        """A routed expert's, or (None) the shared experts', matrices as views: w1, w2, w3, and scale1 to scale3."""
        views = self._views(self.gate_up, self.down, expert, 1, "w")
        if self.gate_up_scale is not None and self.down_scale is not None:
            views |= self._views(self.gate_up_scale, self.down_scale, expert, BLOCK, "scale")
        return views

    def _views(
        self, gate_up: torch.Tensor, down: torch.Tensor, expert: int | None, block: int, name: str
    ) -> dict[str, torch.Tensor]:
        shapes = self.shapes
        inner, dim = -(-shapes.inner // block), -(-shapes.dim // block)
        width = inner if expert is not None else -(-shapes.shared * shapes.shared_inner // block)
        first = (shapes.experts if expert is None else expert) * inner * dim
        half = width * dim
        return {
            f"{name}1": gate_up[2 * first : 2 * first + half].view(width, dim),
            f"{name}3": gate_up[2 * first + half : 2 * first + 2 * half].view(width, dim),
            f"{name}2": down[first : first + half].view(dim, width),
        }

    def one(self, expert: int) -> dict[str, torch.Tensor]:
        """As ``parts``, for one expert by its id: a shared one is a slice of the shared matrices."""
        if expert < self.shapes.experts:
            return self.parts(expert)
        begin = (expert - self.shapes.experts) * self.shapes.shared_inner
        sliced = {}
        for name, matrix in self.parts(None).items():
            block = 1 if name.startswith("w") else BLOCK
            part = slice(begin // block, -(-(begin + self.shapes.shared_inner) // block))
            sliced[name] = matrix[:, part] if name.endswith("2") else matrix[part]
        return sliced


def fused_moe(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: ExpertWeights,
    scale_fmt: str | None = None,
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Each choice's expert applied to its token: (T, D) and (T, S) to (T, S, D) of x's dtype, not weighted yet.

    ``indices`` are experts of this rank, or -1 for another's, whose results are left unwritten on a GPU and zero
    elsewhere. FP8 experts quantise their inputs per 128 columns by ``scale_fmt``; ``quantised`` is ``act_quant(x)``
    where it is known.
    """
    if not has_fp8_product(x.device) or x.dtype != torch.bfloat16:
        return fused_moe_reference(x, indices, weights, scale_fmt)
    return fused_moe_triton(x, indices, weights, scale_fmt, quantised)


def fused_moe_reference(
    x: torch.Tensor, indices: torch.Tensor, weights: ExpertWeights, scale_fmt: str | None = None
) -> torch.Tensor:
    """``fused_moe`` in plain torch, for any device and dtype: expert by expert."""
    out = torch.zeros(*indices.shape, x.shape[-1], dtype=x.dtype, device=x.device)
    for expert in indices.unique().tolist():
        if expert < 0:
            continue
        token, choice = (indices == expert).nonzero(as_tuple=True)
        of = weights.one(expert)
        gate = _product(x[token], of["w1"], of.get("scale1"), scale_fmt)
        inner = functional.silu(gate) * _product(x[token], of["w3"], of.get("scale3"), scale_fmt)
        out[token, choice] = _product(inner, of["w2"], of.get("scale2"), scale_fmt)
    return out


def _product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, scale_fmt: str | None) -> torch.Tensor:
    if scale is None:
        return functional.linear(x, weight)
    return fp8_gemm_reference(*act_quant(x, scale_fmt=scale_fmt), weight, scale, x.dtype)


def tile_rows(n_slots: int, n_experts: int) -> int:
    """Rows a tile: about what an expert gets, so that weights are read once and little is padding."""
    share = n_slots // max(n_experts, 1)
    return 16 if share <= 16 else 32 if share <= 48 else 64 if share <= 96 else 128


def fused_moe_triton(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: ExpertWeights,
    scale_fmt: str | None = None,
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """``fused_moe`` as two Triton kernels for BF16 activations."""
    shapes = weights.shapes
    n_slots, choices = indices.numel(), indices.shape[1]
    if tiles is None:
        one = len(x) == 1 and weights.gate_up_scale is None
        tiles = align(indices, shapes.count, 1 if one else tile_rows(n_slots, shapes.count))
    fp8 = weights.gate_up_scale is not None
    a, a_s = (quantised or act_quant(x, scale_fmt=scale_fmt)) if fp8 else (x, x)
    device, blocks = x.device, triton.cdiv(shapes.inner, BLOCK)
    h = torch.empty(n_slots, shapes.inner, dtype=weights.down.dtype, device=device)
    h_s = torch.empty(n_slots, blocks, dtype=torch.float32, device=device) if fp8 else h
    out = torch.empty(*indices.shape, shapes.dim, dtype=x.dtype, device=device)
    n_tiles = tiles.experts.numel()
    where = (tiles.slots, tiles.experts, n_slots, n_tiles)
    sizes = (shapes.experts, shapes.dim, shapes.inner, shapes.shared * shapes.shared_inner, shapes.shared_inner)
    with torch.cuda.device(device):
        first = _gate_up_config(tiles.rows, fp8)
        _gate_up_kernel[(n_tiles * triton.cdiv(shapes.inner, first["COLUMNS"]),)](
            a, a_s, weights.gate_up, weights.gate_up_scale if fp8 else a, h, h_s, *where, *sizes, choices,
            LARGEST=FP8_MAX, LEAST_AMAX=SMALLEST_AMAX, UE8M0=scale_fmt == "ue8m0", ROWS=tiles.rows, FP8=fp8, **first,
            **overlapping(device),
        )  # fmt: skip
        second = _down_config(tiles.rows, fp8)
        _down_kernel[(n_tiles * triton.cdiv(shapes.dim, second["COLUMNS"]),)](
            h, h_s, weights.down, weights.down_scale if fp8 else h, out, *where, *sizes,
            ROWS=tiles.rows, FP8=fp8, **second, **overlapping(device),
        )  # fmt: skip
    return out


# (rows a tile up to, COLUMNS, STEP, warps, stages), measured on an H200: benchmarks.kernels. FP8 takes one scale of 128
# columns of the gate and up products' result, so their tiles have as many.
GATE_UP_BF16 = [(1, 4, 512, 4, 3), (32, 64, 128, 2, 3), (64, 128, 64, 4, 4), (128, 128, 64, 8, 4)]
DOWN_BF16 = [(1, 32, 128, 8, 3), (32, 64, 128, 2, 4), (64, 128, 64, 4, 4), (128, 256, 64, 8, 3)]
GATE_UP_FP8 = [(32, 128, 128, 8, 3), (64, 128, 128, 8, 5), (128, 128, 128, 8, 4)]
DOWN_FP8 = [(16, 128, 128, 8, 3), (32, 128, 128, 4, 5), (128, 128, 128, 8, 5)]


def _gate_up_config(rows: int, fp8: bool) -> dict[str, Any]:
    return _config(GATE_UP_FP8 if fp8 else GATE_UP_BF16, rows)


def _down_config(rows: int, fp8: bool) -> dict[str, Any]:
    return _config(DOWN_FP8 if fp8 else DOWN_BF16, rows)


def _config(table: list[tuple[int, int, int, int, int]], rows: int) -> dict[str, Any]:
    _, columns, step, warps, stages = next(entry for entry in table if rows <= entry[0])
    return {"COLUMNS": columns, "STEP": step, "STAGES": stages, "num_warps": warps, "num_stages": stages}


@jit()
def _row_product(
    x_tile: tl.tensor, w_tile: tl.tensor, K: int, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr
) -> tl.tensor:
    """(COLUMNS, 1) of one row without tensor cores; see ``kernels.matvec``."""
    step = tl.arange(0, STEP)
    total = tl.zeros((COLUMNS, STEP), dtype=tl.float32)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        within = step < K - k
        x = tl.trans(tl.load(x_tile + k, mask=within[:, None], other=0.0).to(tl.float32))
        total += tl.load(w_tile + k, mask=within[None, :], other=0.0).to(tl.float32) * x
    return tl.sum(total, axis=1)[:, None]


@jit()
def _two_rows_product(
    x_tile: tl.tensor,
    w1_tile: tl.tensor,
    w3_tile: tl.tensor,
    K: int,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """As ``_row_product`` for two weights, reading the row once."""
    step = tl.arange(0, STEP)
    first = tl.zeros((COLUMNS, STEP), dtype=tl.float32)
    third = tl.zeros((COLUMNS, STEP), dtype=tl.float32)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        within = step < K - k
        x = tl.trans(tl.load(x_tile + k, mask=within[:, None], other=0.0).to(tl.float32))
        first += tl.load(w1_tile + k, mask=within[None, :], other=0.0).to(tl.float32) * x
        third += tl.load(w3_tile + k, mask=within[None, :], other=0.0).to(tl.float32) * x
    return tl.sum(first, axis=1)[:, None], tl.sum(third, axis=1)[:, None]


@jit(do_not_specialize=["n_slots", "n_tiles"])
def _gate_up_kernel(  # noqa: PLR0915
    a_ptr: tl.tensor,
    a_s_ptr: tl.tensor,
    w_ptr: tl.tensor,
    w_s_ptr: tl.tensor,
    h_ptr: tl.tensor,
    h_s_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    n_slots: int,
    n_tiles: int,
    E: int,
    D: int,
    I: int,  # noqa: E741
    SHARED: int,
    SHARED_INNER: int,
    S: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    UE8M0: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """COLUMNS of ``silu(gate) * up`` for the rows of one tile.

    The weights are the left operand: their many rows suit the tensor cores, which the few tokens would not. Programs
    of the same columns run side by side, so that tiles of one expert share its weights in the L2 cache.
    """
    begin(OVERLAP)
    tile = tl.program_id(0) % n_tiles
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    slot = tl.load(slots_ptr + tile * ROWS + tl.arange(0, ROWS))
    filled = slot < n_slots
    token = tl.where(filled, slot // S, 0)
    routed = expert < E
    inner = tl.where(routed, I, SHARED_INNER)
    if tl.program_id(0) // n_tiles * COLUMNS >= inner:
        return
    column = tl.program_id(0) // n_tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    row_of_w = tl.where(inside, column, 0)
    step = tl.arange(0, STEP)
    # A shared expert's gate and up are rows of the matrices of all shared experts.
    first = tl.where(routed, 2 * expert * I, 2 * E * I + (expert - E) * SHARED_INNER).to(tl.int64)
    half = tl.where(routed, I, SHARED).to(tl.int64)
    a_tile = a_ptr + token.to(tl.int64)[None, :] * D + step[:, None]
    gate_tile = w_ptr + first * D + row_of_w[:, None] * D + step[None, :]
    up_tile = gate_tile + half * D
    if FP8:
        blocks = tl.cdiv(D, STEP)
        a_scale = a_s_ptr + token * blocks
        blocks_of_inner = tl.cdiv(I, 128)
        shared_first = 2 * E * blocks_of_inner + (expert - E) * SHARED_INNER // 128
        first_block = tl.where(routed, 2 * expert * blocks_of_inner, shared_first)
        gate_scale = w_s_ptr + (first_block + tl.program_id(0) // n_tiles) * blocks
        up_scale = gate_scale + tl.where(routed, blocks_of_inner, tl.cdiv(SHARED, 128)) * blocks

    if ROWS == 1:
        gate, up = _two_rows_product(a_tile, gate_tile, up_tile, D, COLUMNS, STEP, STAGES)
    else:
        gate = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        up = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for k in range(0, D if ROWS > 1 else 0, STEP):
        within = step < D - k
        a = tl.load(a_tile + k, mask=within[:, None], other=0.0)
        w1 = tl.load(gate_tile + k, mask=within[None, :], other=0.0)
        w3 = tl.load(up_tile + k, mask=within[None, :], other=0.0)
        if FP8:
            block = k // STEP
            scale = tl.load(a_scale + block)[None, :]
            gate += tl.dot(w1, a) * (scale * tl.load(gate_scale + block))
            up += tl.dot(w3, a) * (scale * tl.load(up_scale + block))
        else:
            gate = tl.dot(w1, a, gate)
            up = tl.dot(w3, a, up)

    if FP8:
        # As the simple path does: each product rounded to BF16, SiLU and product in BF16, then quantised.
        gate = gate.to(tl.bfloat16).to(tl.float32)
        up = up.to(tl.bfloat16).to(tl.float32)
        h = (gate / (1 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32) * up
        h = tl.where(inside[:, None], h.to(tl.bfloat16).to(tl.float32), 0.0)
        s = scale_of(tl.max(tl.abs(h), axis=0), LARGEST, LEAST_AMAX, UE8M0)
        h = tl.div_rn(h, s[None, :])
        tl.store(h_s_ptr + slot * tl.cdiv(I, 128) + tl.program_id(0) // n_tiles, s, mask=filled)
    else:
        h = gate / (1 + tl.exp(-gate)) * up
    place = h_ptr + slot.to(tl.int64)[:, None] * I + column[None, :]
    tl.store(place, tl.trans(h.to(h_ptr.dtype.element_ty)), mask=filled[:, None] & inside[None, :])


@jit(do_not_specialize=["n_slots", "n_tiles"])
def _down_kernel(
    h_ptr: tl.tensor,
    h_s_ptr: tl.tensor,
    w_ptr: tl.tensor,
    w_s_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    n_slots: int,
    n_tiles: int,
    E: int,
    D: int,
    I: int,  # noqa: E741
    SHARED: int,
    SHARED_INNER: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """COLUMNS of the down projection for the rows of one tile; see ``_gate_up_kernel``."""
    begin(OVERLAP)
    tile = tl.program_id(0) % n_tiles
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    slot = tl.load(slots_ptr + tile * ROWS + tl.arange(0, ROWS))
    filled = slot < n_slots
    row_of_h = tl.where(filled, slot, 0)
    column = tl.program_id(0) // n_tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    row_of_w = tl.where(inside, column, 0)
    step = tl.arange(0, STEP)
    routed = expert < E
    inner = tl.where(routed, I, SHARED_INNER)
    # A shared expert's down projection is columns of the matrix of all shared experts.
    first = tl.where(routed, expert.to(tl.int64) * D * I, tl.cast(E, tl.int64) * D * I + (expert - E) * SHARED_INNER)
    stride = tl.where(routed, I, SHARED)
    h_tile = h_ptr + row_of_h.to(tl.int64)[None, :] * I + step[:, None]
    w_tile = w_ptr + first + row_of_w.to(tl.int64)[:, None] * stride + step[None, :]
    if FP8:
        blocks = tl.cdiv(I, STEP)
        h_scale = h_s_ptr + row_of_h * blocks
        blocks_of_dim = tl.cdiv(D, 128)
        shared_first = E * blocks_of_dim * blocks + (expert - E) * SHARED_INNER // 128
        first_block = tl.where(routed, expert * blocks_of_dim * blocks, shared_first)
        row_blocks = tl.where(routed, blocks, tl.cdiv(SHARED, 128))
        w_scale = w_s_ptr + first_block + tl.program_id(0) // n_tiles * COLUMNS // 128 * row_blocks

    if ROWS == 1:
        total = _row_product(h_tile, w_tile, inner, COLUMNS, STEP, STAGES)
    else:
        total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for k in range(0, inner if ROWS > 1 else 0, STEP):
        within = step < inner - k
        h = tl.load(h_tile + k, mask=within[:, None], other=0.0)
        w = tl.load(w_tile + k, mask=within[None, :], other=0.0)
        if FP8:
            block = k // STEP
            total += tl.dot(w, h) * (tl.load(h_scale + block)[None, :] * tl.load(w_scale + block))
        else:
            total = tl.dot(w, h, total)
    place = out_ptr + slot.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(place, tl.trans(total.to(out_ptr.dtype.element_ty)), mask=filled[:, None] & inside[None, :])
