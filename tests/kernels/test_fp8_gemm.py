import pytest
import torch

from kernels.act_quant import act_quant
from kernels.fp8_gemm import fp8_gemm, fp8_gemm_triton, m_range
from tests.kernels.operands import (
    V3_SHAPES,
    frobenius_error,
    poisoned_outputs,
    product_float64,
    random_codes,
    random_scales,
)

GATE = {torch.bfloat16: 2.5e-3, torch.float32: 5e-4}


def operands(M, N, K, device="cpu"):
    """Activations quantised from values of very different sizes, and a weight with scales of its own."""
    torch.manual_seed(M * 31 + N * 7 + K)
    x = torch.randn(M, K, device=device) * torch.logspace(-2, 2, K, device=device)[torch.randperm(K, device=device)]
    weight = random_codes(N, K, device=device), random_scales(-(-N // 128), -(-K // 128), device=device)
    return *act_quant(x), *weight


@pytest.mark.parametrize("dtype", GATE)
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 1, 1), (1, 63, 192), (3, 576, 63), (16, 192, 576), (5, 576, 10944), (130, 129, 1024)]
)
def test_reference_against_float64(M, N, K, dtype):
    a, a_s, b, b_s = operands(M, N, K)
    actual = fp8_gemm(a, a_s, b, b_s, dtype)
    assert (actual.dtype, actual.shape) == (dtype, (M, N))
    # float32 sums of at most 10,944 products: far below the gate, which also has to hold on tensor cores
    gate = 2e-6 if dtype == torch.float32 else GATE[dtype]
    assert frobenius_error(actual, product_float64(a, a_s, b, b_s)) <= gate


def test_leading_dimensions_are_rows():
    a, a_s, b, b_s = operands(6, 192, 320)
    flat = fp8_gemm(a, a_s, b, b_s, torch.float32)
    shaped = fp8_gemm(a.view(2, 3, 320), a_s.view(2, 3, 3), b, b_s, torch.float32)
    torch.testing.assert_close(shaped, flat.view(2, 3, 192), rtol=1e-5, atol=0)


def test_refusals_name_the_shapes():
    a, a_s, b, b_s = operands(3, 192, 320)
    with pytest.raises(ValueError, match=r"b_s is \(1, 3\), expected \(2, 3\)"):
        fp8_gemm(a, a_s, b, b_s[:1])
    with pytest.raises(ValueError, match=r"a_s is \(3, 2\), expected \(3, 3\)"):
        fp8_gemm(a, a_s[:, :2], b, b_s)
    with pytest.raises(ValueError, match=r"a \(3, 256\) and b \(192, 320\)"):
        fp8_gemm(a[:, :256], a_s, b, b_s)
    with pytest.raises(ValueError, match=r"a torch.float32"):
        fp8_gemm(a.float(), a_s, b, b_s)


@pytest.mark.parametrize(
    ("M", "expected"), [(1, 16), (3, 16), (16, 16), (17, 32), (128, 128), (129, 256), (4096, 4096), (70000, 4096)]
)
def test_each_range_of_m_is_tuned_for_itself(M, expected):
    assert m_range(M) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GATE)
@pytest.mark.parametrize("M", [1, 3, 16, 128, 4096])
@pytest.mark.parametrize(("N", "K"), [*V3_SHAPES, (576, 7168), (576, 10944), (10944, 2048), (63, 192)])
def test_gpu_within_the_gates_of_float64(M, N, K, dtype):
    a, a_s, b, b_s = operands(M, N, K, device="cuda")
    fp8_gemm_triton(
        a, a_s, b, b_s, dtype
    )  # tunes, and leaves right numbers behind: the next output must not reuse them
    with poisoned_outputs():
        actual = fp8_gemm_triton(a, a_s, b, b_s, dtype)
    error = frobenius_error(actual, product_float64(a, a_s, b, b_s))
    assert error <= GATE[dtype], f"{error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 3, 16, 64, 65, 100, 128, 129])
@pytest.mark.parametrize(
    ("N", "K", "dtype"),
    [
        *((N, K, torch.bfloat16) for N, K in [*V3_SHAPES, (3648, 2048), (2048, 10944), (576, 7168), (63, 192)]),
        *((N, K, torch.float32) for N, K in [(2112, 7168), (63, 192)]),
    ],
)
def test_gpu_by_whichever_product_is_fastest(M, N, K, dtype):
    a, a_s, b, b_s = operands(M, N, K, device="cuda")
    with poisoned_outputs():
        actual = fp8_gemm(a, a_s, b, b_s, dtype)
    assert actual.shape == (M, N)
    assert frobenius_error(actual, product_float64(a, a_s, b, b_s)) <= GATE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 17, 33, 65, 127, 200])
def test_gpu_every_row_for_itself(M):
    """A row's result depends on no other row, whatever tile its neighbours fill: the row of greatest error counts."""
    a, a_s, b, b_s = operands(M, 576, 1536, device="cuda")
    with poisoned_outputs():
        actual = fp8_gemm(a, a_s, b, b_s, torch.float32).double()
    expected = product_float64(a, a_s, b, b_s)
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() <= 1e-3, f"row {errors.argmax().item()}: {errors.max().item():.2e}"
