import json

import pytest
from safetensors.torch import save_file

from model.checkpoint.adopt import adopt
from model.checkpoint.convert import convert
from model.checkpoint.manifest import read_manifest
from model.checkpoint.verify import verify
from model.errors import InputError
from model.generate import main as generate
from tests import official
from tests.checkpoints import load_tensors

OFFICIAL_CONFIG = {
    "vocab_size": 1536, "dim": 256, "inter_dim": 1024, "moe_inter_dim": 128, "n_layers": 3, "n_dense_layers": 1,
    "n_heads": 8, "n_routed_experts": 16, "n_shared_experts": 4, "n_activated_experts": 4, "n_expert_groups": 4,
    "n_limited_groups": 2, "route_scale": 2.5, "score_func": "sigmoid", "q_lora_rank": 256, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "original_seq_len": 128, "rope_factor": 4,
    "mscale": 1.0,
}  # fmt: skip
"""The tiny checkpoint in the fields of the official config_16B.json."""


@pytest.fixture(params=["bf16", "fp8"])
def official_shards(request, tiny, tmp_path):
    """As the official converter leaves them: no manifest, no format in the header, tokenizer files beside them."""
    tensors = load_tensors(tiny)
    tensors = tensors if request.param == "fp8" else official.dequantised(tensors)
    out = tmp_path / "official"
    out.mkdir()
    for rank, shard in enumerate(official.shards(tensors, 2, n_experts=16, n_layers=3)):
        save_file(shard, out / f"model{rank}-mp2.safetensors")
    for path in tiny.glob("*token*"):
        (out / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL_CONFIG))
    return out, tmp_path / "config.json", request.param


def test_official_shards_get_a_manifest_and_verify(official_shards, tiny):
    out, config, weights = official_shards
    manifest = adopt(out, config)
    assert manifest == read_manifest(out)
    assert (manifest.mp, manifest.weights, manifest.source) == (2, weights, None)
    assert manifest.args.gate_bias
    assert manifest.args.yarn
    assert verify(out, tiny).source_tensors > 0
    with pytest.raises(InputError, match="exists already"):
        adopt(out, config)


def test_the_hub_s_config_does_as_well(official_shards, tiny):
    out, config, weights = official_shards
    from_hub = adopt(out, tiny / "config.json")
    (out / "manifest.json").unlink()
    assert adopt(out, config).args == from_hub.args.replace(max_seq_len=16384)  # which official configs leave out
    assert from_hub.weights == weights


def test_shards_that_do_not_fit_the_config_are_refused(official_shards):
    out, config, _ = official_shards
    config.write_text(json.dumps(OFFICIAL_CONFIG | {"n_layers": 4}))
    with pytest.raises(InputError, match=r"model0-mp2.safetensors: tensor 'layers.3.attn_norm.weight' is missing"):
        adopt(out, config)
    config.write_text(json.dumps(OFFICIAL_CONFIG | {"inter_dim": 2048}))
    with pytest.raises(InputError, match=r"'layers.0.ffn.w1.weight' has shape \[512, 256\], expected \[1024, 256\]"):
        adopt(out, config)
    config.write_text(json.dumps(OFFICIAL_CONFIG | {"n_experts": 4}))
    with pytest.raises(InputError, match="unknown field 'n_experts'"):
        adopt(out, config)
    config.write_text(json.dumps(OFFICIAL_CONFIG))
    (out / "model1-mp2.safetensors").unlink()
    with pytest.raises(InputError, match="model1-mp2.safetensors: is missing"):
        adopt(out, config)
    (out / "model0-mp2.safetensors").unlink()
    with pytest.raises(InputError, match="holds no model<rank>-mp<N>.safetensors files to adopt"):
        adopt(out, config)
    assert not (out / "manifest.json").exists()


def test_adopted_shards_answer_as_converted_ones_do(tiny, tmp_path, capsys):
    tensors = official.dequantised(load_tensors(tiny))
    adopted = tmp_path / "adopted"
    adopted.mkdir()
    save_file(official.shards(tensors, 1, n_experts=16, n_layers=3)[0], adopted / "model0-mp1.safetensors")
    for path in tiny.glob("*token*"):
        (adopted / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL_CONFIG))
    adopt(adopted, tmp_path / "config.json")
    convert(tiny, tmp_path / "converted", mp=1, weights="bf16")
    replies = []
    for checkpoint in (adopted, tmp_path / "converted"):
        asked = [str(checkpoint), "--prompt", "When shall we three meet again?", "--device", "cpu"]
        assert generate(asked) == 0
        replies.append(capsys.readouterr().out)
    assert replies[0] == replies[1] != "\n"
