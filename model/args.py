"""The model's arguments: the official ``ModelArgs`` fields with their 16B defaults, and a few they lack.

``from_official`` reads the official JSON files unchanged; ``model.hf_config`` derives the same fields from a
Hugging Face ``config.json``; ``to_official`` gives back what the official loader can take.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from model.errors import InputError

LATENT_NORM_EPS = 1e-6
"""eps of the two latent norms (q_a, kv_a), whatever ``rms_norm_eps`` says (transformers, DeepSeek's remote code)."""

OFFICIAL_FIELDS = (
    "max_batch_size", "max_seq_len", "dtype", "scale_fmt", "vocab_size", "dim", "inter_dim", "moe_inter_dim",
    "n_layers", "n_dense_layers", "n_heads", "n_routed_experts", "n_shared_experts", "n_activated_experts",
    "n_expert_groups", "n_limited_groups", "score_func", "route_scale", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "original_seq_len", "rope_theta", "rope_factor",
    "beta_fast", "beta_slow", "mscale",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Sizes and rules of one model. Names and defaults are those of the official inference code.

    ``dtype`` says how linear weights are stored in the shards: ``bf16`` or ``fp8`` (E4M3 with block scales).
    ``q_lora_rank`` 0 means one query projection. Below ``mscale`` stand the fields the official code lacks:
    ``yarn`` (a property of the checkpoint, not of the cache length), ``norm_eps``, ``norm_topk_prob`` (normalise
    the chosen experts' sigmoid scores), ``gate_bias`` (the router's score-correction bias), ``block_size`` of
    the FP8 scales as (rows, columns) and ``n_mtp_layers`` that the source holds past ``n_layers``.
    """

    max_batch_size: int = 8
    max_seq_len: int = 4096 * 4
    dtype: str = "bf16"
    scale_fmt: str | None = None
    vocab_size: int = 102400
    dim: int = 2048
    inter_dim: int = 10944
    moe_inter_dim: int = 1408
    n_layers: int = 27
    n_dense_layers: int = 1
    n_heads: int = 16
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    n_activated_experts: int = 6
    n_expert_groups: int = 1
    n_limited_groups: int = 1
    score_func: str = "softmax"
    route_scale: float = 1.0
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    original_seq_len: int = 4096
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    yarn: bool = True
    norm_eps: float = 1e-6
    norm_topk_prob: bool = False
    gate_bias: bool = False
    block_size: tuple[int, int] = (128, 128)
    n_mtp_layers: int = 0

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the part without position and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def replace(self, **changes: Any) -> "ModelArgs":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; ``from_json`` is its inverse."""
        return dataclasses.asdict(self) | {"block_size": list(self.block_size)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "ModelArgs":
        """The arguments from ``to_json``'s fields. Raises ``InputError`` on unknown or contradicting ones."""
        return _checked(cls, fields, where="model arguments")

    @classmethod
    def from_official(cls, fields: dict[str, Any], gate_bias: bool | None = None) -> "ModelArgs":
        """The arguments from an official ``config_*.json``, with the official code's own implied rules.

        YaRN is on where ``max_seq_len > original_seq_len``, sigmoid scores are normalised and softmax scores are
        not, eps is 1e-6, and the router has a bias where ``dim`` is 7168, unless ``gate_bias`` says otherwise.
        """
        unknown = sorted(set(fields) - set(OFFICIAL_FIELDS))
        if unknown:
            raise InputError([f"official config: unknown field {name!r}" for name in unknown])
        args = _checked(cls, fields, where="official config")
        return args.replace(
            yarn=args.max_seq_len > args.original_seq_len,
            norm_topk_prob=args.score_func == "sigmoid",
            gate_bias=args.dim == 7168 if gate_bias is None else gate_bias,
        )

    def to_official(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The fields for the official loader, or None and the reasons why its code cannot express this model."""
        reasons = [
            reason
            for broken, reason in (
                (self.gate_bias != (self.dim == 7168), "its router has a bias exactly where dim is 7168"),
                (
                    self.norm_topk_prob != (self.score_func == "sigmoid"),
                    "it normalises expert weights exactly where the scores are sigmoid",
                ),
                (self.norm_eps != 1e-6, f"its norm eps is fixed at 1e-6, not {self.norm_eps}"),
                (self.block_size != (128, 128), f"its FP8 blocks are 128x128, not {self.block_size}"),
            )
            if broken
        ]
        if reasons:
            return None, [f"the official code cannot express this model: {reason}" for reason in reasons]
        # The official code sizes its caches by max_seq_len and switches YaRN by comparing it to original_seq_len.
        longest = min(self.max_seq_len, ModelArgs.max_seq_len)
        original = self.original_seq_len if self.yarn else longest
        if self.yarn:
            longest = max(longest, original + 1)
        fields = {name: getattr(self, name) for name in OFFICIAL_FIELDS}
        return fields | {"max_seq_len": longest, "original_seq_len": original}, []


def _checked(cls: type[ModelArgs], fields: dict[str, Any], where: str) -> ModelArgs:
    if not isinstance(fields, dict):
        raise InputError(f"{where}: is not a JSON object")
    known = {field.name: field for field in dataclasses.fields(cls)}
    problems = [f"{where}: unknown field {name!r}" for name in sorted(set(fields) - set(known))]
    for name, value in fields.items():
        default = known[name].default if name in known else None
        if isinstance(default, bool):
            good = isinstance(value, bool)
        elif isinstance(default, (int, float)):
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
            good = good and (isinstance(default, float) or isinstance(value, int))
        elif isinstance(default, tuple):
            good = isinstance(value, (list, tuple))
        else:
            good = True
        if not good:
            problems.append(f"{where}: {name} = {value!r} is not {KINDS[type(default)]}")
    if problems:
        raise InputError(problems)
    if "block_size" in fields:
        fields = fields | {"block_size": tuple(fields["block_size"])}
    args = cls(**fields)
    problems = [f"{where}: {problem}" for problem in contradictions(args)]
    if problems:
        raise InputError(problems)
    return args


KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number of at least 0",
    float: "a number of at least 0",
    tuple: "two positive numbers",
}
"""What a field must be whose default is of the type."""


def contradictions(args: ModelArgs) -> list[str]:
    """What is impossible in ``args``, one line for each, naming the field."""
    experts_per_group = args.n_routed_experts // max(args.n_expert_groups, 1)
    rules = (
        (args.dtype in ("bf16", "fp8"), f"dtype = {args.dtype!r} is neither 'bf16' nor 'fp8'"),
        (args.scale_fmt in (None, "ue8m0"), f"scale_fmt = {args.scale_fmt!r} is neither null nor 'ue8m0'"),
        (
            args.score_func in ("softmax", "sigmoid"),
            f"score_func = {args.score_func!r} is neither 'softmax' nor 'sigmoid'",
        ),
        (
            not (args.norm_topk_prob and args.score_func == "softmax"),
            "norm_topk_prob with softmax scores is not implemented",
        ),
        (
            args.n_dense_layers <= args.n_layers,
            f"n_dense_layers = {args.n_dense_layers} exceeds n_layers = {args.n_layers}",
        ),
        (
            args.n_expert_groups >= 1 and args.n_routed_experts % args.n_expert_groups == 0,
            f"n_expert_groups = {args.n_expert_groups} does not divide n_routed_experts = {args.n_routed_experts}",
        ),
        (
            1 <= args.n_limited_groups <= args.n_expert_groups,
            f"n_limited_groups = {args.n_limited_groups} is not between 1 and {args.n_expert_groups} groups",
        ),
        (
            1 <= args.n_activated_experts <= args.n_limited_groups * experts_per_group,
            f"n_activated_experts = {args.n_activated_experts} is not between 1 and the "
            f"{args.n_limited_groups * experts_per_group} experts of the chosen groups",
        ),
        (
            not (args.gate_bias and args.n_expert_groups > 1 and experts_per_group < 2),
            "a router bias scores a group by its best two experts, and the groups have one",
        ),
        (args.rope_theta > 1, f"rope_theta = {args.rope_theta} is not above 1"),
        *(
            (not args.yarn or getattr(args, name) > 0, f"yarn needs {name} = {getattr(args, name)} above 0")
            for name in ("rope_factor", "beta_fast", "beta_slow", "original_seq_len")
        ),
        (args.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim = {args.qk_rope_head_dim} is odd"),
        (
            len(args.block_size) == 2 and all(isinstance(n, int) and n > 0 for n in args.block_size),
            f"block_size = {args.block_size!r} is not two positive numbers",
        ),
        *(
            (getattr(args, name) > 0, f"{name} = {getattr(args, name)} is not positive")
            for name in (
                "vocab_size", "dim", "inter_dim", "moe_inter_dim", "n_layers", "n_heads", "n_routed_experts",
                "n_shared_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                "max_seq_len",
            )
        ),
    )  # fmt: skip
    return [problem for holds, problem in rules if not holds]
