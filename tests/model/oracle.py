"""transformers as the oracle: small checkpoints that it saves itself, and its own float32 results on them.

The trained FP8 checkpoint is dequantised here by an independent formula, never by transformers' own FP8 path.
"""

import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ASSETS = Path(__file__).parents[1] / "assets"
TINY_V3 = ASSETS / "tiny-v3"
NEW_TOKENS = 32
WINDOW = 36

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = PLAIN | {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V3 = SMALL | {
    "model_type": "deepseek_v3",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
V2 = SMALL | {"model_type": "deepseek_v2", "norm_topk_prob": False, "routed_scaling_factor": 1.5}

CASES: dict[str, dict[str, Any]] = {
    "v3": V3 | {"rope_parameters": YARN},
    "v3-no-q-lora": V3 | {"rope_parameters": YARN, "q_lora_rank": None},
    "v3-no-yarn": V3 | {"rope_parameters": PLAIN | {"rope_theta": 50000.0}},
    "v3-eps-1e-5": V3 | {"rope_parameters": YARN, "rms_norm_eps": 1e-5},
    "v2-groups": V2 | {"rope_parameters": YARN, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "v2-lite": V2
    | {
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "topk_method": "greedy",
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
    },
}
"""Configurations of the random checkpoints. They differ in what the families and their configs really vary."""


@dataclass(frozen=True)
class Expected:
    """What transformers computes in float32: logits after each token of a batch, and greedy continuations."""

    tokens: list[list[int]]
    logits: torch.Tensor
    prompts: list[list[int]]
    continuations: list[list[int]] = field(default_factory=list)


def save_random(name: str, directory: Path) -> None:
    """Have transformers save a random BF16 checkpoint of ``CASES[name]``; the router's bias stays float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(CASES[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(parameter_name, noise))
        model.to(torch.bfloat16)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                _owner(model, buffer_name).e_score_correction_bias = 0.2 * torch.randn(
                    buffer.shape, generator=generator
                )
    model.save_pretrained(directory)


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Weights that make scores, routes and rotations matter, and latents small enough that their eps does."""
    if noise.ndim == 1:
        return 1 + 0.2 * noise
    gain = 1.0
    for part, value in (("embed_tokens", 2.0), ("_a_proj", 0.3), ("kv_b_proj", 1.5), ("mlp.gate.", 4.0)):
        if part in name:
            gain = value
    return noise * gain * noise.shape[-1] ** -0.5


def _owner(model: torch.nn.Module, buffer_name: str) -> Any:
    return model.get_submodule(buffer_name.rpartition(".")[0])


def save_dequantised(source: Path, directory: Path) -> None:
    """Write the FP8 checkpoint ``source`` as BF16, without its MTP layer, in a form that transformers loads."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    config = json.loads((source / "config.json").read_text())
    rows, columns = config.pop("quantization_config")["weight_block_size"]
    mtp = tuple(f"model.layers.{config['num_hidden_layers'] + i}." for i in range(config["num_nextn_predict_layers"]))
    config["num_nextn_predict_layers"] = 0
    written = {}
    for name, tensor in tensors.items():
        if name.startswith(mtp) or name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{name}_scale_inv"].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            written[name] = (tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
        else:
            written[name] = tensor
    directory.mkdir()
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)


def expected(directory: Path) -> Expected:
    """The oracle's results on the BF16 checkpoint in ``directory``, by full recomputation at every step."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(2, vocabulary, (2, WINDOW), generator=generator)
    prompts = [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in (1, 4, 7)]
    with torch.inference_mode():
        continuations = []
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(NEW_TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            continuations.append(ids[len(prompt) :])
        return Expected(tokens.tolist(), model(tokens).logits, prompts, continuations)


def greedy_reply(directory: Path, line: str, new_tokens: int, earlier: tuple[str, str] | None = None) -> str:
    """The oracle's reply to ``line`` through the chat template, after an ``earlier`` line and its reply."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    turns = [*(earlier or ()), line]
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    output = model.generate(torch.tensor([ids]), max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
