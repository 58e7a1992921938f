"""The layers every block is made of: linears in three forms, the embedding, the norm and the gated MLP.

A linear weight is held in the compute dtype, or as FP8 E4M3 with float32 block scales in ``scale``; then its
input is quantised too and the product runs through ``kernels.fp8_gemm``. Parameter names are the artifact names.

Shapes: I in features, O out features (of this rank), … any leading dimensions.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from kernels.act_quant import act_quant
from kernels.fp8_gemm import fp8_gemm
from model.args import ModelArgs
from model.topology import Topology

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Execution:
    """Where and how the layers of one rank compute. ``fp8`` makes every linear that may be FP8 so."""

    topology: Topology
    device: torch.device
    dtype: torch.dtype
    fp8: bool = False

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter, to be filled by ``model.load``; in the compute dtype if none is given."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)


class Linear(nn.Module):
    """``x W^T`` without a bias, whole on every rank. ``fp8=False`` keeps this one out of FP8."""

    def __init__(
        self, in_features: int, out_features: int, args: ModelArgs, execution: Execution, *, fp8: bool = True
    ) -> None:
        super().__init__()
        self.scale_fmt = args.scale_fmt
        self.scale: nn.Parameter | None = None
        if execution.fp8 and fp8:
            grid = (-(-out_features // args.block_size[0]), -(-in_features // args.block_size[1]))
            self.weight = execution.parameter(out_features, in_features, dtype=FP8)
            self.scale = execution.parameter(*grid, dtype=torch.float32)
        else:
            self.weight = execution.parameter(out_features, in_features)

    def product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(…, I) to (…, O) in ``dtype``; FP8 activations are scaled per 128 columns, by ``scale_fmt``.

        Without FP8 the product is first rounded to the dtype of ``x`` and the weight, whatever ``dtype`` is.
        """
        if self.scale is None:
            return functional.linear(x, self.weight).to(dtype)
        quantised, scales = act_quant(x, scale_fmt=self.scale_fmt)
        return fp8_gemm(quantised, scales, self.weight, self.scale, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, I) to (…, O), in the dtype of ``x``."""
        return self.product(x, x.dtype)


class ColumnParallelLinear(Linear):
    """A linear whose output features are divided over the ranks: (…, I) to this rank's (…, O / size)."""

    def __init__(
        self, in_features: int, out_features: int, args: ModelArgs, execution: Execution, *, fp8: bool = True
    ) -> None:
        super().__init__(in_features, execution.topology.share(out_features, "out_features"), args, execution, fp8=fp8)


class RowParallelLinear(Linear):
    """A linear whose input features are divided over the ranks: each gives a partial sum of the whole output."""

    def __init__(self, in_features: int, out_features: int, args: ModelArgs, execution: Execution) -> None:
        super().__init__(execution.topology.share(in_features, "in_features"), out_features, args, execution)
        self.topology = execution.topology

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand (…, O) in float32, for a caller that sums over the ranks itself.

        In BF16 compute it holds a value that was rounded to BF16, as ``product`` says: the sum is in float32, its
        summands are not exact.
        """
        return self.product(x, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, I / size) to (…, O): the ranks' ``partial`` summed in float32, then rounded to the dtype of ``x``."""
        return self.topology.all_reduce(self.partial(x)).to(x.dtype)


class ParallelEmbedding(nn.Module):
    """Token embeddings with the vocabulary divided over the ranks."""

    def __init__(self, args: ModelArgs, execution: Execution) -> None:
        super().__init__()
        self.topology = execution.topology
        self.rows = self.topology.share(args.vocab_size, "vocab_size")
        self.weight = execution.parameter(self.rows, args.dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) token ids to (B, S, dim): ids of other ranks' rows count zero here, then all ranks are summed."""
        local = tokens - self.topology.rank * self.rows
        elsewhere = (local < 0) | (local >= self.rows)
        embedded = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.topology.all_reduce(embedded.masked_fill(elsewhere[..., None], 0))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 with a float32 weight."""

    def __init__(self, dim: int, eps: float, execution: Execution) -> None:
        super().__init__()
        self.eps = eps
        self.weight = execution.parameter(dim, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, dim) to the same shape and dtype."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class MLP(nn.Module):
    """The gated MLP ``w2(silu(w1 x) * w3 x)``, its inner width divided over the ranks."""

    def __init__(self, inner: int, args: ModelArgs, execution: Execution) -> None:
        super().__init__()
        self.w1 = ColumnParallelLinear(args.dim, inner, args, execution)
        self.w2 = RowParallelLinear(inner, args.dim, args, execution)
        self.w3 = ColumnParallelLinear(args.dim, inner, args, execution)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand of the output, as ``RowParallelLinear.partial`` gives it."""
        return self.w2.partial(functional.silu(self.w1(x)) * self.w3(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, dim) to the same shape and dtype, summed over the ranks."""
        output: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return output
