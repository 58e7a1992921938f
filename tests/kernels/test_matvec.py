"""One row times a weight, against float64."""

import pytest
import torch

from kernels.matvec import linear, matvec_triton
from tests.kernels.operands import frobenius_error, poisoned_outputs

GATE_BF16 = 2.5e-3


def operands(
    N: int, K: int, dtype: torch.dtype, device: str = "cpu", rows: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(N + K)
    x = torch.randn(rows, K, device=device) * torch.logspace(-1, 1, K, device=device)
    return x.to(dtype), (torch.randn(N, K, device=device) * 0.03).to(dtype)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("N", "K"), [(1, 63), (63, 192), (576, 1), (192, 576)])
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, 1e-6), (torch.bfloat16, GATE_BF16)])
def test_linear_against_float64(N, K, rows, dtype, gate):
    x, weight = operands(N, K, dtype, rows=rows)
    actual = linear(x, weight)
    assert (actual.dtype, actual.shape) == (dtype, (rows, N))
    assert frobenius_error(actual, x.double() @ weight.double().T) <= gate


SHAPES = [(3648, 2048), (21888, 2048), (2048, 10944), (2048, 2048), (102400, 2048), (129280, 7168)]


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), [*SHAPES, (63, 192), (576, 1), (8193, 576)])
def test_gpu_against_float64(N, K):
    x, weight = operands(N, K, torch.bfloat16, "cuda")
    with poisoned_outputs():
        actual = matvec_triton(x, weight)
    expected = torch.cat([x.double() @ part.double().T for part in weight.split(16384)], dim=1)
    assert frobenius_error(actual, expected) <= GATE_BF16


@pytest.mark.gpu
def test_gpu_takes_part_of_a_wider_weight_and_any_leading_ones():
    x, weight = operands(576, 4096, torch.bfloat16, "cuda")
    part = weight[:, 1024:3072]
    actual = linear(x[:, 1024:3072][None], part)
    assert actual.shape == (1, 1, 576)
    assert frobenius_error(actual[0], x[:, 1024:3072].double() @ part.double().T) <= GATE_BF16
