"""Checkpoints with random data in the released form, of any small size: for properties, memory and kills."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.sparse_checkpoints import FP8, YARN, Family, Tensor, released_config, write_checkpoint

NAN_CODES = (0x7F, 0xFF)
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "num_attention_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def small_family(fp8: bool = True, files: int = 2, block: int = 128, **changes: Any) -> Family:
    """A DeepSeek-V3 of ``SMALL`` sizes, changed; its FP8 scales stand for ``block`` x ``block`` values."""
    config = released_config("deepseek_v3", **SMALL | changes)
    if fp8:
        config["quantization_config"] = FP8 | {"weight_block_size": [block, block]}
    return Family(config, files=files, fp8=fp8, mtp=bool(config["num_nextn_predict_layers"]), block=block)


def large_family() -> Family:
    """About 160 MB of FP8 weights in 8 files: written in seconds, and long enough at work to be met in the middle."""
    return small_family(
        files=8, hidden_size=1024, intermediate_size=4096, moe_intermediate_size=1024, num_hidden_layers=6,
        n_routed_experts=8, num_attention_heads=8, vocab_size=16384, q_lora_rank=512, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip


def write_random(family: Family, directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint with data drawn from ``seed``: any FP8 code but NaN, positive scales."""
    generator = torch.Generator().manual_seed(seed)
    makers: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {
        "F8_E4M3": lambda shape: _codes(shape, generator),
        "BF16": lambda shape: torch.randn(shape, generator=generator).bfloat16(),
        "F32": lambda shape: torch.rand(shape, generator=generator) + 0.5,
    }

    def write_file(path: Path, part: list[Tensor]) -> None:
        save_file({name: makers[dtype](shape) for name, dtype, shape in part}, path, metadata={"format": "pt"})

    return write_checkpoint(family, directory, write_file)


def _codes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for nan in NAN_CODES:
        codes[codes == nan] = nan - 1
    return codes.view(torch.float8_e4m3fn)
