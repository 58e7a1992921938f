"""The name table: which source tensor becomes which shard tensor, of what shape, cut along which axis.

One rule a line. The official converter's names and slices, tensor for tensor; the shapes are checked against the
source's headers. ``{layer}`` and ``{expert}`` stand for numbers.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from model.args import ModelArgs

Shape = Callable[[ModelArgs], tuple[int, ...]]

SOURCE_SCALE_SUFFIX = "weight_scale_inv"
TARGET_SCALE_SUFFIX = "scale"


@dataclass(frozen=True)
class Rule:
    """``axis`` is the dimension cut over the ranks (None: replicated, or an expert, which goes whole to one rank).

    ``linear`` weights may be FP8, with their block scales beside them.
    """

    source: str
    target: str
    shape: Shape
    axis: int | None = None
    linear: bool = False
    when: Callable[[ModelArgs], bool] = lambda args: True


@dataclass(frozen=True, slots=True)
class Binding:
    """A rule applied to one layer and expert."""

    source: str
    target: str
    shape: tuple[int, ...]
    axis: int | None
    linear: bool
    expert: int | None = None
    mtp: bool = False


def _linear(source: str, target: str, shape: Shape, axis: int | None = None, **more: Callable[..., bool]) -> Rule:
    return Rule(f"{source}.weight", f"{target}.weight", shape, axis, linear=True, **more)


def _mlp(source: str, target: str, width: Callable[[ModelArgs], int], cut: bool) -> tuple[Rule, ...]:
    across, along = (0, 1) if cut else (None, None)
    return (
        _linear(f"{source}.gate_proj", f"{target}.w1", lambda a: (width(a), a.dim), across),
        _linear(f"{source}.down_proj", f"{target}.w2", lambda a: (a.dim, width(a)), along),
        _linear(f"{source}.up_proj", f"{target}.w3", lambda a: (width(a), a.dim), across),
    )


def _low_rank_q(args: ModelArgs) -> bool:
    return args.q_lora_rank > 0


def _full_rank_q(args: ModelArgs) -> bool:
    return args.q_lora_rank == 0


def _q_out(args: ModelArgs) -> int:
    return args.n_heads * args.qk_head_dim


L, T = "model.layers.{layer}", "layers.{layer}"

MODEL_RULES = (
    Rule("model.embed_tokens.weight", "embed.weight", lambda a: (a.vocab_size, a.dim), 0),
    Rule("model.norm.weight", "norm.weight", lambda a: (a.dim,)),
    Rule("lm_head.weight", "head.weight", lambda a: (a.vocab_size, a.dim), 0),
)
LAYER_RULES = (
    Rule(f"{L}.input_layernorm.weight", f"{T}.attn_norm.weight", lambda a: (a.dim,)),
    Rule(f"{L}.post_attention_layernorm.weight", f"{T}.ffn_norm.weight", lambda a: (a.dim,)),
    _linear(f"{L}.self_attn.q_proj", f"{T}.attn.wq", lambda a: (_q_out(a), a.dim), 0, when=_full_rank_q),
    _linear(f"{L}.self_attn.q_a_proj", f"{T}.attn.wq_a", lambda a: (a.q_lora_rank, a.dim), when=_low_rank_q),
    Rule(
        f"{L}.self_attn.q_a_layernorm.weight", f"{T}.attn.q_norm.weight", lambda a: (a.q_lora_rank,), when=_low_rank_q
    ),
    _linear(f"{L}.self_attn.q_b_proj", f"{T}.attn.wq_b", lambda a: (_q_out(a), a.q_lora_rank), 0, when=_low_rank_q),
    _linear(
        f"{L}.self_attn.kv_a_proj_with_mqa", f"{T}.attn.wkv_a", lambda a: (a.kv_lora_rank + a.qk_rope_head_dim, a.dim)
    ),
    Rule(f"{L}.self_attn.kv_a_layernorm.weight", f"{T}.attn.kv_norm.weight", lambda a: (a.kv_lora_rank,)),
    _linear(
        f"{L}.self_attn.kv_b_proj",
        f"{T}.attn.wkv_b",
        lambda a: (a.n_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank),
        0,
    ),
    _linear(f"{L}.self_attn.o_proj", f"{T}.attn.wo", lambda a: (a.dim, a.n_heads * a.v_head_dim), 1),
)
DENSE_RULES = _mlp(f"{L}.mlp", f"{T}.ffn", lambda a: a.inter_dim, cut=True)
MOE_RULES = (
    Rule(f"{L}.mlp.gate.weight", f"{T}.ffn.gate.weight", lambda a: (a.n_routed_experts, a.dim)),
    Rule(
        f"{L}.mlp.gate.e_score_correction_bias",
        f"{T}.ffn.gate.bias",
        lambda a: (a.n_routed_experts,),
        when=lambda a: a.gate_bias,
    ),
    *_mlp(
        f"{L}.mlp.shared_experts",
        f"{T}.ffn.shared_experts",
        lambda a: a.n_shared_experts * a.moe_inter_dim,
        cut=True,
    ),
)
EXPERT_RULES = _mlp(f"{L}.mlp.experts.{{expert}}", f"{T}.ffn.experts.{{expert}}", lambda a: a.moe_inter_dim, cut=False)
MTP_RULES = (
    Rule(f"{L}.embed_tokens.weight", f"{T}.embed.weight", lambda a: (a.vocab_size, a.dim), 0),
    Rule(f"{L}.enorm.weight", f"{T}.enorm.weight", lambda a: (a.dim,)),
    Rule(f"{L}.hnorm.weight", f"{T}.hnorm.weight", lambda a: (a.dim,)),
    _linear(f"{L}.eh_proj", f"{T}.eh_proj", lambda a: (a.dim, 2 * a.dim)),
    Rule(f"{L}.shared_head.norm.weight", f"{T}.shared_head.norm.weight", lambda a: (a.dim,)),
    Rule(f"{L}.shared_head.head.weight", f"{T}.shared_head.head.weight", lambda a: (a.vocab_size, a.dim), 0),
)


@dataclass(frozen=True)
class Drop:
    """Source tensors that no shard takes, and why."""

    name: str
    pattern: re.Pattern[str]
    reason: str


DROPS = (
    Drop(
        "rotary_inv_freq",
        re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        "rope frequencies are computed from the config",
    ),
)
MTP_DROP = Drop(
    "mtp_layers",
    re.compile(r"model\.layers\.(\d+)\..+"),
    "multi-token-prediction layers (at or past num_hidden_layers) are left out with --mtp drop",
)


def bindings(args: ModelArgs, mtp_layers: int = 0) -> Iterator[Binding]:
    """Every tensor a source of these arguments must hold (scales aside), each with its place in the shards.

    ``mtp_layers`` layers past ``n_layers`` come with the block's usual tensors and the MTP ones.
    """
    yield from _apply(MODEL_RULES, args)
    for layer in range(args.n_layers + mtp_layers):
        mtp = layer >= args.n_layers
        yield from _apply(LAYER_RULES, args, layer, mtp=mtp)
        if layer < args.n_dense_layers:
            yield from _apply(DENSE_RULES, args, layer)
            continue
        yield from _apply(MOE_RULES, args, layer, mtp=mtp)
        for expert in range(args.n_routed_experts):
            yield from _apply(EXPERT_RULES, args, layer, expert, mtp)
        if mtp:
            yield from _apply(MTP_RULES, args, layer, mtp=True)


def _apply(
    rules: tuple[Rule, ...], args: ModelArgs, layer: int | None = None, expert: int | None = None, mtp: bool = False
) -> Iterator[Binding]:
    for rule in rules:
        if rule.when(args):
            source = rule.source.format(layer=layer, expert=expert)
            target = rule.target.format(layer=layer, expert=expert)
            yield Binding(source, target, rule.shape(args), rule.axis, rule.linear, expert, mtp)


def source_scale(weight: str) -> str:
    """Name of the block scales beside a source weight ``….weight``."""
    return weight.removesuffix("weight") + SOURCE_SCALE_SUFFIX


def target_scale(weight: str) -> str:
    """Name of the block scales beside a shard's ``….weight``."""
    return weight.removesuffix("weight") + TARGET_SCALE_SUFFIX


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """The ceil grid of ``block``-sized blocks over a matrix of ``shape``."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def layer_of(name: str) -> int | None:
    """The layer number in a source tensor's name, or None."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None
