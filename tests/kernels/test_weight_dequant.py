import itertools

import pytest
import torch

from kernels.weight_dequant import weight_dequant, weight_dequant_reference, weight_dequant_triton
from tests.kernels.operands import (
    FP8,
    FP8_VALUES,
    V3_SHAPES,
    assert_same_bits,
    poisoned_outputs,
    random_codes,
    random_scales,
    spread,
)


def dequantise_by_definition(w, s, block=(128, 128), dtype=torch.bfloat16):
    """float32(w) * s rounded once, by looking each byte up and writing every scale out."""
    return (FP8_VALUES[w.view(torch.uint8).long()] * spread(s, tuple(w.shape), block)).to(dtype)


def operands(N, K, block=(128, 128), nan=True):
    torch.manual_seed(N * 100003 + K)
    return random_codes(N, K, nan=nan), random_scales(-(-N // block[0]), -(-K // block[1]))


@pytest.mark.parametrize(
    ("N", "K"), [(1, 1), (1, 63), (63, 1), (63, 192), (192, 576), (576, 192), (576, 7168), (128, 128), (130, 10944)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_equals_the_definition(N, K, dtype):
    w, s = operands(N, K)
    with poisoned_outputs():
        actual = weight_dequant(w, s, dtype=dtype)
    assert_same_bits(actual, dequantise_by_definition(w, s, dtype=dtype))


@pytest.mark.parametrize("scale", [1.0, -3.0, 1.7e-4, 2.0**-126, 1e-40, 2.0**119])
def test_every_code_with_every_kind_of_scale(scale):
    w = torch.arange(256, dtype=torch.uint8).view(FP8).reshape(2, 128)
    s = torch.full((1, 1), scale)
    expected = dequantise_by_definition(w, s, dtype=torch.float32)
    assert expected.isnan().sum() == 2
    assert_same_bits(weight_dequant(w, s, dtype=torch.float32), expected)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_single_nan_is_kept(code):
    w, s = operands(300, 192, nan=False)
    w.view(torch.uint8)[257, 130] = code
    actual = weight_dequant(w, s)
    assert actual.isnan().nonzero().tolist() == [[257, 130]]


def test_rounds_once_to_nearest_even():
    w = torch.tensor([[1.0, 1.125, 1.25, -1.0]]).to(FP8)
    s = torch.tensor([[1 + 2.0**-8]])  # times 1: just between two bfloat16 values
    assert weight_dequant(w, s).tolist() == [[1.0, 1.1328125, 1.2578125, -1.0]]
    above = torch.tensor([[1 + 2.0**-8 + 2.0**-23]])
    assert weight_dequant(w[:, :1], above).tolist() == [[1 + 2.0**-7]]


@pytest.mark.parametrize("block", [(64, 96), (1, 128), (128, 1), (7, 5)])
def test_other_block_sizes(block):
    w, s = operands(192, 250, block)
    assert_same_bits(weight_dequant(w, s, block), dequantise_by_definition(w, s, block))


def test_bands_of_any_first_row_make_up_the_matrix():
    w, s = operands(576, 320)
    cuts = [0, 1, 127, 128, 200, 449, 576]
    bands = [weight_dequant(w[a:b], s, first_row=a) for a, b in itertools.pairwise(cuts)]
    assert_same_bits(torch.cat(bands), dequantise_by_definition(w, s))


def test_a_column_slice_and_no_rows():
    w, s = operands(130, 512)
    assert_same_bits(weight_dequant(w[:, 128:384], s[:, 1:3]), dequantise_by_definition(w, s)[:, 128:384].contiguous())
    assert weight_dequant(w[:0], s[:0]).shape == (0, 512)


def test_refusals_name_the_shapes():
    w, s = operands(576, 192)
    with pytest.raises(ValueError, match=r"\(4, 2\) do not fit w \(576, 192\).*expected \(5, 2\)"):
        weight_dequant(w, s[:4])
    with pytest.raises(ValueError, match=r"\(6, 2\) do not fit w \(576, 192\)"):
        weight_dequant(w, torch.cat([s, s[:1]]))
    with pytest.raises(ValueError, match=r"\(5, 1\) do not fit w \(576, 192\)"):
        weight_dequant(w, s[:, :1])
    with pytest.raises(ValueError, match=r"from row 128 .*expected at least \(6, 2\)"):
        weight_dequant(w, s, first_row=128)
    with pytest.raises(ValueError, match="s torch.bfloat16"):
        weight_dequant(w, s.bfloat16())
    with pytest.raises(ValueError, match="w is torch.uint8"):
        weight_dequant(w.view(torch.uint8), s)
    with pytest.raises(ValueError, match="must both be matrices"):
        weight_dequant(w[0], s)
    with pytest.raises(ValueError, match="first row -1"):
        weight_dequant(w, s, first_row=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("N", "K"), [*V3_SHAPES, (576, 7168), (7168, 18432), (192, 10944), (63, 1), (1, 7168)])
def test_gpu_equals_the_reference_bit_for_bit(N, K, dtype):
    w, s = operands(N, K)
    with poisoned_outputs():
        actual = weight_dequant_triton(w.cuda(), s.cuda(), dtype=dtype)
    assert_same_bits(actual.cpu(), weight_dequant_reference(w, s, dtype=dtype))


@pytest.mark.gpu
def test_gpu_bands_and_other_block_sizes():
    w, s = operands(576, 320)
    band = weight_dequant(w.cuda()[127:450], s.cuda(), first_row=127)
    assert_same_bits(band.cpu(), dequantise_by_definition(w, s)[127:450])
    w, s = operands(192, 250, (64, 96))
    assert_same_bits(weight_dequant(w.cuda(), s.cuda(), (64, 96)).cpu(), dequantise_by_definition(w, s, (64, 96)))


@pytest.mark.gpu
def test_gpu_without_fp8_would_agree_too():
    w, s = operands(576, 7168)
    assert_same_bits(weight_dequant_reference(w.cuda(), s.cuda()).cpu(), weight_dequant_reference(w, s))
