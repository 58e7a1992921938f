"""The latent's norm, both rotations and the write, against float64 and ``model.rope``."""

import math

import pytest
import torch

from kernels.latent_cache import PAGE, _write_latents_triton, write_latents, write_latents_reference
from model.args import LATENT_NORM_EPS, ModelArgs
from model.rope import inverse_frequencies, rotate, rotations
from tests.kernels.operands import assert_same_bits, frobenius_error

EPS = LATENT_NORM_EPS
POSITIONS = 500


def cache_operands(T: int, H: int, N: int, R: int, C: int, dtype=torch.float32, device: str = "cpu") -> dict:
    """Query and latent as columns of one product, and pages of NaN, so that what is written shows."""
    torch.manual_seed(T + H + N + R + C)
    product = torch.randn(T, H * (N + R) + C + R).to(device, dtype)
    angles = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -4, R // 2)
    n_pages = -(-T // PAGE) + 3
    return {
        "query": product[:, : H * (N + R)].view(T, H, N + R),
        "latent": product[:, H * (N + R) :],
        "norm": torch.rand(C, device=device) + 0.5,
        "eps": EPS,
        "rotations": torch.stack([angles.cos(), angles.sin()], dim=-1).to(device),
        "positions": torch.randint(0, POSITIONS, (T,)).to(device),
        "places": torch.randperm(n_pages * PAGE)[:T].to(device),
        "pages": torch.full((n_pages, PAGE, C + R), torch.nan, dtype=dtype, device=device),
    }


def rotated_in_float64(x: torch.Tensor, cosine_sine: torch.Tensor) -> torch.Tensor:
    """Every pair of ``x`` (T, ..., R) as a column vector, times its 2x2 rotation."""
    cosine, sine = cosine_sine.double().unbind(-1)
    matrices = torch.stack([cosine, -sine, sine, cosine], dim=-1).unflatten(-1, (2, 2))  # T, R/2, 2, 2
    pairs = x.double().unflatten(-1, (-1, 2))
    return torch.einsum("tpij,t...pj->t...pi", matrices, pairs).flatten(-2)


def written_in_float64(operands: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The query, and the rows (T, C + R) of the cache."""
    query, latent, norm = operands["query"].double(), operands["latent"].double(), operands["norm"].double()
    C = len(norm)
    of_token = operands["rotations"][operands["positions"]]
    R = 2 * of_token.shape[1]
    query = torch.cat([query[..., :-R], rotated_in_float64(query[..., -R:], of_token)], dim=-1)
    content, key = latent[:, :C], latent[:, C:]
    normed = content / ((content * content).mean(1, keepdim=True) + EPS).sqrt() * norm
    return query, torch.cat([normed, rotated_in_float64(key, of_token)], dim=1)


def assert_written(operands: dict, expected: tuple[torch.Tensor, torch.Tensor], gate: float) -> None:
    query, rows = expected
    assert frobenius_error(operands["query"], query) <= gate
    pages = operands["pages"].flatten(0, 1)
    places = operands["places"]
    assert frobenius_error(pages[places], rows) <= gate
    untouched = torch.ones(len(pages), dtype=torch.bool)
    untouched[places.cpu()] = False
    assert pages.cpu()[untouched].isnan().all(), "a row that is no token's was written"


SIZES = [(1, 1, 1, 2, 1), (3, 5, 63, 2, 63), (64, 4, 16, 8, 192), (65, 2, 128, 64, 576)]


@pytest.mark.parametrize(("T", "H", "N", "R", "C"), SIZES)
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, 1e-6), (torch.bfloat16, 2.5e-3)])
def test_reference_against_float64(T, H, N, R, C, dtype, gate):
    operands = cache_operands(T, H, N, R, C, dtype)
    expected = written_in_float64(operands)
    latent = operands["latent"].clone()
    write_latents(**operands)
    assert_written(operands, expected, gate)
    assert_same_bits(operands["latent"].contiguous(), latent)


def test_rotations_are_the_model_s():
    args = ModelArgs(qk_rope_head_dim=16)
    operands = cache_operands(65, 3, 8, 16, 32)
    unit = rotations(inverse_frequencies(args), 0, POSITIONS)
    operands |= {"rotations": torch.view_as_real(unit), "positions": torch.arange(7, 72)}
    key = operands["latent"][:, 32:]
    expected_query = rotate(operands["query"][..., 8:][None], unit[7:72])[0]
    expected_keys = rotate(key[None, :, None], unit[7:72])[0, :, 0]
    write_latents(**operands)
    assert torch.equal(operands["query"][..., 8:], expected_query)
    assert torch.equal(operands["pages"].flatten(0, 1)[operands["places"], 32:], expected_keys)


def test_a_quarter_turn_swaps_a_pair():
    """(a, b) turned by 90 degrees is (-b, a): neighbours are the pairs, not halves."""
    operands = cache_operands(1, 1, 1, 4, 1)
    quarter = torch.tensor([math.cos(math.pi / 2), math.sin(math.pi / 2)])
    operands["rotations"] = quarter.expand(POSITIONS, 2, 2).contiguous()
    operands["query"][:] = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0])
    write_latents(**operands)
    torch.testing.assert_close(operands["query"][0, 0], torch.tensor([9.0, -2.0, 1.0, -4.0, 3.0]))


def test_pages_of_another_dtype_round_what_the_activations_hold():
    operands = cache_operands(5, 2, 8, 8, 32, torch.bfloat16)
    wide = operands | {"query": operands["query"].clone(), "pages": operands["pages"].float()}
    write_latents(**wide)
    write_latents(**operands)
    assert torch.equal(wide["pages"].nan_to_num(), operands["pages"].float().nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "H", "N", "R", "C"),
    [(1, 16, 128, 64, 512), (65, 16, 128, 64, 512), (3, 128, 128, 64, 512), (65, 3, 63, 2, 1)],
)
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, 1e-6), (torch.bfloat16, 2.5e-3)])
def test_gpu_against_float64_and_the_reference(T, H, N, R, C, dtype, gate):
    operands = cache_operands(T, H, N, R, C, dtype, "cuda")
    expected = written_in_float64(operands)
    again = operands | {"query": operands["query"].clone(), "pages": operands["pages"].clone()}
    _write_latents_triton(**operands)
    assert_written(operands, expected, gate)
    write_latents_reference(**again)
    # The same roundings, but for an element in thousands whose float32 value lies between two results.
    assert frobenius_error(operands["query"], again["query"].double()) <= 5e-4
    assert frobenius_error(operands["pages"].nan_to_num(), again["pages"].nan_to_num().double()) <= 5e-4
