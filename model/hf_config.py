"""``ModelArgs`` from a Hugging Face ``config.json``: the field table, rope in both spellings, what is refused."""

from typing import Any

from model.args import ModelArgs, contradictions
from model.errors import InputError
from model.families import Family, recognise

FIELDS: dict[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "inter_dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "first_k_dense_replace": "n_dense_layers",
    "num_attention_heads": "n_heads",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "max_position_embeddings": "max_seq_len",
}
"""Whole numbers that ``config.json`` must state, and the ModelArgs field each becomes."""

EXPECTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
}
"""Fields that may be absent, and the only values that are implemented where they stand."""

LARGEST = 2**53
"""No field of a config is larger; beyond it a float would not hold every whole number."""

ROPE_KEYS = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "partial_rotary_factor", "truncate", "attention_factor",
}  # fmt: skip


def from_hf(config: dict[str, Any]) -> ModelArgs:
    """The arguments of the model that ``config`` (the parsed ``config.json``) describes.

    Raises ``InputError`` with a line for each unknown, missing or contradicting field.
    """
    problems = [f"config.json: {problem}" for problem in _kind_problems(config)]
    if problems:
        raise InputError(problems)
    family = recognise(config)
    fields = _sizes(config, problems)
    for name, allowed in EXPECTED.items():
        if config.get(name) is not None and config[name] not in allowed:
            problems.append(f"{name} = {config[name]!r} is not implemented; known: {', '.join(map(repr, allowed))}")
    heads = config.get("num_key_value_heads")
    if heads is not None and heads != config.get("num_attention_heads"):
        problems.append(f"num_key_value_heads = {heads} differs from num_attention_heads, as MLA cannot")
    fields |= _routing(config, family, problems)
    fields |= _rope(config, problems)
    fields |= _quantization(config, problems)
    if not problems:
        args = ModelArgs(**fields)
        problems = contradictions(args)
    if problems:
        raise InputError([f"config.json: {problem}" for problem in problems])
    return args


def _kind_problems(config: dict[str, Any]) -> list[str]:
    """Fields that are not even of the kind that the rest of this module reads; null counts as absent."""
    kinds: tuple[tuple[str, type, str], ...] = (
        *((name, dict, "an object") for name in ("quantization_config", "rope_scaling", "rope_parameters")),
        *((name, str, "a text") for name in ("model_type", "topk_method", "scoring_func", "hidden_act")),
        *((name, bool, "true or false") for name in ("norm_topk_prob", "attention_bias", "tie_word_embeddings")),
    )
    problems = [
        f"{name} = {config[name]!r} is not {article}"
        for name, kind, article in kinds
        if config.get(name) is not None and not isinstance(config[name], kind)
    ]
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        problems.append(f"architectures = {architectures!r} is not a list of texts")
    return problems


