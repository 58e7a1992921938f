"""Contract of the name table: the official names, no two alike, every one reached from exactly one source name."""

import json
from collections import Counter

from model.args import ModelArgs
from model.checkpoint.names import bindings, layer_of, scale_shape, source_scale, target_scale
from model.hf_config import from_hf

DEEPSEEK_V3 = ModelArgs(
    vocab_size=129280, dim=7168, inter_dim=18432, moe_inter_dim=2048, n_layers=61, n_dense_layers=3, n_heads=128,
    n_routed_experts=256, n_shared_experts=1, n_activated_experts=8, n_expert_groups=8, n_limited_groups=4,
    score_func="sigmoid", norm_topk_prob=True, gate_bias=True, q_lora_rank=1536,
)  # fmt: skip


def test_the_table_is_injective():
    for args in (ModelArgs(), DEEPSEEK_V3):
        found = list(bindings(args, mtp_layers=1))
        assert max(Counter(binding.source for binding in found).values()) == 1
        assert max(Counter(binding.target for binding in found).values()) == 1


def test_the_tiny_checkpoint_is_covered_exactly(tiny):
    args = from_hf(json.loads((tiny / "config.json").read_text()))
    expected = set()
    for binding in bindings(args, mtp_layers=1):
        expected.add(binding.source)
        if binding.linear and "eh_proj" not in binding.source:
            expected.add(source_scale(binding.source))
    assert expected == set(json.loads((tiny / "model.safetensors.index.json").read_text())["weight_map"])


def test_deepseek_v3_has_its_tensors():
    """61 layers: 3 dense with 3 MLP matrices, 58 with a router, its bias, a shared MLP and 256 experts."""
    attention = 7 + 2  # q_a, q_a norm, q_b, kv_a, kv_a norm, kv_b, o; two norms of the layer
    moe_layer = attention + 2 + 3 + 256 * 3
    assert len(list(bindings(DEEPSEEK_V3))) == 3 + 3 * (attention + 3) + 58 * moe_layer
    assert len(list(bindings(DEEPSEEK_V3, mtp_layers=1))) == 3 + 3 * (attention + 3) + 59 * moe_layer + 6


def test_official_names_shapes_and_axes():
    table = {binding.target: (binding.source, binding.shape, binding.axis) for binding in bindings(DEEPSEEK_V3, 1)}
    layer, block = "model.layers.3.", "layers.3."
    assert table["embed.weight"] == ("model.embed_tokens.weight", (129280, 7168), 0)
    assert table["norm.weight"] == ("model.norm.weight", (7168,), None)
    assert table["head.weight"] == ("lm_head.weight", (129280, 7168), 0)
    expected = {
        "attn_norm.weight": ("input_layernorm.weight", (7168,), None),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (7168,), None),
        "attn.wq_a.weight": ("self_attn.q_a_proj.weight", (1536, 7168), None),
        "attn.q_norm.weight": ("self_attn.q_a_layernorm.weight", (1536,), None),
        "attn.wq_b.weight": ("self_attn.q_b_proj.weight", (24576, 1536), 0),
        "attn.wkv_a.weight": ("self_attn.kv_a_proj_with_mqa.weight", (576, 7168), None),
        "attn.kv_norm.weight": ("self_attn.kv_a_layernorm.weight", (512,), None),
        "attn.wkv_b.weight": ("self_attn.kv_b_proj.weight", (32768, 512), 0),
        "attn.wo.weight": ("self_attn.o_proj.weight", (7168, 16384), 1),
        "ffn.gate.weight": ("mlp.gate.weight", (256, 7168), None),
        "ffn.gate.bias": ("mlp.gate.e_score_correction_bias", (256,), None),
        "ffn.shared_experts.w1.weight": ("mlp.shared_experts.gate_proj.weight", (2048, 7168), 0),
        "ffn.shared_experts.w2.weight": ("mlp.shared_experts.down_proj.weight", (7168, 2048), 1),
        "ffn.shared_experts.w3.weight": ("mlp.shared_experts.up_proj.weight", (2048, 7168), 0),
        "ffn.experts.255.w1.weight": ("mlp.experts.255.gate_proj.weight", (2048, 7168), None),
        "ffn.experts.255.w2.weight": ("mlp.experts.255.down_proj.weight", (7168, 2048), None),
        "ffn.experts.255.w3.weight": ("mlp.experts.255.up_proj.weight", (2048, 7168), None),
    }
    for target, (source, shape, axis) in expected.items():
        assert table[block + target] == (layer + source, shape, axis)
    assert table["layers.0.ffn.w1.weight"] == ("model.layers.0.mlp.gate_proj.weight", (18432, 7168), 0)
    assert table["layers.0.ffn.w2.weight"] == ("model.layers.0.mlp.down_proj.weight", (7168, 18432), 1)
    assert table["layers.61.embed.weight"] == ("model.layers.61.embed_tokens.weight", (129280, 7168), 0)
    assert table["layers.61.eh_proj.weight"] == ("model.layers.61.eh_proj.weight", (7168, 14336), None)
    assert table["layers.61.shared_head.head.weight"][2] == 0
    full_rank = {binding.target: binding.source for binding in bindings(ModelArgs())}
    assert full_rank["layers.0.attn.wq.weight"] == "model.layers.0.self_attn.q_proj.weight"


def test_scales():
    assert source_scale("a.weight") == "a.weight_scale_inv"
    assert target_scale("a.weight") == "a.scale"
    assert scale_shape((576, 7168), (128, 128)) == (5, 56)
    assert scale_shape((128, 129), (128, 128)) == (1, 2)


def test_layer_of():
    assert layer_of("model.layers.61.eh_proj.weight") == 61
    assert layer_of("model.norm.weight") is None
