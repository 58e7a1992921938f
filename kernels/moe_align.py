"""The rows of a grouped product: (token, choice) slots sorted by expert and padded to whole tiles, on the device.

Shapes: T tokens, S choices a token (routed and shared), E experts of this rank, R rows a tile.
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import functools
from dataclasses import dataclass

import torch

from kernels.device import begin, has_fp8_product, jit, overlapping, tl, triton

SLOTS_OF_ONE_PROGRAM = 1024
"""Up to here one program sorts everything; beyond, torch's sort is faster and its launches do not matter."""


@dataclass(frozen=True)
class Tiles:
    """``slots`` int32 (tiles * rows,): slot ``token * S + choice`` of each row, T * S where the row is padding.

    ``experts`` int32 (tiles,): whose weights a tile is multiplied with, -1 where it is unused. How many tiles there are
    depends on shapes alone, so that nothing waits for the device.
    """

    slots: torch.Tensor
    experts: torch.Tensor
    rows: int


def max_tiles(n_slots: int, n_experts: int, rows: int) -> int:
    """The most tiles that any choice of experts can fill."""
    return min(n_slots, n_experts + n_slots // rows)


def align(indices: torch.Tensor, n_experts: int, rows: int) -> Tiles:
    """Sort the choices ``indices`` (T, S), expert ids of this rank or -1 for another rank's, into tiles of ``rows``."""
    n_slots = indices.numel()
    if len(indices) == 1:  # no two choices of a token share an expert
        return Tiles(_one_slot_a_tile(n_slots, rows, indices.device), indices.flatten().int(), rows)
    if has_fp8_product(indices.device) and n_slots <= SLOTS_OF_ONE_PROGRAM:
        return _align_triton(indices, n_experts, rows)
    return align_reference(indices, n_experts, rows)


@functools.cache
def _one_slot_a_tile(n_slots: int, rows: int, device: torch.device) -> torch.Tensor:
    """Slot i in the first row of tile i. Always the same, so it is kept."""
    slots = torch.full((n_slots, rows), n_slots, dtype=torch.int32, device=device)
    slots[:, 0] = torch.arange(n_slots, device=device)
    return slots.flatten()


def align_reference(indices: torch.Tensor, n_experts: int, rows: int) -> Tiles:
    """``align`` in plain torch, for any device; no step waits for the device."""
    n_slots, device = indices.numel(), indices.device
    tiles = max_tiles(n_slots, n_experts, rows)
    expert = indices.flatten()
    expert = torch.where(expert < 0, n_experts, expert).short()  # the fewer bits, the fewer passes of a radix sort
    sorted_experts, order = expert.sort(stable=True)
    sorted_experts = sorted_experts.long()
    starts = torch.searchsorted(sorted_experts, torch.arange(n_experts + 1, device=device))
    tiles_of = (starts[1:] - starts[:-1] + rows - 1) // rows
    ends = tiles_of.cumsum(0)
    local = sorted_experts.clamp(max=n_experts - 1)
    place = (ends - tiles_of)[local] * rows + torch.arange(n_slots, device=device) - starts[local]
    # Other ranks' slots go to one place behind the last tile, which is cut off.
    place = torch.where(sorted_experts < n_experts, place, tiles * rows)
    slots = torch.full((tiles * rows + 1,), n_slots, dtype=torch.int32, device=device)
    slots[place] = torch.where(sorted_experts < n_experts, order, n_slots).int()
    number = torch.arange(tiles, device=device)
    experts = torch.searchsorted(ends, number, right=True)
    return Tiles(slots[:-1], torch.where(experts < n_experts, experts, -1).int(), rows)


def _align_triton(indices: torch.Tensor, n_experts: int, rows: int) -> Tiles:
    n_slots = indices.numel()
    tiles = max_tiles(n_slots, n_experts, rows)
    slots = torch.empty(tiles * rows, dtype=torch.int32, device=indices.device)
    experts = torch.empty(tiles, dtype=torch.int32, device=indices.device)
    with torch.cuda.device(indices.device):
        _align_kernel[(1,)](
            indices,
            slots,
            experts,
            n_slots,
            n_experts,
            tiles,
            ROWS=rows,
            SLOTS=max(16, triton.next_power_of_2(n_slots)),
            EXPERTS=triton.next_power_of_2(n_experts + 1),
            ALL_ROWS=triton.next_power_of_2(tiles * rows),
            ALL_TILES=triton.next_power_of_2(tiles),
            num_warps=8,
            **overlapping(indices.device),
        )
    return Tiles(slots, experts, rows)


@jit()
def _align_kernel(
    indices_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    n_slots: int,
    n_experts: int,
    tiles: int,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ALL_TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: a sort of (expert, slot), then every slot's place from its expert's first tile."""
    begin(OVERLAP)
    slot = tl.arange(0, SLOTS)
    expert = tl.load(indices_ptr + slot, mask=slot < n_slots, other=-1).to(tl.int32)
    expert = tl.where(expert < 0, n_experts, expert)
    key = tl.sort(expert * SLOTS + slot)
    expert, slot_in_order = key // SLOTS, key % SLOTS

    counts = tl.histogram(expert, EXPERTS)
    number = tl.arange(0, EXPERTS)
    starts = tl.cumsum(counts) - counts
    tiles_of = tl.where(number < n_experts, (counts + ROWS - 1) // ROWS, 0)
    first = tl.cumsum(tiles_of) - tiles_of

    row = tl.arange(0, ALL_ROWS)
    tl.store(slots_ptr + row, tl.full((ALL_ROWS,), n_slots, tl.int32), mask=row < tiles * ROWS)
    tile = tl.arange(0, ALL_TILES)
    tl.store(experts_ptr + tile, tl.full((ALL_TILES,), -1, tl.int32), mask=tile < tiles)
    tl.debug_barrier()  # what follows overwrites parts of it from other threads

    place = tl.gather(first, expert, 0) * ROWS + slot - tl.gather(starts, expert, 0)
    tl.store(slots_ptr + place, slot_in_order, mask=expert < n_experts)
    for step in range(tl.max(tiles_of)):
        tl.store(experts_ptr + first + step, number, mask=step < tiles_of)
