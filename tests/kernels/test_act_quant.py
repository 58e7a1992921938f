import pytest
import torch

from kernels.act_quant import act_quant, act_quant_reference, act_quant_triton
from tests.kernels.operands import FP8, FP8_VALUES, assert_same_bits, poisoned_outputs

SMALLEST_AMAX = float(torch.tensor(1e-4, dtype=torch.float32))


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Nearest float8_e4m3fn code, ties to the even code, by looking the value up among all."""
    finite = FP8_VALUES[:127].double()
    middles = (finite[1:] + finite[:-1]) / 2
    magnitude = x.double().abs()
    code = torch.searchsorted(middles, magnitude)  # a tie goes to the lower code
    tie = magnitude == middles[code.clamp(max=125)]
    code = code + (tie & (code % 2 == 1))
    return (code + 128 * torch.signbit(x)).to(torch.uint8).view(FP8)


def quantise_in_float64(x: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A float64 quotient of two float32 numbers, rounded to float32, is the correctly rounded float32 quotient."""
    q, scales = torch.empty(x.shape, dtype=FP8), []
    for start in range(0, x.shape[-1], block):
        group = x[..., start : start + block].double()
        s = (group.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX) / 448).float()
        q[..., start : start + block] = round_to_fp8((group / s.double()).float())
        scales.append(s)
    return q, torch.cat(scales, dim=-1)


@pytest.mark.parametrize("K", [1, 63, 128, 192, 576, 10944])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quotient_and_scale_are_correctly_rounded(K, dtype):
    torch.manual_seed(K)
    x = (torch.randn(2, 3, K) * torch.logspace(-6, 3, K)).to(dtype)
    q, s = act_quant(x)
    expected_q, expected_s = quantise_in_float64(x)
    assert s.shape == (2, 3, -(-K // 128))
    assert_same_bits(s, expected_s)
    assert_same_bits(q, expected_q)


def test_multiplying_by_the_reciprocal_would_be_noticed():
    torch.manual_seed(0)
    x = torch.randn(512, 7168)
    q, s = act_quant(x)
    shortcut = (x.unflatten(1, (-1, 128)) * (1 / s).unsqueeze(-1)).flatten(1).to(FP8)
    assert not torch.equal(q.view(torch.uint8), shortcut.view(torch.uint8))
    assert_same_bits(q, quantise_in_float64(x)[0])


@pytest.mark.parametrize("K", [63, 192, 576])
def test_ue8m0_scales_are_the_least_powers_of_two_that_suffice(K):
    torch.manual_seed(K)
    x = torch.randn(64, K) * 10
    q, s = act_quant(x, scale_fmt="ue8m0")
    plain = act_quant(x)[1]
    assert (torch.frexp(s).mantissa == 0.5).all()
    assert (s >= plain).all()
    assert (s / 2 < plain).all()
    spread_s = s.repeat_interleave(128, dim=1)[:, :K]
    assert_same_bits(q, round_to_fp8(x / spread_s))


def test_ue8m0_keeps_a_scale_that_is_a_power_of_two():
    x = torch.tensor([[448 * 2.0**-5, 448 * 2.0**7]])
    assert act_quant(x, block_size=1, scale_fmt="ue8m0")[1].tolist() == [[2.0**-5, 2.0**7]]


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_finite_input_becomes_nan(dtype, scale_fmt):
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = torch.tensor([largest, -largest, largest / 3, smallest, -smallest, 0.0, 1e-4, -448.0], dtype=dtype)
    q, s = act_quant(x, block_size=1, scale_fmt=scale_fmt)
    assert q.float().isfinite().all()
    assert s.isfinite().all()
    amax = torch.rand(20000) * 1000 + 1e-3
    q = act_quant(torch.stack([amax, -amax], dim=1), scale_fmt=scale_fmt)[0].float()
    assert (q.abs() <= 448).all()
    if scale_fmt is None:
        assert q.tolist() == [[448, -448]] * 20000


def test_a_group_of_zeros_has_the_smallest_scale():
    q, s = act_quant(torch.zeros(1, 192))
    assert not q.float().any()
    assert s.tolist() == [[float(torch.tensor(SMALLEST_AMAX) / 448)] * 2]


def zeros_and_all_ones() -> torch.Tensor:
    """Rows of 11 groups, zeros of both signs among them; some of the first 8 have a scale with a mantissa of ones only.

    Those are the divisors for which a reciprocal corrected by its remainder is not known to round rightly.
    """
    torch.manual_seed(0)
    x = torch.randn(6, 11, 128) * 100
    x[..., ::7], x[..., 1::7] = 0.0, -0.0
    largest = 448 * (2 - 2.0**-23)
    x[:, :8:3] *= largest / x[:, :8:3].abs().amax(-1, keepdim=True) * 0.99
    x[:, :8:3, 2] = largest
    x[..., 3::7] = 2.0 ** torch.randint(-9, 9, x[..., 3::7].shape)
    x[4], x[5] = 0.0, -0.0
    return x.flatten(1)


def test_scales_whose_mantissa_is_all_ones():
    x = zeros_and_all_ones()
    q, s = act_quant(x)
    assert ((s.view(torch.int32) & 0x7FFFFF) == 0x7FFFFF).sum() == 4 * 3
    expected_q, expected_s = quantise_in_float64(x)
    assert_same_bits(s, expected_s)
    assert_same_bits(q, expected_q)


def test_strided_rows_and_no_rows():
    torch.manual_seed(0)
    x = torch.randn(5, 300)
    assert_same_bits(act_quant(x[:, 20:212])[0], act_quant(x[:, 20:212].clone())[0])
    q, s = act_quant(torch.empty(0, 192))
    assert (q.shape, s.shape) == ((0, 192), (0, 2))


def test_refusals_name_the_culprit():
    with pytest.raises(ValueError, match="x is torch.float64"):
        act_quant(torch.zeros(1, 128, dtype=torch.float64))
    with pytest.raises(ValueError, match="scale_fmt is 'e8m0'"):
        act_quant(torch.zeros(1, 128), scale_fmt="e8m0")
    with pytest.raises(ValueError, match="block_size is 96"):
        act_quant(torch.zeros(1, 128), block_size=96)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "K"), [(1, 7168), (3, 1536), (128, 512), (4096, 7168), (16, 16384), (7, 10944), (5, 63)])
