"""Residual sum, RMS norm and quantisation, against float64 and against ``model.layers.RMSNorm``."""

import pytest
import torch

from kernels.act_quant import act_quant_reference
from kernels.add_norm import _add_norm_triton, add_norm, add_norm_reference, weighted_sum
from model.layers import Execution, RMSNorm
from model.topology import Topology
from tests.kernels.operands import assert_same_bits, frobenius_error, poisoned_outputs

EPS = 1e-6


def normed_operands(T: int, D: int, S: int | None, dtype=torch.float32, device: str = "cpu"):
    """Residual, delta, norm weight and shares: S is None for no delta, 0 for a plain one.

    Some choices have no weight, and their results are NaN: what an unwritten result may hold.
    """
    torch.manual_seed(T * 31 + D + (S or 0))
    x = (torch.randn(T, D, device=device) * 3).to(dtype)
    weight = torch.rand(D, device=device) + 0.5
    if S is None:
        return x, None, weight, None
    if S == 0:
        return x, torch.randn(T, D, device=device).to(dtype), weight, None
    delta = torch.randn(T, S, D, device=device).to(dtype)
    shares = torch.rand(T, S, device=device)
    shares[::2, 0] = 0
    delta[::2, 0] = torch.nan
    return x, delta, weight, shares


def summed_in_float64(x: torch.Tensor, delta: torch.Tensor | None, shares: torch.Tensor | None) -> torch.Tensor:
    """The residual after the sum, rounded where the definition rounds: the weighted sum, then the total."""
    if delta is None:
        return x.double()
    if shares is not None:
        delta = torch.einsum("tsd,ts->td", delta.double().nan_to_num(), shares.double()).to(x.dtype)
    return (x.double() + delta.double()).to(x.dtype).double()


def normed_in_float64(summed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    length = summed.square().sum(-1, keepdim=True) / summed.shape[-1] + EPS
    return summed / length.sqrt() * weight.double()


@pytest.mark.parametrize("S", [None, 0, 1, 9])
@pytest.mark.parametrize(("T", "D"), [(1, 1), (3, 63), (2, 192), (5, 576), (2, 7168)])
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, 1e-6), (torch.bfloat16, 2.5e-3)])
def test_reference_against_float64(T, D, S, dtype, gate):
    x, delta, weight, shares = normed_operands(T, D, S, dtype)
    expected = summed_in_float64(x, delta, shares)
    actual = add_norm(x, delta, weight, EPS, choices=shares)
    assert actual.quantised is None
    assert (actual.x.dtype, x.dtype) == (dtype, dtype)
    assert frobenius_error(x, expected) <= (1e-6 if dtype == torch.float32 else 1e-4), "the residual in place"
    assert frobenius_error(actual.x, normed_in_float64(x.double(), weight)) <= gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_the_model_s_norm(dtype):
    x, delta, weight, _ = normed_operands(5, 576, 0, dtype)
    norm = RMSNorm(576, EPS, Execution(Topology(), torch.device("cpu"), dtype))
    norm.weight.data.copy_(weight)
    expected = norm(x + delta)
    actual = add_norm(x, delta, norm.weight.data, EPS).x
    torch.testing.assert_close(actual, expected, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_quantises_what_it_returns(scale_fmt):
    x, delta, weight, shares = normed_operands(3, 192, 4, torch.bfloat16)
    normed = add_norm(x, delta, weight, EPS, choices=shares, quantise=True, scale_fmt=scale_fmt)
    q, s = act_quant_reference(normed.x, scale_fmt=scale_fmt)
    assert_same_bits(normed.quantised[0], q)
    assert_same_bits(normed.quantised[1], s)


def test_only_a_weight_of_zero_leaves_a_result_out():
    results = torch.tensor([[[torch.nan, 2.0], [3.0, 4.0]]])
    assert weighted_sum(results, torch.tensor([[0.0, 0.5]])).tolist() == [[1.5, 2.0]]
    assert weighted_sum(results, torch.tensor([[1e-30, 0.5]])).isnan().tolist() == [[True, False]]


def test_a_column_slice_is_summed_in_place():
    wide = torch.randn(3, 400)
    before, delta = wide.clone(), torch.randn(3, 192)
    add_norm(wide[:, 100:292], delta, torch.ones(192), EPS)
    before[:, 100:292] += delta
    assert torch.equal(wide, before)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("S", [None, 0, 1, 8, 9])
@pytest.mark.parametrize(("T", "D"), [(1, 2048), (3, 7168), (129, 7168), (64, 1536), (5, 576), (2, 63)])
def test_gpu_against_the_reference(T, D, S, scale_fmt):
    x, delta, weight, shares = normed_operands(T, D, S, torch.bfloat16, "cuda")
    expected_x = x.clone()
    add_norm_reference(expected_x, delta, weight, EPS, choices=shares)
    with poisoned_outputs():
        actual = _add_norm_triton(x, delta, weight, EPS, shares, True, scale_fmt)
    # Several choices may be summed in another order, which one element in hundreds rounds the other way.
    gate = 0 if not S else 5e-4
    assert frobenius_error(x, expected_x.double()) <= gate
    assert frobenius_error(actual.x, normed_in_float64(x.double(), weight)) <= 2.5e-3
    q, s = act_quant_reference(actual.x.cpu(), scale_fmt=scale_fmt)
    assert_same_bits(actual.quantised[0].cpu(), q)
    assert_same_bits(actual.quantised[1].cpu(), s)


@pytest.mark.gpu
def test_gpu_leaves_the_columns_beside_a_slice():
    """The query's latent beside the keys', as the first product of attention gives them."""
    wide = torch.randn(17, 2112, device="cuda", dtype=torch.bfloat16)
    before, delta = wide.clone(), torch.randn(17, 1536, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(1536, device="cuda")
    normed = add_norm(wide[:, :1536], delta, weight, EPS).x
    before[:, :1536] += delta
    assert torch.equal(wide, before)
    assert frobenius_error(normed, normed_in_float64(before[:, :1536].double(), weight)) <= 2.5e-3
