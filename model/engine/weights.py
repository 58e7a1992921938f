"""One rank's weights as the engine's kernels read them: matrices that are read together lie together.

The parameters of the ``Transformer`` become views of these stacks before they are filled, so that every weight is on
the device once, and the simple path and the engine compute with the same memory.

Shapes: T tokens, D width of the model, H heads of this rank, N, R, V, C as in ``model.attention``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from kernels.act_quant import act_quant
from kernels.add_norm import Normed
from kernels.fp8_gemm import fp8_gemm
from kernels.fused_moe import ExpertShapes, ExpertWeights
from kernels.matvec import linear
from kernels.moe_gate import Routing
from model.args import ModelArgs
from model.layers import MLP, Execution, Linear
from model.moe import MoE
from model.rope import inverse_frequencies
from model.transformer import Block, Transformer

BLOCK = 128


@dataclass(frozen=True)
class Product:
    """``x W^T`` for the stacked weights of one or more linears, FP8 where there is a scale."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    scale_fmt: str | None
    widths: tuple[int, ...]

    def __call__(self, x: Normed, dtype: torch.dtype | None = None) -> torch.Tensor:
        """(T, I) to (T, O), in ``dtype`` or that of ``x``."""
        dtype = dtype or x.x.dtype
        if self.scale is None:
            return linear(x.x, self.weight).to(dtype)
        quantised = x.quantised or act_quant(x.x, scale_fmt=self.scale_fmt)
        return fp8_gemm(*quantised, self.weight, self.scale, dtype=dtype)


def outputs(products: tuple[Product, ...], x: Normed) -> list[torch.Tensor]:
    """The output of every linear in ``products``, which are one where they could be stacked."""
    return [part for product in products for part in torch.split(product(x), list(product.widths), dim=-1)]


@dataclass(frozen=True)
class AttentionWeights:
    """``first`` gives queries (or their latent) and latents; ``query`` expands a query's latent where there is one."""

    first: tuple[Product, ...]
    query_norm: torch.Tensor | None
    query: Product | None
    latent_norm: torch.Tensor
    to_keys: torch.Tensor  # H, N, C
    to_values: torch.Tensor  # H, V, C
    expansion: torch.Tensor  # H * (N + V), C
    out: Product


@dataclass(frozen=True)
class DenseWeights:
    """A gated MLP: gate and up in one product."""

    gate_up: tuple[Product, ...]
    down: Product


@dataclass(frozen=True)
class MoEWeights:
    """Gate and experts; the gate in BF16 where that holds it exactly."""

    gate: torch.Tensor
    bias: torch.Tensor | None
    routing: Routing
    experts: ExpertWeights


@dataclass(frozen=True)
class LayerWeights:
    """One block."""

    attention_norm: torch.Tensor
    attention: AttentionWeights
    ffn_norm: torch.Tensor
    ffn: DenseWeights | MoEWeights


def allocate(args: ModelArgs, execution: Execution) -> Transformer:
    """A ``Transformer`` in absorbed form whose parameters lie in stacks, to be filled by ``model.load``."""
    model = Transformer(args, replace(execution, device=torch.device("meta")))
    for module in model.modules():
        if hasattr(module, "execution"):
            module.execution = execution  # type: ignore[assignment]
    model.register_buffer("frequencies", inverse_frequencies(args).to(execution.device), persistent=False)
    for block in model.layers:
        _stack_block(block, execution)  # type: ignore[arg-type]
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                _bind(module, name, torch.empty(parameter.shape, dtype=parameter.dtype, device=execution.device))
    return model


def gather(model: Transformer) -> list[LayerWeights]:
    """The filled weights of ``model``, which ``allocate`` made, layer by layer."""
    return [_layer(block, model) for block in model.layers]  # type: ignore[arg-type]


def _bind(module: nn.Module, name: str, values: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(values, requires_grad=False))


def _stack_block(block: Block, execution: Execution) -> None:
    attention = block.attn
    _stack([attention.wq if hasattr(attention, "wq") else attention.wq_a, attention.wkv_a], execution.device)
    if isinstance(block.ffn, MoE):
        _stack_experts(block.ffn, execution)
    elif isinstance(block.ffn, MLP):
        _stack([block.ffn.w1, block.ffn.w3], execution.device)


def _stack(linears: Sequence[Linear], device: torch.device) -> None:
    """Give linears of the same input one piece of memory, where that is possible."""
    if not _stackable(linears):
        return
    for name in ("weight", "scale") if linears[0].scale is not None else ("weight",):
        parts = [getattr(layer, name) for layer in linears]
        rows = [part.shape[0] for part in parts]
        stack = torch.empty(sum(rows), parts[0].shape[1], dtype=parts[0].dtype, device=device)
        for layer, view in zip(linears, torch.split(stack, rows), strict=True):
            _bind(layer, name, view)