def test_gpu_equals_the_reference_bit_for_bit(M, K, dtype, scale_fmt):
    torch.manual_seed(M + K)
    x = (torch.randn(M, K, device="cuda") * torch.logspace(-5, 3, K, device="cuda")).to(dtype)
    with poisoned_outputs():
        q, s = act_quant_triton(x, 128, scale_fmt)
    expected_q, expected_s = act_quant_reference(x.cpu(), 128, scale_fmt)
    assert_same_bits(s.cpu(), expected_s)
    assert_same_bits(q.cpu(), expected_q)


@pytest.mark.gpu
def test_gpu_of_signed_zeros_and_scales_whose_mantissa_is_all_ones():
    x = zeros_and_all_ones()
    with poisoned_outputs():
        q, s = act_quant_triton(x.cuda())
    expected_q, expected_s = act_quant_reference(x)
    assert_same_bits(s.cpu(), expected_s)
    assert_same_bits(q.cpu(), expected_q)


@pytest.mark.gpu
def test_gpu_rounds_every_quotient_rightly():
    """A hundred thousand scales, with values that lie between two FP8 numbers or beside the middle."""
    torch.manual_seed(0)
    x = torch.randn(4096, 3200)
    x[:, ::2] = (x[:, ::2] * 8).round() / 16 * x[:, :1]
    q, s = act_quant_triton(x.cuda())
    expected_q, expected_s = act_quant_reference(x)
    assert_same_bits(s.cpu(), expected_s)
    assert_same_bits(q.cpu(), expected_q)


@pytest.mark.gpu
def test_gpu_takes_strided_rows():
    x = torch.randn(33, 2112, device="cuda", dtype=torch.bfloat16)
    latent = x[:, 1536:]  # 576 columns: 4 whole groups and a half
    q, s = act_quant(latent)
    expected_q, expected_s = act_quant_reference(latent.cpu())
    assert_same_bits(s.cpu(), expected_s)
    assert_same_bits(q.cpu(), expected_q)


@pytest.mark.gpu
def test_gpu_without_fp8_would_agree_too():
    x = torch.randn(64, 576, device="cuda")
    on_gpu, on_cpu = act_quant_reference(x), act_quant_reference(x.cpu())
    assert_same_bits(on_gpu[1].cpu(), on_cpu[1])
    assert_same_bits(on_gpu[0].cpu(), on_cpu[0])
