"""The Triton kernels on the CPU, for a process with TRITON_INTERPRET=1: test_triton_on_the_cpu.py starts it.

The interpreter truncates when it casts to bfloat16, so outputs are float32 here, and bfloat16 within one unit.
It reads FP8's two NaN codes as numbers, so there are none of them here.
"""

import pytest
import torch

from kernels import fp8_gemm
from kernels.act_quant import act_quant_reference, act_quant_triton
from kernels.weight_dequant import weight_dequant_reference, weight_dequant_triton
from tests.kernels.interpreter import pretend_a_gpu
from tests.kernels.operands import (
    assert_same_bits,
    frobenius_error,
    poisoned_outputs,
    product_float64,
    random_codes,
    random_scales,
)
from tests.kernels.test_act_quant import zeros_and_all_ones


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    pretend_a_gpu(monkeypatch)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("K", [1, 63, 192, 576, 10944])
def test_act_quant(K, scale_fmt, monkeypatch):
    # The interpreter's own cast to FP8 loses the carry of the mantissa: let the kernel write float32 quotients.
    monkeypatch.setattr(torch, "float8_e4m3fn", torch.float32)
    torch.manual_seed(K)
    x = torch.randn(2, 2, K + 5)[..., 3:-2] * torch.logspace(-5, 3, K)
    with poisoned_outputs():
        quotient, s = act_quant_triton(x, 128, scale_fmt)
    assert quotient.dtype == torch.float32
    expected, expected_s = act_quant_reference(x, 128, scale_fmt)
    assert expected.dtype == torch.float32
    assert_same_bits(s, expected_s)
    assert_same_bits(quotient, expected)


def test_act_quant_of_signed_zeros_and_a_scale_whose_mantissa_is_all_ones(monkeypatch):
    monkeypatch.setattr(torch, "float8_e4m3fn", torch.float32)
    x = zeros_and_all_ones()
    with poisoned_outputs():
        quotient, s = act_quant_triton(x)
    expected, expected_s = act_quant_reference(x)
    assert_same_bits(s, expected_s)
    assert_same_bits(quotient, expected)


@pytest.mark.parametrize(("N", "K"), [(1, 1), (63, 192), (192, 63), (576, 320), (5, 10944)])
def test_weight_dequant(N, K):
    torch.manual_seed(N + K)
    w, s = random_codes(N, K), random_scales(-(-N // 128), -(-K // 128))
    with poisoned_outputs():
        actual = weight_dequant_triton(w, s, dtype=torch.float32)
        in_bfloat16 = weight_dequant_triton(w, s)
    assert_same_bits(actual, weight_dequant_reference(w, s, dtype=torch.float32))
    expected = weight_dequant_reference(w, s)
    assert (in_bfloat16.view(torch.int16) - expected.view(torch.int16)).abs().max() <= 1


@pytest.mark.parametrize("block", [(128, 128), (64, 96), (7, 5)])
def test_weight_dequant_of_a_band(block):
    torch.manual_seed(0)
    w, s = random_codes(300, 200), random_scales(-(-300 // block[0]), -(-200 // block[1]))
    with poisoned_outputs():
        band = weight_dequant_triton(w[127:250], s, block, torch.float32, first_row=127)
    assert_same_bits(band, weight_dequant_reference(w, s, block, torch.float32)[127:250])


EVERY_SIZE_OF_TILE = {tile[:2]: tile for tile in fp8_gemm.TILES}.values()


@pytest.mark.parametrize(
    ("M", "N", "K", "tile"),
    [
        (1, 63, 192, fp8_gemm.TILES[0]),
        (1, 1, 1, fp8_gemm.TILES[0]),
        (3, 65, 1, fp8_gemm.TILES[0]),
        (3, 576, 128, fp8_gemm.TILES[-1]),
        *((140, 192, 320, tile) for tile in EVERY_SIZE_OF_TILE),
    ],
)
def test_fp8_gemm(M, N, K, tile, monkeypatch):
    monkeypatch.setattr(fp8_gemm, "TILES", [tile])
    fp8_gemm._tuned_kernel.cache_clear()
    torch.manual_seed(M + N + K)
    a, a_s = act_quant_reference(torch.randn(M, K) * torch.logspace(-2, 2, K))
    b, b_s = random_codes(N, K), random_scales(-(-N // 128), -(-K // 128))
    with poisoned_outputs():
        actual = fp8_gemm.fp8_gemm_triton(a, a_s, b, b_s, torch.float32)
    fp8_gemm._tuned_kernel.cache_clear()
    assert frobenius_error(actual, product_float64(a, a_s, b, b_s)) <= 1e-6


def test_fp8_gemm_is_tuned_for_each_range_of_m(monkeypatch):
    narrow, wide = fp8_gemm.TILES[0], fp8_gemm.TILES[-1]
    assert (narrow[0], wide[0]) == (16, 128)
    monkeypatch.setattr(fp8_gemm, "TILES", [narrow, (64, 32, 4, 3), wide, (128, 64, 4, 3)])
    fp8_gemm._tuned_kernel.cache_clear()
    tuned = fp8_gemm._tuned_kernel()
    measured = []

    def measure(call, quantiles):
        call()
        measured.append(call)
        return [float(len(measured))] * 3  # the first tile tried is the fastest

    tuned.do_bench = measure
    chosen = {}
    for M in (1, 3, 200, 16, 140):
        a, a_s = act_quant_reference(torch.randn(M, 128))
        fp8_gemm.fp8_gemm_triton(a, a_s, random_codes(64, 128), random_scales(1, 1), torch.float32)
        chosen[M] = tuned.best_config.kwargs["BLOCK_M"]
    assert chosen == {1: 16, 3: 16, 200: 64, 16: 16, 140: 64}
    assert len(measured) == 2 + 3  # the ranges up to 16 and up to 256, once each
    fp8_gemm._tuned_kernel.cache_clear()
