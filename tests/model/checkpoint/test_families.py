"""The released checkpoints at their real dimensions, from headers alone."""

import json
import subprocess
import sys
from math import prod

import pytest

from flows import cli
from model.checkpoint.describe import describe
from model.checkpoint.plan import plan_shards
from model.checkpoint.source import open_source
from model.errors import InputError
from tests.sparse_checkpoints import FAMILIES, size, tensors, write_sparse

LEGAL = {
    "V2-Lite": {"bf16": (1, 2, 4, 8, 16)},
    "V2": {"bf16": (1, 2, 4, 8, 16, 32)},
    "V3": {"fp8": (1, 2, 4, 8, 16), "bf16": (1, 2, 4, 8, 16, 32, 64, 128)},
    "V3.1": {"fp8": (1, 2, 4, 8, 16), "bf16": (1, 2, 4, 8, 16, 32, 64, 128)},
    "Kimi-K2": {"fp8": (1, 2, 4, 8, 16), "bf16": (1, 2, 4, 8, 16, 32, 64)},
    "Moonlight": {"bf16": (1, 2, 4, 8, 16)},
}
DROPPED = {
    "V3": {"mtp_layers"},
    "V3.1": {"mtp_layers"},
    "Kimi-K2": {"rotary_inv_freq"},
    "Moonlight": {"rotary_inv_freq"},
}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    root = tmp_path_factory.mktemp("released")
    return {name: write_sparse(family, root / name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def opened(released):
    """Sources without their MTP layers, each opened once: Kimi-K2's headers alone are 14 MB."""
    sources = {}

    def get(name):
        if name not in sources:
            sources[name] = open_source(released[name], "drop")
        return sources[name]

    return get


def replicated(name: str) -> bool:
    """Whether the official converter copies a tensor to every rank: it cuts neither it nor its layer's experts."""
    cut = ("embed_tokens", "lm_head", "q_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return not any(f"{part}." in name for part in cut)


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_partition_and_shapes_follow_the_rules(opened, name):
    family = FAMILIES[name]
    config = family.config
    source = opened(name)
    model = {
        tensor: (dtype, shape)
        for tensor, dtype, shape in tensors(family)
        if f".layers.{config['num_hidden_layers']}." not in tensor and "inv_freq" not in tensor
    }
    for weights, legal in LEGAL[name].items():
        mp = min(legal[-1], 16)
        plan = plan_shards(source, mp=mp, weights=weights)
        assert plan.legal_mp == legal
        kept = {n: v for n, v in model.items() if weights == "fp8" or not n.endswith("_scale_inv")}
        experts = config["n_routed_experts"]
        expert_tensors = sum(".experts." in n for n in kept)
        for rank, file in enumerate(plan.files):
            assert file.name == f"model{rank}-mp{mp}.safetensors"
            assert len(file.targets) == len(kept) - expert_tensors + expert_tensors // mp
            held = {int(t.name.split(".")[4]) for t in file.targets if ".experts." in t.name}
            assert held == set(range(rank * experts // mp, (rank + 1) * experts // mp))
        elements = sum(prod(target.shape) for file in plan.files for target in file.targets)
        replicas = (mp - 1) * sum(prod(shape) for n, (_, shape) in kept.items() if replicated(n))
        assert elements == sum(prod(shape) for _, shape in kept.values()) + replicas
        assert {rule.rule for rule in plan.dropped} == DROPPED.get(name, set())


def test_v3_shard_shapes_at_mp_16(opened):
    plan = plan_shards(opened("V3"), mp=16, weights="fp8")
    shapes = {target.name: (target.dtype, target.shape) for target in plan.files[5].targets}
    assert shapes["embed.weight"] == ("BF16", (8080, 7168))
    assert shapes["layers.60.attn.wq_b.weight"] == ("F8_E4M3", (1536, 1536))
    assert shapes["layers.60.attn.wq_b.scale"] == ("F32", (12, 12))
    assert shapes["layers.60.attn.wkv_a.weight"] == ("F8_E4M3", (576, 7168))
    assert shapes["layers.60.attn.wkv_a.scale"] == ("F32", (5, 56))
    assert shapes["layers.60.attn.wo.weight"] == ("F8_E4M3", (7168, 1024))
    assert shapes["layers.60.attn.wo.scale"] == ("F32", (56, 8))
    assert shapes["layers.60.ffn.experts.95.w2.weight"] == ("F8_E4M3", (7168, 2048))
    assert shapes["layers.60.ffn.gate.bias"] == ("F32", (256,))
    assert "layers.60.ffn.experts.96.w2.weight" not in shapes


def test_kept_mtp_layer_of_v3(released):
    plan = plan_shards(open_source(released["V3"], "keep"), mp=8, weights="fp8", mtp="keep")
    assert [file.name for file in plan.files[8:]] == [f"mtp{rank}-mp8.safetensors" for rank in range(8)]
    shapes = {target.name: target.shape for target in plan.files[8].targets}
    assert shapes["layers.61.eh_proj.weight"] == (7168, 14336)
    assert shapes["layers.61.embed.weight"] == (16160, 7168)
    assert plan.args.n_mtp_layers == 1
    assert not plan.dropped


def test_sizes_of_v3(opened):
    """Bytes without the MTP layer: what notes on the 671B checkpoint say, 673 GB in FP8 and 1,342 GB in BF16."""
    source = opened("V3")
    model = [t for t in tensors(FAMILIES["V3"]) if ".layers.61." not in t[0]]
    assert sum(size(dtype, shape) for _, dtype, shape in model) / 1e9 == pytest.approx(673, abs=2)
    assert plan_shards(source, mp=1, weights="bf16").data_size / 1e9 == pytest.approx(1342, abs=2)


def test_footprint_of_v3_at_mp_16(opened):
    summary = describe(plan_shards(opened("V3"), mp=16, weights="fp8"), gpu_memory=80 * 10**9)
    assert summary.footprint.cache_per_1000_tokens == 61 * (512 + 64) * 2 * 1000
    expected = max(file.size for file in summary.files)
    absorbed = 61 * 128 // 16 * 256 * 512  # one more byte for each weight of wkv_b, which is held in BF16
    assert summary.footprint.weights == expected + absorbed
    assert summary.footprint.fits
    small = describe(plan_shards(opened("V3"), mp=4, weights="fp8"), gpu_memory=80 * 10**9)
    assert not small.footprint.fits
    assert small.footprint.smallest_mp == 16


def test_the_command_plans_v3_in_both_forms(released):
    for weights in ("fp8", "bf16"):
        told = subprocess.run(
            [sys.executable, "-m", "flows.cli", "plan", released["V3"], "--mp", "16", "--weights", weights],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for fact in ("legal mp", "cache for 1,000 tokens", "disk", "GPU", "mtp_layers"):
            assert fact in told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v32"}, "is DeepSeek-V3.2, whose sparse-attention indexer"),
        ({"model_type": "deepseek_v4"}, "is DeepSeek-V4, another architecture"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors' is not implemented"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "(Qwen2ForCausalLM) is a Qwen2 model"),
        ({"model_type": "kimi_k25"}, "is Kimi-K2.5, a vision-language model"),
    ],
)
def test_relatives_are_recognised_and_refused(released, tmp_path, monkeypatch, capsys, change, message):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["V3"].config | change))
    with pytest.raises(InputError) as caught:
        open_source(tmp_path, "drop")
    assert message in str(caught.value)
    monkeypatch.setattr(sys, "argv", ["shardflow", "plan", str(tmp_path), "--mp", "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
