"""The experts' two grouped products, against each expert's own matrices in float64 and against ``model.moe.MoE``."""

import itertools

import pytest
import torch
from torch.nn import functional

from kernels.fused_moe import ExpertShapes, ExpertWeights, fused_moe, fused_moe_reference, fused_moe_triton, tile_rows
from kernels.moe_gate import Routing, route
from model.args import ModelArgs
from model.layers import Execution
from model.moe import MoE
from model.topology import Topology
from tests.kernels.operands import (
    FP8,
    assert_same_bits,
    frobenius_error,
    poisoned_outputs,
    product_float64,
    random_codes,
    random_scales,
)
from tests.kernels.test_act_quant import quantise_in_float64

GATE_BF16 = 8e-3
ROW_GATE = 0.1  # of any one row: flipped FP8 codes stay far below, a wrong expert or place is off by its whole size

Matrices = dict[str, torch.Tensor]


def blocks(size: int) -> int:
    return -(-size // 128)


def experts_apart(
    shapes: ExpertShapes, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> list[Matrices]:
    """Each expert's own w1, w2, w3, and scale1 to scale3 where ``dtype`` is FP8; results neither grow nor vanish."""
    torch.manual_seed(seed)
    experts = []
    for number in range(shapes.count):
        inner = shapes.inner if number < shapes.experts else shapes.shared_inner
        expert: Matrices = {}
        for name, (rows, columns) in {
            "1": (inner, shapes.dim),
            "2": (shapes.dim, inner),
            "3": (inner, shapes.dim),
        }.items():
            if dtype == FP8:
                expert[f"w{name}"] = random_codes(rows, columns, device=device)
                expert[f"scale{name}"] = random_scales(blocks(rows), blocks(columns), device=device)
            else:
                expert[f"w{name}"] = (torch.randn(rows, columns, device=device) * columns**-0.5).to(dtype)
        experts.append(expert)
    return experts


def stacked(shapes: ExpertShapes, apart: list[Matrices]) -> ExpertWeights:
    """The stacks written as ``ExpertWeights`` describes them, not through its views."""
    routed, shared = apart[: shapes.experts], apart[shapes.experts :]

    def joined(parts: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
        return (
            [torch.cat([part.view(torch.uint8) if part.dtype == FP8 else part for part in parts], dim)] if parts else []
        )

    def stacks(kind: str) -> list[torch.Tensor]:
        gate_up = [expert[f"{kind}{name}"] for expert in routed for name in "13"]
        for name in "13":
            gate_up += joined([expert[f"{kind}{name}"] for expert in shared], 0)
        down = [expert[f"{kind}2"] for expert in routed] + joined([expert[f"{kind}2"] for expert in shared], 1)
        dtype = apart[0][f"{kind}1"].dtype
        return [joined([part.flatten() for part in parts], 0)[0].view(dtype) for parts in (gate_up, down)]

    return ExpertWeights(shapes, *stacks("w"), *(stacks("scale") if "scale1" in apart[0] else ()))


def moe_operands(
    T: int, S: int, shapes: ExpertShapes, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their experts, the last one among them; a few choices are other ranks'."""
    torch.manual_seed(T + S + shapes.count)
    indices = torch.stack([torch.randperm(max(S, shapes.count)) for _ in range(T)])[:, :S].int()
    indices[(torch.rand(T, S) < 0.2) | (indices >= shapes.count)] = -1
    if not (indices == shapes.count - 1).any():
        indices[-1, -1] = shapes.count - 1
    return torch.randn(T, shapes.dim).to(dtype).to(device), indices.to(device)


def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """In float64, rounded to the dtype of x only where the next quantisation needs it."""
    if scale is None:
        return x.double() @ weight.double().T
    q, s = quantise_in_float64(x.cpu())
    return product_float64(q.to(x.device), s.to(x.device), weight, scale).to(x.dtype)


def applied_one_by_one(x: torch.Tensor, indices: torch.Tensor, apart: list[Matrices]) -> torch.Tensor:
    """(T, S, D) in float64: slot by slot; zero for other ranks' experts."""
    out = torch.zeros(*indices.shape, x.shape[1], dtype=torch.float64, device=x.device)
    for token, choices in enumerate(indices.tolist()):
        for choice, number in enumerate(choices):
            if number >= 0:
                of = apart[number]
                row = x[token : token + 1]
                gate, up = (product(row, of[f"w{name}"], of.get(f"scale{name}")) for name in "13")
                inner = gate / (1 + (-gate).exp()) * up
                out[token, choice] = product(inner, of["w2"], of.get("scale2"))[0]
    return out


def of_this_rank(indices: torch.Tensor, *results: torch.Tensor) -> list[torch.Tensor]:
    """Rows of results that an expert here computed."""
    return [result[indices >= 0] for result in results]


SHAPES = [
    ExpertShapes(1, 1, 1),
    ExpertShapes(5, 63, 192),
    ExpertShapes(4, 192, 63, shared=2, shared_inner=63),
    ExpertShapes(3, 576, 192, shared=3, shared_inner=64),
    ExpertShapes(2, 192, 576, shared=1, shared_inner=1),
]
FP8_SHAPES = [
    ExpertShapes(3, 576, 192, shared=3, shared_inner=128),
    ExpertShapes(2, 63, 128, shared=1, shared_inner=128),
    ExpertShapes(4, 192, 63),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("T", [1, 5, 63])
def test_reference_against_each_expert_alone(shapes, T):
    apart = experts_apart(shapes)
    x, indices = moe_operands(T, min(3, shapes.count), shapes)
    actual = fused_moe(x, indices, stacked(shapes, apart))
    assert actual.shape == (*indices.shape, shapes.dim)
    assert frobenius_error(actual, applied_one_by_one(x, indices, apart)) <= 1e-6
    assert not actual[indices < 0].any()


@pytest.mark.parametrize("shapes", FP8_SHAPES, ids=str)
def test_fp8_reference_against_each_expert_alone(shapes):
    apart = experts_apart(shapes, FP8)
    x, indices = moe_operands(5, 3, shapes)
    actual = fused_moe(x, indices, stacked(shapes, apart))
    assert frobenius_error(actual, applied_one_by_one(x, indices, apart)) <= 1e-5


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_views_hold_each_number_once(shapes):
    weights = ExpertWeights.empty(shapes, torch.float32, "cpu")
    shared = [None] if shapes.shared else []
    by_parts = [weights.parts(expert) for expert in [*range(shapes.experts), *shared]]
    assert_each_number_once(weights.gate_up, [of[name] for of in by_parts for name in ("w1", "w3")])
    assert_each_number_once(weights.down, [of["w2"] for of in by_parts])
    one_by_one = [weights.one(expert) for expert in range(shapes.count)]
    assert_each_number_once(weights.gate_up, [of[name] for of in one_by_one for name in ("w1", "w3")])
    assert_each_number_once(weights.down, [of["w2"] for of in one_by_one])


@pytest.mark.parametrize("shapes", FP8_SHAPES, ids=str)
def test_views_hold_each_scale_once(shapes):
    weights = ExpertWeights.empty(shapes, FP8, "cpu")
    one_by_one = [weights.one(expert) for expert in range(shapes.count)]
    for name, stack in (("1", weights.gate_up_scale), ("2", weights.down_scale)):
        names = ("scale1", "scale3") if name == "1" else ("scale2",)
        assert_each_number_once(stack, [of[name] for of in one_by_one for name in names])
    for of in one_by_one:
        for name in "123":
            rows, columns = of[f"w{name}"].shape
            assert of[f"scale{name}"].shape == (blocks(rows), blocks(columns))


def assert_each_number_once(stack: torch.Tensor, views: list[torch.Tensor]) -> None:
    stack.zero_()
    for view in views:
        view.add_(1)
    assert torch.equal(stack, torch.ones_like(stack))


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [*((torch.float32, shapes) for shapes in SHAPES), *((FP8, shapes) for shapes in FP8_SHAPES)],
    ids=str,
)
def test_views_are_the_experts_own_matrices(shapes, dtype):
    apart = experts_apart(shapes, dtype)
    weights = stacked(shapes, apart)
    for number, expert in enumerate(apart):
        views = weights.one(number)
        assert views.keys() == expert.keys()
        for name, matrix in expert.items():
            assert_same_bits(views[name].contiguous(), matrix)


def test_reference_is_the_model_s_mixture():
    """Shared experts in two pieces: chosen by every token, with weight 1."""
    args = ModelArgs(dim=63, moe_inter_dim=24, n_routed_experts=6, n_activated_experts=3, n_shared_experts=2)
    moe = MoE(args, Execution(Topology(), torch.device("cpu"), torch.float32))
    torch.manual_seed(0)
    for parameter in moe.parameters():
        parameter.normal_(0, 0.3)
    weights = ExpertWeights.empty(ExpertShapes(6, 63, 24, 2, 24), torch.float32, "cpu")
    for number, expert in [*enumerate(moe.experts.values()), (None, moe.shared_experts)]:
        for name, view in weights.parts(number).items():
            view.copy_(getattr(expert, name).weight)
    x = torch.randn(65, 63)
    routing = Routing(6, 3, 1, 1, softmax=True, normalise=False, scale=1.0, first=0, last=6, shared=2)
    indices, shares = route(x, moe.gate.weight, None, routing)
    actual = torch.einsum("tsd,ts->td", fused_moe(x, indices, weights), shares)
    torch.testing.assert_close(actual, moe(x[None])[0], rtol=1e-4, atol=1e-5)


def test_tiles_grow_with_what_an_expert_gets():
    assert [tile_rows(slots, 64) for slots in (1, 16 * 64, 32 * 64, 64 * 64, 4096 * 64)] == [16, 16, 32, 64, 128]


V2_LITE = ExpertShapes(64, 2048, 1408, shared=2, shared_inner=1408)
V2_LITE_OF_8 = ExpertShapes(8, 2048, 1408, shared=1, shared_inner=352)
V3_OF_8 = ExpertShapes(32, 7168, 2048, shared=1, shared_inner=256)
V3_OF_16 = ExpertShapes(16, 7168, 2048, shared=1, shared_inner=128)
TWO_SHARED = ExpertShapes(4, 5120, 1536, shared=2, shared_inner=1536)  # DeepSeek-V2
V3 = ExpertShapes(256, 7168, 2048, shared=1, shared_inner=2048)


@pytest.fixture(scope="module")
def made():
    """Stacks on the GPU by shape and dtype; only the latest is kept."""
    kept: dict[tuple[ExpertShapes, torch.dtype], ExpertWeights] = {}

    def make(shapes: ExpertShapes, dtype: torch.dtype) -> ExpertWeights:
        if (shapes, dtype) not in kept:
            kept.clear()
            kept[shapes, dtype] = stacked(shapes, experts_apart(shapes, dtype, "cuda"))
        return kept[shapes, dtype]

    yield make
    kept.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [V2_LITE, V2_LITE_OF_8], ids=str)
@pytest.mark.parametrize("T", [1, 3, 16, 65, 128, 1000, 2048])
def test_gpu_bf16_against_float32(shapes, T, made):
    weights = made(shapes, torch.bfloat16)
    x, indices = moe_operands(T, 8, shapes, torch.bfloat16, "cuda")
    with poisoned_outputs():
        actual = fused_moe_triton(x, indices, weights)
    expected = in_float32(x, indices, weights)
    assert frobenius_error(*of_this_rank(indices, actual, expected)) <= GATE_BF16
    worst_row = rows_errors(*of_this_rank(indices, actual, expected)).max()
    assert worst_row <= ROW_GATE


@pytest.mark.gpu
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize(
    ("shapes", "T"),
    [*itertools.product([V3_OF_8, V3_OF_16, TWO_SHARED], [1, 3, 16, 65, 128, 600]), (V3, 1), (V3, 8)],
    ids=str,
)
def test_gpu_fp8_against_the_reference(shapes, T, scale_fmt, made):
    """Both quantise the same BF16 values, but where a sum lies between two of them: steps of 6 %, in few elements."""
    weights = made(shapes, FP8)
    x, indices = moe_operands(T, 9, shapes, torch.bfloat16, "cuda")
    with poisoned_outputs():
        actual = fused_moe_triton(x, indices, weights, scale_fmt)
    expected = fused_moe_reference(x, indices, weights, scale_fmt).double()
    assert frobenius_error(*of_this_rank(indices, actual, expected)) <= GATE_BF16
    worst_row = rows_errors(*of_this_rank(indices, actual, expected)).max()
    assert worst_row <= ROW_GATE


def in_float32(x: torch.Tensor, indices: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Expert by expert, with one expert's matrices in float32 at a time."""
    out = torch.zeros(*indices.shape, x.shape[1], device=x.device)
    for number in range(weights.shapes.count):
        token, choice = (indices == number).nonzero(as_tuple=True)
        of = {name: matrix.float() for name, matrix in weights.one(number).items()}
        row = x[token].float()
        inner = functional.silu(row @ of["w1"].T) * (row @ of["w3"].T)
        out[token, choice] = inner @ of["w2"].T
    return out.double()


def rows_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """NaN in a row is an infinite error."""
    errors = (actual.double() - expected).norm(dim=1) / expected.norm(dim=1)
    return errors.nan_to_num(nan=torch.inf)