def _stackable(linears: Sequence[Linear]) -> bool:
    """A block of FP8 scales must not straddle two linears."""
    return linears[0].scale is None or all(layer.weight.shape[0] % BLOCK == 0 for layer in linears[:-1])


def _products(linears: Sequence[Linear]) -> tuple[Product, ...]:
    """One product of all linears, or one of each where they could not be stacked."""
    return (_product(linears),) if _stackable(linears) else tuple(_product([layer]) for layer in linears)


def _product(linears: Sequence[Linear]) -> Product:
    weights = [layer.weight for layer in linears]
    scales = [layer.scale for layer in linears if layer.scale is not None]
    widths = tuple(weight.shape[0] for weight in weights)
    return Product(
        _joined([weight.data for weight in weights]),
        _joined([scale.data for scale in scales]) if scales else None,
        linears[0].scale_fmt,
        widths,
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Matrices that follow each other in memory as one, without a copy."""
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    place = first.data_ptr()
    for part in parts:
        assert part.data_ptr() == place, "these matrices were not stacked"
        place += part.numel() * part.element_size()
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def expert_shapes(moe: MoE, args: ModelArgs) -> ExpertShapes:
    """This rank's experts; the shared ones are cut into pieces of at most a routed expert's width."""
    width = moe.shared_experts.w1.weight.shape[0]
    pieces = -(-width // args.moe_inter_dim)
    assert width % pieces == 0, f"shared experts of {width} do not divide into {pieces}"
    whole_blocks = (width // pieces) % BLOCK == 0 or moe.shared_experts.w1.scale is None
    assert pieces == 1 or whole_blocks, f"FP8 shared experts of {width} cut into {pieces} do not end on a block"
    return ExpertShapes(len(moe.experts), args.dim, args.moe_inter_dim, pieces, width // pieces)


def _stack_experts(moe: MoE, execution: Execution) -> None:
    dtype = moe.shared_experts.w1.weight.dtype
    weights = ExpertWeights.empty(expert_shapes(moe, moe.gate.args), dtype, execution.device)
    for number, expert in [*enumerate(moe.experts.values()), (None, moe.shared_experts)]:
        parts = weights.parts(number)
        for name in ("w1", "w2", "w3"):
            layer = getattr(expert, name)
            _bind(layer, "weight", parts[name])
            if layer.scale is not None:
                _bind(layer, "scale", parts[f"scale{name[1]}"])
    moe.stacked = weights


def _layer(block: Block, model: Transformer) -> LayerWeights:
    ffn = block.ffn
    if isinstance(ffn, MoE):
        gathered: DenseWeights | MoEWeights = _moe(ffn, model.args)
    else:
        assert isinstance(ffn, MLP)
        gathered = DenseWeights(_products([ffn.w1, ffn.w3]), _product([ffn.w2]))
    return LayerWeights(
        block.attn_norm.weight.data, _attention(block, model.args), block.ffn_norm.weight.data, gathered
    )


def _attention(block: Block, args: ModelArgs) -> AttentionWeights:
    attention = block.attn
    has_latent = hasattr(attention, "wq_a")
    expansion = attention.wkv_b.weight.data.view(attention.heads, -1, args.kv_lora_rank)
    to_keys, to_values = torch.split(expansion, [args.qk_nope_head_dim, args.v_head_dim], dim=1)
    return AttentionWeights(
        first=_products([attention.wq_a if has_latent else attention.wq, attention.wkv_a]),
        query_norm=attention.q_norm.weight.data if has_latent else None,
        query=_product([attention.wq_b]) if has_latent else None,
        latent_norm=attention.kv_norm.weight.data,
        to_keys=to_keys,
        to_values=to_values,
        expansion=attention.wkv_b.weight.data,
        out=_product([attention.wo]),
    )


def _moe(moe: MoE, args: ModelArgs) -> MoEWeights:
    assert moe.stacked is not None, "this model was not allocated for the engine"
    gate = moe.gate.weight.data
    rounded = gate.bfloat16()
    first = moe.topology.rank * len(moe.experts)
    routing = Routing(
        experts=args.n_routed_experts,
        activated=args.n_activated_experts,
        groups=args.n_expert_groups,
        limited_groups=args.n_limited_groups,
        softmax=args.score_func == "softmax",
        normalise=args.norm_topk_prob,
        scale=args.route_scale,
        first=first,
        last=first + len(moe.experts),
        shared=moe.stacked.shapes.shared,
    )
    exact = rounded if torch.equal(rounded.float(), gate) and gate.is_cuda else gate
    return MoEWeights(exact, None if moe.gate.bias is None else moe.gate.bias.data, routing, moe.stacked)
