"""Linears in FP8 and over ranks, the embedding's masks, and the causal mask, against plain arithmetic."""

from dataclasses import dataclass, field

import pytest
import torch

from kernels.act_quant import act_quant
from kernels.fp8_gemm import fp8_gemm
from model.args import ModelArgs
from model.layers import ColumnParallelLinear, Execution, Linear, ParallelEmbedding, RMSNorm, RowParallelLinear
from model.topology import Topology
from model.transformer import causal_mask

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Lonely(Topology):
    """One of several ranks whose peers contribute nothing; it notes what would have been summed."""

    summed: list[torch.Tensor] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.summed.append(x.clone())
        return x


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("kind", [Linear, ColumnParallelLinear, RowParallelLinear])
def test_every_kind_of_fp8_linear_honours_scale_fmt(kind, scale_fmt):
    linear = kind(192, 320, ModelArgs(scale_fmt=scale_fmt), Execution(Topology(), CPU, torch.float32, fp8=True))
    assert linear.weight.shape == (320, 192)
    assert linear.scale.shape == (3, 2)
    with torch.no_grad():
        linear.weight.copy_(random(320, 192, seed=1).to(torch.float8_e4m3fn))
        linear.scale.copy_(random(3, 2, seed=2).abs())
    x = random(2, 5, 192)
    results = {
        option: fp8_gemm(*act_quant(x, scale_fmt=option), linear.weight, linear.scale, dtype=torch.float32)
        for option in (None, "ue8m0")
    }
    assert torch.equal(linear(x), results.pop(scale_fmt))
    assert not torch.equal(linear(x), *results.values())


@dataclass(frozen=True)
class WithPeer(Topology):
    """One of two ranks; the other contributes what is in ``theirs``."""

    theirs: list[torch.Tensor] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x.add_(self.theirs.pop())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_parallel_partial_sums_are_added_in_float32(dtype):
    """Against float64: each summand is rounded to the compute dtype, and their float32 sum once more, no oftener."""
    topology = WithPeer(size=2)
    weight, x = random(64, 192).to(dtype), random(3, 192, seed=1).to(dtype)
    ranks = [RowParallelLinear(192, 64, ModelArgs(), Execution(topology, CPU, dtype)) for _ in range(2)]
    parts, exact = [], []
    for linear, part_of_weight, part_of_x in zip(ranks, weight.split(96, dim=1), x.split(96, dim=1), strict=True):
        assert linear.weight.shape == (64, 96)
        with torch.no_grad():
            linear.weight.copy_(part_of_weight)
        parts.append(linear.partial(part_of_x))
        exact.append(part_of_x.double() @ part_of_weight.double().T)
        assert parts[-1].dtype == torch.float32
        rounding = torch.finfo(dtype).eps / 2 * exact[-1].abs()
        assert ((parts[-1] - exact[-1]).abs() <= rounding + 1e-5).all()
    topology.theirs.append(parts[1])
    output = ranks[0](x[:, :96])
    assert output.dtype == dtype
    assert torch.equal(output, (parts[0] + parts[1]).to(dtype))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_embedding_counts_ids_of_other_ranks_as_zero(rank):
    embedding = ParallelEmbedding(ModelArgs(vocab_size=12, dim=4), Execution(Lonely(rank, size=4), CPU, torch.float32))
    table = random(12, 4)
    with torch.no_grad():
        embedding.weight.copy_(table[3 * rank : 3 * rank + 3])
    tokens = torch.arange(12).view(2, 6)
    mine = (tokens // 3 == rank)[..., None]
    assert torch.equal(embedding(tokens), torch.where(mine, table[tokens], 0))


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_norm_is_computed_in_float32_and_given_back_in_the_inputs_dtype(eps):
    norm = RMSNorm(192, eps, Execution(Topology(), CPU, torch.bfloat16))
    with torch.no_grad():
        norm.weight.copy_(1 + random(192))
    x = (0.01 * random(3, 192, seed=1)).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8, atol=0)
    torch.testing.assert_close(norm(x.float()).double(), exact, rtol=1e-6, atol=0)


def test_mask_hides_later_positions_only():
    inf = torch.inf
    assert causal_mask(2, 3, CPU).tolist() == [[0, 0, 0, -inf, -inf], [0, 0, 0, 0, -inf], [0, 0, 0, 0, 0]]
