"""What the official conversion scripts write, told independently of this project's converter.

Contract: the names, slices and dtypes of DeepSeek-V3's ``convert.py`` (and of ``fp8_cast_bf16.py`` before it), all in
memory, from nothing but the tensors and the two numbers that its command line takes.
"""

import torch

RENAMED = {
    "embed_tokens": ("embed", 0),
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "q_proj": ("wq", 0),
    "q_a_proj": ("wq_a", None),
    "q_a_layernorm": ("q_norm", None),
    "q_b_proj": ("wq_b", 0),
    "kv_a_proj_with_mqa": ("wkv_a", None),
    "kv_a_layernorm": ("kv_norm", None),
    "kv_b_proj": ("wkv_b", 0),
    "o_proj": ("wo", 1),
    "gate": ("gate", None),
    "gate_proj": ("w1", 0),
    "down_proj": ("w2", 1),
    "up_proj": ("w3", 0),
    "norm": ("norm", None),
    "lm_head": ("head", 0),
}


def dequantised(tensors: dict[str, torch.Tensor], block: int = 128) -> dict[str, torch.Tensor]:
    """The FP8 weights as BF16, block by block; the scales are gone."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{name}_scale_inv"]
            values = tensor.to(torch.float32)
            for row in range(scale.shape[0]):
                for column in range(scale.shape[1]):
                    part = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
                    values[part] *= scale[row, column]
            tensor = values.to(torch.bfloat16)  # noqa: PLW2901
        result[name] = tensor
    return result


def shards(tensors: dict[str, torch.Tensor], mp: int, n_experts: int, n_layers: int) -> list[dict[str, torch.Tensor]]:
    """One dict a rank. Layers at or past ``n_layers`` are the ones the official script leaves out (its number 61)."""
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(mp)]
    for name, tensor in tensors.items():
        parts = name.removeprefix("model.").replace("self_attn", "attn").replace("mlp", "ffn").split(".")
        if parts[0] == "layers" and int(parts[1]) >= n_layers:
            continue
        parts[-1] = {"weight_scale_inv": "scale", "e_score_correction_bias": "bias"}.get(parts[-1], parts[-1])
        parts[-2], axis = RENAMED[parts[-2]]
        for rank in range(mp):
            if "experts" in parts:
                if int(parts[parts.index("experts") + 1]) // (n_experts // mp) == rank:
                    ranks[rank][".".join(parts)] = tensor
            elif axis is None:
                ranks[rank][".".join(parts)] = tensor
            else:
                ranks[rank][".".join(parts)] = tensor.chunk(mp, dim=axis)[rank].contiguous()
    return ranks
