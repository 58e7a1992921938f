"""Operands, oracles and comparisons shared by the kernel tests, written apart from the code under test."""

import contextlib
import math
from collections.abc import Iterator

import torch

FP8 = torch.float8_e4m3fn

# N x K of DeepSeek-V3's products: q_a with kv_a, q_b, kv_b, o, gate with up of an expert, down of an expert.
V3_SHAPES = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]


def fp8_value(code: int) -> float:
    """What the byte ``code`` means in float8_e4m3fn, from the format's definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


FP8_VALUES = torch.tensor([fp8_value(code) for code in range(256)], dtype=torch.float32)


def random_codes(*shape: int, device: str = "cpu", nan: bool = False) -> torch.Tensor:
    """Uniformly random float8_e4m3fn bytes; all 256 of them with ``nan``, else the 254 finite ones."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    if not nan:
        codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)
    return codes.view(FP8)


def random_scales(*shape: int, device: str = "cpu") -> torch.Tensor:
    """Float32 scales of the sizes found in checkpoints, none a power of two."""
    return torch.rand(shape, device=device) * 2e-4 + 1e-5


def spread(s: torch.Tensor, shape: tuple[int, int], block: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """The scale of every element of a matrix of ``shape``."""
    rows = torch.arange(shape[0], device=s.device) // block[0]
    columns = torch.arange(shape[1], device=s.device) // block[1]
    return s[rows][:, columns]


def product_float64(a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor) -> torch.Tensor:
    """The product of the quantised operands (a of two dimensions) in float64, on their device."""
    left = a.double() * spread(a_s.double(), tuple(a.shape), (1, 128))
    right = b.double() * spread(b_s.double(), tuple(b.shape))
    return left @ right.T


def frobenius_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the whole matrix; NaN where any element is NaN, so that no gate passes it."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Every element equal, zeros by their sign too, NaN where NaN is expected; names the first culprit."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    both_nan = actual.float().isnan() & expected.float().isnan()
    wrong = ((actual.view(integer) != expected.view(integer)) & ~both_nan).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(f"{len(wrong)} differ, first at {at}: {actual[at]} instead of {expected[at]}")


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """``torch.empty`` gives NaN, so that an element which a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
