"""The blockwise FP8 product of few rows. It has no path without a GPU: interpreted_decode.py runs it on the CPU."""

import pytest
import torch

from kernels import fp8_gemm as products
from kernels.fp8_few_rows import fp8_few_rows
from tests.kernels.operands import V3_SHAPES, assert_same_bits, frobenius_error, poisoned_outputs, product_float64
from tests.kernels.test_fp8_gemm import GATE, operands

V2_LITE_SHAPES = [(3648, 2048), (4096, 512), (2048, 2048), (21888, 2048), (2048, 10944)]
AWKWARD_SHAPES = [(65, 63), (63, 192), (576, 7168), (192, 10944)]


def test_up_to_64_rows_are_few(monkeypatch):
    """Which product a GPU takes is a matter of rows, dtype and whole blocks."""
    monkeypatch.setattr(products, "_torch_has_product", lambda device: True)
    weight = torch.empty(576, 7168)
    chosen = {M: products._product(M, weight, torch.bfloat16) for M in (1, 64, 65, 129)}
    assert chosen == {
        1: fp8_few_rows,
        64: fp8_few_rows,
        65: products.fp8_gemm_torch,
        129: products.fp8_gemm_torch,
    }
    assert products._product(64, weight, torch.float32) is fp8_few_rows
    for M, of, dtype in [
        (65, weight, torch.float32),
        (65, torch.empty(63, 7168), torch.bfloat16),
        (65, torch.empty(576, 192), torch.bfloat16),
    ]:
        assert products._product(M, of, dtype) is products.fp8_gemm_triton
    monkeypatch.setattr(products, "_torch_has_product", lambda device: False)
    assert products._product(65, weight, torch.bfloat16) is products.fp8_gemm_triton


def test_torch_is_given_rows_by_fours(monkeypatch):
    """What torch._scaled_mm is documented to want, and that the rows added for it are cut off again."""

    def scaled_mm(a, b, scale_a, scale_b, out_dtype):
        assert a.shape[0] % 4 == 0
        assert scale_a.stride() == (1, a.shape[0]), "activations' scales column by column"
        return product_float64(a, scale_a, b.T.contiguous(), scale_b.T.contiguous()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for M in (1, 3, 4, 65):
        a, a_s, b, b_s = operands(M, 192, 576)
        actual = products.fp8_gemm_torch(a, a_s, b, b_s)
        assert actual.shape == (M, 192)
        assert frobenius_error(actual, product_float64(a, a_s, b, b_s)) <= GATE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GATE)
@pytest.mark.parametrize("M", [1, 3, 16, 17, 63, 64, 65, 128])
@pytest.mark.parametrize(("N", "K"), [*V3_SHAPES, *V2_LITE_SHAPES, *AWKWARD_SHAPES])
def test_gpu_within_the_gates_of_float64(M, N, K, dtype):
    a, a_s, b, b_s = operands(M, N, K, device="cuda")
    with poisoned_outputs():
        actual = fp8_few_rows(a, a_s, b, b_s, dtype)
    expected = product_float64(a, a_s, b, b_s)
    assert frobenius_error(actual, expected) <= GATE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 64])
@pytest.mark.parametrize(("N", "K"), [(2112, 7168), (7168, 16384), (2048, 10944)])
def test_gpu_gives_the_same_bits_every_time(M, N, K):
    """Whichever part of K arrives last, and whatever ran in between."""
    a, a_s, b, b_s = operands(M, N, K, device="cuda")
    first = fp8_few_rows(a, a_s, b, b_s, torch.float32)
    for call in range(20):
        if call % 5 == 4:
            fp8_few_rows(a[:1], a_s[:1], b[:63], b_s[:1], torch.bfloat16)
        with poisoned_outputs():
            again = fp8_few_rows(a, a_s, b, b_s, torch.float32)
        assert_same_bits(again, first)


@pytest.mark.gpu
def test_gpu_streams_do_not_share_their_counters():
    operands_of = {stream: operands(16, 2112, 7168, device="cuda") for stream in range(2)}
    expected = [product_float64(*of) for of in operands_of.values()]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in operands_of]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[number].append(fp8_few_rows(*operands_of[number], torch.bfloat16))
    torch.cuda.synchronize()
    for of_stream, right in zip(results, expected, strict=True):
        for result in of_stream:
            assert frobenius_error(result, right) <= GATE[torch.bfloat16]