def _sizes(config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, target in FIELDS.items():
        fields[target] = _number(config, name, problems, whole=True)
    if "q_lora_rank" not in config:
        problems.append("q_lora_rank is not stated; state it, or null for a model with one query projection")
    fields["q_lora_rank"] = _number(config, "q_lora_rank", problems, whole=True, default=0)
    fields["n_mtp_layers"] = _number(config, "num_nextn_predict_layers", problems, whole=True, default=0)
    fields["norm_eps"] = _number(config, "rms_norm_eps", problems, default=1e-6)
    return fields


def _routing(config: dict[str, Any], family: Family, problems: list[str]) -> dict[str, Any]:
    unstated = [name for name in family.required if config.get(name) is None]
    problems.extend(
        f"{name} is not stated, and programs differ in what that means for {config['model_type']}; state it"
        for name in unstated
    )
    config = config | dict.fromkeys(unstated, 1)  # so that each is reported once
    method = config.get("topk_method") or family.topk_method
    score_func = config.get("scoring_func") or family.score_func
    norm = bool(config.get("norm_topk_prob", False))
    if method == "noaux_tc" and score_func != "sigmoid":
        problems.append(
            f"topk_method 'noaux_tc' contradicts scoring_func {score_func!r}: its bias is for sigmoid scores"
        )
    if score_func == "softmax" and norm:
        problems.append("norm_topk_prob = true with scoring_func 'softmax' is not implemented")
    grouped = method != "greedy"
    return {
        "score_func": score_func,
        "norm_topk_prob": norm,
        "gate_bias": method == "noaux_tc",
        "route_scale": _number(config, "routed_scaling_factor", problems, default=1.0),
        "n_expert_groups": _number(config, "n_group", problems, whole=True) if grouped else 1,
        "n_limited_groups": _number(config, "topk_group", problems, whole=True) if grouped else 1,
    }


def _rope(config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Rope fields from ``rope_scaling`` and ``rope_theta``, or from transformers 5's ``rope_parameters``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    older = config.get("rope_scaling") or {}
    problems.extend(
        f"rope_scaling.{name} = {older[name]!r} contradicts rope_parameters.{name} = {rope[name]!r}"
        for name in sorted(set(older) & set(rope) - {"type", "rope_type"})
        if older[name] != rope[name]
    )
    stated = {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}
    theta = _number(stated, "rope_theta", problems, positive=True)
    if "rope_theta" in rope and config.get("rope_theta") not in (None, rope["rope_theta"]):
        problems.append(f"rope_theta = {config['rope_theta']} contradicts rope_parameters.rope_theta = {theta}")
    unknown = sorted(set(rope) - ROPE_KEYS)
    problems.extend(f"rope_scaling.{name} is not a known field" for name in unknown)
    kinds = {rope[name] for name in ("type", "rope_type") if isinstance(rope.get(name), str)} or {"default"}
    kind = kinds.pop()
    if kinds:
        problems.append(f"rope_scaling.type = {rope['type']!r} contradicts rope_type = {rope['rope_type']!r}")
    fields: dict[str, Any] = {"rope_theta": theta, "yarn": kind == "yarn"}
    for name, only in (("partial_rotary_factor", 1.0), ("truncate", True), ("attention_factor", None)):
        if rope.get(name, only) not in (only, None):
            problems.append(f"rope_scaling.{name} = {rope[name]!r} is not implemented")
    if kind == "default":
        return fields | {"rope_factor": 1.0, "original_seq_len": config.get("max_position_embeddings") or 0}
    if kind != "yarn":
        problems.append(f"rope_scaling.type = {kind!r} is not implemented; known: 'yarn', 'default'")
        return fields
    if not rope.get("mscale_all_dim"):
        problems.append("rope_scaling.mscale_all_dim is missing or 0: YaRN without it is not implemented")
    elif rope.get("mscale", rope["mscale_all_dim"]) != rope["mscale_all_dim"]:
        problems.append(
            f"rope_scaling.mscale = {rope['mscale']} differs from mscale_all_dim = {rope['mscale_all_dim']}, "
            "which is not implemented"
        )
    table = (
        ("factor", "rope_factor", None),
        ("original_max_position_embeddings", "original_seq_len", None),
        ("beta_fast", "beta_fast", 32.0),
        ("beta_slow", "beta_slow", 1.0),
        ("mscale_all_dim", "mscale", 1.0),
    )
    for name, target, default in table:
        whole = target == "original_seq_len"
        fields[target] = _number(
            rope, name, problems, whole=whole, default=default, prefix="rope_scaling.", positive=True
        )
    return fields


def _quantization(config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    quantization = config.get("quantization_config")
    if quantization is None:
        return {"dtype": "bf16"}
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8":
        problems.append(
            f"quantization_config.quant_method = {method!r} is not implemented: only block-scaled 'fp8' is "
            "(packed INT4 releases are such)"
        )
        return {}
    for name, only in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if quantization.get(name, only) != only:
            problems.append(f"quantization_config.{name} = {quantization[name]!r} is not implemented; known: {only!r}")
    if quantization.get("scale_fmt") not in (None, "float", "ue8m0"):
        problems.append(f"quantization_config.scale_fmt = {quantization['scale_fmt']!r} is neither null nor 'ue8m0'")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        problems.append(f"quantization_config.weight_block_size = {block!r} is not two positive numbers")
        return {}
    scale_fmt = "ue8m0" if quantization.get("scale_fmt") == "ue8m0" else None
    return {"dtype": "fp8", "scale_fmt": scale_fmt, "block_size": tuple(block)}


def _number(
    config: dict[str, Any],
    name: str,
    problems: list[str],
    *,
    whole: bool = False,
    positive: bool = False,
    default: Any = None,
    prefix: str = "",
) -> Any:
    value = config.get(name)
    if value is None:
        value = default
    numeric = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not numeric or not 0 <= value <= LARGEST or (positive and value == 0):
        kind = f"{'a whole' if whole else 'a'} number {'above' if positive else 'of at least'} 0"
        problems.append(f"{prefix}{name} = {config.get(name)!r} is not {kind}")
        return 1 if whole else 1.0
    return value if whole else float(value)
