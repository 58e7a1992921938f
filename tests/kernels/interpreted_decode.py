"""The Triton kernels of a decode step on the CPU: see interpreted.py, whose words on the interpreter hold here too."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from kernels import add_norm, fp8_few_rows, fused_moe, latent_cache, matvec, mla_decode, moe_align, moe_gate
from kernels.act_quant import act_quant_reference
from tests.kernels.interpreter import pretend_a_gpu
from tests.kernels.operands import (
    FP8,
    assert_same_bits,
    frobenius_error,
    poisoned_outputs,
    product_float64,
    random_codes,
    random_scales,
    spread,
)
from tests.kernels.test_add_norm import normed_operands
from tests.kernels.test_fused_moe import (
    applied_one_by_one,
    experts_apart,
    moe_operands,
    of_this_rank,
    rows_errors,
    stacked,
)
from tests.kernels.test_latent_cache import cache_operands
from tests.kernels.test_mla_decode import attention_operands
from tests.kernels.test_moe_align import SIZES, assert_aligned, choices
from tests.kernels.test_moe_gate import (
    ON_TRITON,
    ROUTINGS,
    V3,
    assert_chosen,
    chosen_in_float64,
    grid_logits,
    router,
)

FLOAT32 = 2e-6


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    pretend_a_gpu(monkeypatch)


@pytest.mark.parametrize(
    ("T", "S", "E", "R", "others"), [*((*size, 0.3) for size in SIZES), (3, 2, 4, 1, 1.0), (2, 8, 16, 16, 0.0)]
)
def test_moe_align(T, S, E, R, others):
    indices = choices(T, S, E, others)
    assert_aligned(moe_align._align_triton(indices, E, R), indices, E, R)


@pytest.mark.parametrize("name", ON_TRITON)
def test_choice_of_experts(name):
    routing, bias = ROUTINGS[name]
    bias = router(routing, 1, bias)[2]
    logits = grid_logits(routing, 9, parts=3)
    with poisoned_outputs():
        actual = moe_gate.choose_triton(logits, bias, routing)
    assert_chosen(actual, chosen_in_float64(logits.sum(0), bias, routing))


def test_the_lower_of_equal_experts_is_chosen():
    indices, _ = moe_gate.choose_triton(torch.zeros(1, 3, 256), None, V3)
    assert indices.tolist() == [[*range(8), 256]] * 3


@pytest.mark.parametrize(("T", "E", "D"), [(1, 5, 63), (3, 64, 192), (17, 40, 1100)])
def test_router_s_logits(T, E, D):
    torch.manual_seed(T + E + D)
    x, weight = torch.randn(T, D), torch.randn(E, D)
    with poisoned_outputs():
        logits = moe_gate._logits(x, weight)
        mixed = moe_gate._logits(x.bfloat16(), weight)
    assert frobenius_error(logits.sum(0), x.double() @ weight.double().T) <= FLOAT32
    assert frobenius_error(mixed.sum(0), x.bfloat16().double() @ weight.double().T) <= FLOAT32


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("S", [None, 0, 3])
@pytest.mark.parametrize("D", [1, 63, 192, 576])
def test_add_norm(D, S, scale_fmt, monkeypatch):
    # The interpreter's own cast to FP8 loses the carry of the mantissa: let the kernel write float32 quotients.
    monkeypatch.setattr(torch, "float8_e4m3fn", torch.float32)
    x, delta, weight, shares = normed_operands(3, D, S)
    expected_x = x.clone()
    expected = add_norm.add_norm_reference(expected_x, delta, weight, 1e-6, choices=shares)
    with poisoned_outputs():
        actual = add_norm._add_norm_triton(x, delta, weight, 1e-6, shares, True, scale_fmt)
    assert frobenius_error(x, expected_x) <= FLOAT32
    assert frobenius_error(actual.x, expected.x) <= FLOAT32
    quotient, scales = act_quant_reference(actual.x, scale_fmt=scale_fmt)
    assert_same_bits(actual.quantised[1], scales)
    assert_same_bits(actual.quantised[0], quotient)


@pytest.mark.parametrize(("T", "H", "N", "R", "C"), [(1, 1, 1, 2, 1), (3, 4, 16, 8, 32), (5, 3, 63, 16, 64)])
def test_latent_cache(T, H, N, R, C):
    operands = cache_operands(T, H, N, R, C)
    expected_query, expected_pages = operands["query"].clone(), operands["pages"].clone()
    latent_cache.write_latents_reference(**operands | {"query": expected_query, "pages": expected_pages})
    latent_cache._write_latents_triton(**operands)
    assert torch.equal(operands["pages"].isnan(), expected_pages.isnan())
    assert frobenius_error(operands["pages"].nan_to_num(), expected_pages.nan_to_num()) <= FLOAT32
    assert frobenius_error(operands["query"], expected_query) <= FLOAT32


@pytest.mark.parametrize(
    ("lengths", "H", "V"),
    [([1], 1, 1), ([64], 20, 32), ([65, 1, 64], 3, 63), ([1, 129, 192, 63], 20, 32), ([65] * 70, 16, 8)],
)
def test_mla_decode(lengths, H, V):
    operands = attention_operands(lengths, H, C=32, R=16, V=V)
    with poisoned_outputs():
        actual, quantised = mla_decode._mla_decode_triton(**operands)
    assert quantised is None
    assert frobenius_error(actual, mla_decode.mla_decode_reference(**operands)[0].double()) <= FLOAT32


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize(("lengths", "V"), [([65, 1, 64], 128), ([1], 63)])
def test_mla_decode_quantises(lengths, V, scale_fmt, monkeypatch):
    monkeypatch.setattr(torch, "float8_e4m3fn", torch.float32)  # as in test_add_norm
    operands = attention_operands(lengths, 5, C=32, R=16, V=V)
    with poisoned_outputs():
        heads, quantised = mla_decode._mla_decode_triton(**operands, quantise=True, scale_fmt=scale_fmt)
    expected, expected_s = act_quant_reference(heads.flatten(1), scale_fmt=scale_fmt)
    assert_same_bits(quantised[1], expected_s)
    assert_same_bits(quantised[0], expected)


@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize(("shared", "shared_inner"), [(0, 0), (2, 96), (3, 32), (1, 63)])
def test_fused_moe(shared, shared_inner, rows):
    shapes = fused_moe.ExpertShapes(4, 192, 96, shared, shared_inner)
    weights = stacked(shapes, experts_apart(shapes))
    x, indices = moe_operands(1 if rows == 1 else 5, 3, shapes)
    tiles = moe_align.align(indices, shapes.count, rows)
    with poisoned_outputs():
        actual = fused_moe.fused_moe_triton(x, indices, weights, tiles=tiles)
    expected = fused_moe.fused_moe_reference(x, indices, weights).double()
    assert frobenius_error(*of_this_rank(indices, actual, expected)) <= FLOAT32


@pytest.mark.parametrize(("scale_fmt", "rows"), [(None, 16), ("ue8m0", 32)])
@pytest.mark.parametrize(
    ("experts", "D", "inner", "shared", "shared_inner"), [(3, 320, 192, 3, 128), (2, 63, 128, 0, 0)]
)
def test_fused_moe_of_fp8(experts, D, inner, shared, shared_inner, scale_fmt, rows):
    """The inner quotients stay float32, as the interpreter casts to FP8 wrongly; its BF16 is cut short four times."""
    shapes = fused_moe.ExpertShapes(experts, D, inner, shared, shared_inner)
    apart = experts_apart(shapes, FP8)
    weights = stacked(shapes, apart)
    weights = dataclasses.replace(weights, down=weights.down.float())
    x, indices = moe_operands(5, 3, shapes)
    q, s = act_quant_reference(x, scale_fmt=scale_fmt)
    tiles = moe_align.align(indices, shapes.count, rows)
    with poisoned_outputs():
        actual = fused_moe.fused_moe_triton(x, indices, weights, scale_fmt, (q, s), tiles)
    exact = q.double() * spread(s.double(), (5, D), (1, 128))
    dense = [
        {name: of[f"w{name}"].double() * spread(of[f"scale{name}"].double(), of[f"w{name}"].shape) for name in "123"}
        for of in apart
    ]
    expected = applied_one_by_one(exact, indices, [{f"w{name}": of[name] for name in "123"} for of in dense])
    actual, expected = of_this_rank(indices, actual, expected)
    assert rows_errors(actual, expected).max() <= 0.02


@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 1, 1), (1, 192, 4096), (3, 63, 3900), (17, 576, 320), (63, 64, 192), (65, 192, 3968)]
)
def test_fp8_few_rows(M, N, K):
    torch.manual_seed(M + N + K)
    a, a_s = act_quant_reference(torch.randn(M, K) * torch.logspace(-2, 2, K))
    b, b_s = random_codes(N, K), random_scales(-(-N // 128), -(-K // 128))
    for _ in range(2):  # the second needs the first to have left its counters at zero
        with poisoned_outputs():
            actual = fp8_few_rows.fp8_few_rows(a, a_s, b, b_s, torch.float32)
        assert frobenius_error(actual, product_float64(a, a_s, b, b_s)) <= FLOAT32
    assert not fp8_few_rows._arrivals(a.device, 0).any()


@pytest.mark.parametrize(("N", "K"), [(1, 1), (63, 192), (130, 700), (576, 1025)])
def test_matvec(N, K):
    torch.manual_seed(N + K)
    x, weight = torch.randn(1, 1, K), torch.randn(N, 2 * K)[:, K:]
    with poisoned_outputs():
        actual = matvec.matvec_triton(x, weight)
    assert actual.shape == (1, 1, N)
    assert frobenius_error(actual, functional.linear(x.double(), weight.double())) <= FLOAT32
