"""Checkpoints at their real dimensions and names, headers alone: the data is a hole in a sparse file.

Each family is told by its config and its own small list of facts, independently of the project's name table: shapes
are written out from the papers' numbers, so that the table is checked against something else than itself.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ITEMSIZE = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class Family:
    """A released checkpoint: its config, whether linears are FP8, how many files, and what else its layers hold."""

    config: dict[str, Any]
    files: int
    fp8: bool = False
    mtp: bool = False
    inv_freq: bool = False
    block: int = 128
    file_pattern: str = "model-{number:05d}-of-{files:06d}.safetensors"
    sidecars: tuple[str, ...] = field(default=("tokenizer.json", "tokenizer_config.json", "generation_config.json"))


def released_config(model_type: str, **fields: Any) -> dict[str, Any]:
    common = {
        "architectures": ["DeepseekV2ForCausalLM" if model_type == "deepseek_v2" else "DeepseekV3ForCausalLM"],
        "model_type": model_type, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "moe_layer_freq": 1, "rms_norm_eps": 1e-6, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000, "torch_dtype": "bfloat16",
        "max_position_embeddings": 163840,
    }  # fmt: skip
    return common | fields | {"num_key_value_heads": fields["num_attention_heads"]}


V3_SIZES: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
    "num_nextn_predict_layers": 1, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
V2_SIZES: dict[str, Any] = {
    "vocab_size": 102400, "scoring_func": "softmax", "norm_topk_prob": False, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "V2-Lite": Family(
        released_config(
            "deepseek_v2", **V2_SIZES, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
            num_hidden_layers=27, num_attention_heads=16, n_routed_experts=64, n_group=1, topk_group=1,
            topk_method="greedy", routed_scaling_factor=1.0, q_lora_rank=None,
            rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        files=4,
    ),
    "V2": Family(
        released_config(
            "deepseek_v2", **V2_SIZES, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
            num_hidden_layers=60, num_attention_heads=128, n_routed_experts=160, n_group=8, topk_group=3,
            topk_method="group_limited_greedy", routed_scaling_factor=16.0, q_lora_rank=1536,
            rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        files=55,
    ),
    "V3": Family(released_config("deepseek_v3", **V3_SIZES, quantization_config=FP8), files=163, fp8=True, mtp=True),
    "V3.1": Family(
        released_config("deepseek_v3", **V3_SIZES, quantization_config=FP8 | {"scale_fmt": "ue8m0"}),
        files=163, fp8=True, mtp=True,
    ),
    "Kimi-K2": Family(
        released_config(
            "kimi_k2",
            **V3_SIZES
            | {
                "vocab_size": 163840, "first_k_dense_replace": 1, "num_attention_heads": 64, "n_routed_experts": 384,
                "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
                "rope_theta": 50000, "rope_scaling": YARN | {"factor": 32, "beta_fast": 1, "mscale": 1.0,
                                                             "mscale_all_dim": 1.0},
            },
            quantization_config=FP8,
        ),
        files=61, fp8=True, inv_freq=True, file_pattern="model-{number}-of-{files}.safetensors",
        sidecars=("tiktoken.model", "tokenization_kimi.py", "tokenizer_config.json", "generation_config.json"),
    ),
    "Moonlight": Family(
        released_config(
            "deepseek_v3", vocab_size=163840, hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408,
            num_hidden_layers=27, first_k_dense_replace=1, num_attention_heads=16, n_routed_experts=64,
            n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1, topk_method="noaux_tc",
            scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.446, q_lora_rank=None,
            rms_norm_eps=1e-5, rope_theta=50000, rope_scaling=None, num_nextn_predict_layers=0,
            max_position_embeddings=8192,
        ),
        files=27, inv_freq=True, file_pattern="model-{number}-of-{files}.safetensors",
        sidecars=("tiktoken.model", "tokenization_moonshot.py", "tokenizer_config.json", "generation_config.json"),
    ),
}  # fmt: skip


def tensors(family: Family) -> Iterator[Tensor]:
    """Every tensor of the release, layer by layer."""
    config = family.config
    dim, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", "BF16", (vocabulary, dim)
    for layer in range(config["num_hidden_layers"] + family.mtp):
        for name, dtype, shape in _layer(family, layer):
            yield f"model.layers.{layer}.{name}", dtype, shape
    yield "model.norm.weight", "BF16", (dim,)
    yield "lm_head.weight", "BF16", (vocabulary, dim)


def _layer(family: Family, layer: int) -> Iterator[Tensor]:
    config = family.config
    dim, heads, rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    yield "input_layernorm.weight", "BF16", (dim,)
    latent, rope, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
    key = config["qk_nope_head_dim"] + rope
    if rank is None:
        yield from _linear(family, "self_attn.q_proj", heads * key, dim)
    else:
        yield from _linear(family, "self_attn.q_a_proj", rank, dim)
        yield "self_attn.q_a_layernorm.weight", "BF16", (rank,)
        yield from _linear(family, "self_attn.q_b_proj", heads * key, rank)
    yield from _linear(family, "self_attn.kv_a_proj_with_mqa", latent + rope, dim)
    yield "self_attn.kv_a_layernorm.weight", "BF16", (latent,)
    yield from _linear(family, "self_attn.kv_b_proj", heads * (key - rope + value), latent)
    yield from _linear(family, "self_attn.o_proj", dim, heads * value)
    if family.inv_freq:
        yield "self_attn.rotary_emb.inv_freq", "F32", (rope // 2,)
    yield "post_attention_layernorm.weight", "BF16", (dim,)
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(family, "mlp", config["intermediate_size"])
        return
    yield "mlp.gate.weight", "BF16", (config["n_routed_experts"], dim)
    if config["topk_method"] == "noaux_tc":
        yield "mlp.gate.e_score_correction_bias", "F32", (config["n_routed_experts"],)
    for expert in range(config["n_routed_experts"]):
        yield from _mlp(family, f"mlp.experts.{expert}", config["moe_intermediate_size"])
    yield from _mlp(family, "mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])
    if layer >= config["num_hidden_layers"]:
        yield "embed_tokens.weight", "BF16", (config["vocab_size"], dim)
        yield "enorm.weight", "BF16", (dim,)
        yield "hnorm.weight", "BF16", (dim,)
        yield "eh_proj.weight", "BF16", (dim, 2 * dim)
        yield "shared_head.norm.weight", "BF16", (dim,)
        yield "shared_head.head.weight", "BF16", (config["vocab_size"], dim)


def _mlp(family: Family, name: str, width: int) -> Iterator[Tensor]:
    dim = family.config["hidden_size"]
    yield from _linear(family, f"{name}.gate_proj", width, dim)
    yield from _linear(family, f"{name}.up_proj", width, dim)
    yield from _linear(family, f"{name}.down_proj", dim, width)


def _linear(family: Family, name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3" if family.fp8 else "BF16", (rows, columns)
    if family.fp8:
        yield f"{name}.weight_scale_inv", "F32", (-(-rows // family.block), -(-columns // family.block))


def size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    count = ITEMSIZE[dtype]
    for dimension in shape:
        count *= dimension
    return count


def write_sparse(family: Family, directory: Path) -> Path:
    """Write the checkpoint without its data: every file is its header and a hole."""
    return write_checkpoint(family, directory, _write_header)


def write_checkpoint(family: Family, directory: Path, write_file: Callable[[Path, list[Tensor]], None]) -> Path:
    """Write the checkpoint: files of about equal size in the released naming, index, config, empty sidecars."""
    directory.mkdir(parents=True)
    everything = list(tensors(family))
    share = sum(size(dtype, shape) for _, dtype, shape in everything) / family.files
    weight_map: dict[str, str] = {}
    parts: list[list[Tensor]] = [[] for _ in range(family.files)]
    position = 0.0
    for tensor in everything:
        parts[min(int(position / share), family.files - 1)].append(tensor)
        position += size(tensor[1], tensor[2])
    parts = [part for part in parts if part]
    for number, part in enumerate(parts, start=1):
        name = family.file_pattern.format(number=number, files=len(parts))
        write_file(directory / name, part)
        weight_map |= dict.fromkeys((tensor[0] for tensor in part), name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(family.config))
    for name in family.sidecars:
        (directory / name).write_text("{}")
    return directory


def _write_header(path: Path, part: list[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in part:
        begin, end = end, end + size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
