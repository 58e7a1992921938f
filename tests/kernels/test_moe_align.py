"""Slots sorted by expert into whole tiles, against a loop over the experts."""

import pytest
import torch

from kernels.moe_align import SLOTS_OF_ONE_PROGRAM, Tiles, _align_triton, align, align_reference, max_tiles

# (tokens, choices a token, experts, rows a tile)
SIZES = [
    (1, 1, 1, 16),
    (1, 8, 256, 16),
    (2, 8, 16, 16),
    (63, 6, 64, 16),
    (192, 7, 40, 32),
    (3, 2, 4, 1),
    (576, 1, 3, 128),
]


def choices(T: int, S: int, E: int, others: float = 0.3) -> torch.Tensor:
    """Different experts for each token, a part of which are other ranks'."""
    torch.manual_seed(T * 31 + S * 7 + E)
    indices = torch.stack([torch.randperm(max(E, S))[:S] for _ in range(T)]).int()
    return torch.where((torch.rand(T, S) < others) | (indices >= E), -1, indices)


def aligned_by_loops(indices: torch.Tensor, n_experts: int, rows: int) -> tuple[list[int], list[int]]:
    """Slots and experts of all tiles, those unused last."""
    flat = indices.flatten().tolist()
    slots, experts = [], []
    for expert in range(n_experts):
        of_expert = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        for start in range(0, len(of_expert), rows):
            tile = of_expert[start : start + rows]
            slots += tile + [len(flat)] * (rows - len(tile))
            experts.append(expert)
    unused = max_tiles(len(flat), n_experts, rows) - len(experts)
    return slots + [len(flat)] * rows * unused, experts + [-1] * unused


def assert_aligned(actual: Tiles, indices: torch.Tensor, n_experts: int, rows: int) -> None:
    assert (actual.slots.dtype, actual.experts.dtype, actual.rows) == (torch.int32, torch.int32, rows)
    slots, experts = aligned_by_loops(indices, n_experts, rows)
    assert actual.experts.tolist() == experts
    assert actual.slots.tolist() == slots


@pytest.mark.parametrize("others", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("T", "S", "E", "R"), SIZES)
def test_reference_against_a_loop(T, S, E, R, others):
    indices = choices(T, S, E, others)
    assert_aligned(align_reference(indices, E, R), indices, E, R)


@pytest.mark.parametrize(("T", "S", "E", "R"), [size for size in SIZES if size[0] > 1])
def test_all_tokens_on_one_expert(T, S, E, R):
    indices = torch.full((T, S), E - 1, dtype=torch.int32)
    assert_aligned(align(indices, E, R), indices, E, R)


@pytest.mark.parametrize("rows", [1, 16])
def test_one_token_needs_no_sort(rows):
    """A tile for each of its choices, in their order; other ranks' are unused tiles."""
    indices = torch.tensor([[5, -1, 0, 7, -1, 2]])
    tiles = align(indices, 8, rows)
    assert tiles.experts.tolist() == [5, -1, 0, 7, -1, 2]
    assert tiles.slots.view(6, rows)[:, 0].tolist() == list(range(6))
    assert (tiles.slots.view(6, rows)[:, 1:] == 6).all()
    again = align(torch.tensor([[1, 2, 3, 4, 5, 6]]), 8, rows)
    assert again.experts.tolist() == [1, 2, 3, 4, 5, 6]
    assert again.slots.tolist() == tiles.slots.tolist()


@pytest.mark.parametrize(("n_slots", "n_experts", "rows"), [(1, 256, 16), (63, 4, 16), (64, 4, 16), (576, 1, 128)])
def test_tiles_suffice_for_the_worst_choice(n_slots, n_experts, rows):
    """All experts but one get a single slot, the last one the rest, or each as evenly as possible."""
    last = n_experts - 1
    for flat in ([min(slot, last) for slot in range(n_slots)], [slot % n_experts for slot in range(n_slots)]):
        used = sum(-(-flat.count(expert) // rows) for expert in set(flat))
        assert used <= max_tiles(n_slots, n_experts, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("others", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("T", "S", "E", "R"), [*SIZES, (32, 9, 257, 16), (128, 8, 66, 32), (113, 9, 33, 64), (128, 8, 32, 128)]
)
def test_gpu_equals_the_loop(T, S, E, R, others):
    indices = choices(T, S, E, others)
    if T * S <= SLOTS_OF_ONE_PROGRAM:
        for _ in range(3):
            assert_aligned(_align_triton(indices.cuda(), E, R), indices, E, R)
    assert_aligned(align_reference(indices.cuda(), E, R), indices, E, R)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 114, 4096])
def test_gpu_of_any_size(T):
    indices = choices(T, 9, 257)
    assert_aligned(align(indices.cuda(), 257, 16), indices, 257, 16)
