"""Which architectures the project converts, and what it says of those it recognises and refuses."""

from dataclasses import dataclass
from typing import Any

from model.errors import InputError


@dataclass(frozen=True)
class Family:
    """What an absent field of ``config.json`` means for one ``model_type``, and which must not be absent.

    The remote code, transformers and the official code each take another value where a ``required`` field is absent,
    so that a guess might give another model without a word.
    """

    score_func: str
    topk_method: str
    required: tuple[str, ...] = ()


SIGMOID_ROUTING = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(score_func="softmax", topk_method="greedy"),
    "deepseek_v3": Family(score_func="sigmoid", topk_method="noaux_tc", required=SIGMOID_ROUTING),
    "kimi_k2": Family(score_func="sigmoid", topk_method="noaux_tc", required=SIGMOID_ROUTING),
}

REFUSED: dict[str, str] = {
    "deepseek_v32": "DeepSeek-V3.2, whose sparse-attention indexer this project does not convert yet",
    "deepseek_v4": "DeepSeek-V4, another architecture",
    "deepseek": "DeepSeek-MoE (the first generation), without latent attention",
    "llama": "a Llama model (the distilled R1 Llamas are such): load it with transformers or vLLM",
    "qwen2": "a Qwen2 model (the distilled R1 Qwens are such): load it with transformers or vLLM",
    "qwen2_moe": "a Qwen2-MoE model: load it with transformers or vLLM",
    "qwen3": "a Qwen3 model: load it with transformers or vLLM",
    "qwen3_moe": "a Qwen3-MoE model: load it with transformers or vLLM",
    "mistral": "a Mistral model: load it with transformers or vLLM",
    "mixtral": "a Mixtral model: load it with transformers or vLLM",
    "glm4_moe": "a GLM-4 MoE model: load it with transformers or vLLM",
    "gpt_oss": "a gpt-oss model: load it with transformers or vLLM",
    "kimi_k25": "Kimi-K2.5, a vision-language model around the language model",
}


def recognise(config: dict[str, Any]) -> Family:
    """The family of a Hugging Face ``config.json``.

    Raises ``InputError`` naming what the model is where the project does not convert it.
    """
    model_type = config.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    architectures = ", ".join(config.get("architectures") or ["no architecture named"])
    what = REFUSED.get(str(model_type), "not a model of the DeepSeek-V3 family")
    raise InputError(
        f"config.json: model_type {model_type!r} ({architectures}) is {what}; "
        f"this project converts {', '.join(FAMILIES)}"
    )
