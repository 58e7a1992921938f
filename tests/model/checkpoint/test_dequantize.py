import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from model.checkpoint.convert import convert
from model.checkpoint.dequantize import dequantize, read_dequantized
from model.checkpoint.verify import verify
from model.errors import InputError
from tests import official
from tests.checkpoints import copy_checkpoint, load_tensors, tensor_bytes, tree_bytes


@pytest.fixture(scope="module")
def bf16(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("dequantised") / "bf16"
    dequantize(tiny, out)
    return out


def test_every_tensor_is_exact_and_in_its_file(tiny, bf16):
    expected = official.dequantised(load_tensors(tiny))
    actual = load_tensors(bf16)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name
    for path in bf16.glob("*.safetensors"):
        assert set(tensor_bytes(path)) == {n for n in tensor_bytes(tiny / path.name) if not n.endswith("_scale_inv")}


def test_index_config_and_sidecars(tiny, bf16):
    index = json.loads((bf16 / "model.safetensors.index.json").read_text())
    tensors = load_tensors(bf16)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"] == {
        name: path.name for path in bf16.glob("*.safetensors") for name in tensor_bytes(path)
    }
    config = json.loads((bf16 / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["num_nextn_predict_layers"] == 1
    assert AutoConfig.from_pretrained(bf16).dtype == torch.bfloat16
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
        assert (bf16 / name).read_bytes() == (tiny / name).read_bytes()


def test_transformers_loads_it_as_it_stands(bf16):
    model, loading = AutoModelForCausalLM.from_pretrained(bf16, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    assert all(key.startswith("model.layers.3.") for key in loading["unexpected_keys"])
    ids = AutoTokenizer.from_pretrained(bf16)("When shall we three meet again?", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()


def test_shards_of_the_dequantised_directory_equal_the_fused_ones(tiny, bf16, tmp_path):
    convert(bf16, tmp_path / "staged", mp=2)
    convert(tiny, tmp_path / "fused", mp=2, weights="bf16")
    for rank in range(2):
        name = f"model{rank}-mp2.safetensors"
        assert tensor_bytes(tmp_path / "staged" / name) == tensor_bytes(tmp_path / "fused" / name)
    assert verify(tmp_path / "staged", tiny).source_tensors > 0


def test_repeats_and_refusals(tiny, bf16, tmp_path):
    before = tree_bytes(bf16)
    assert dequantize(tiny, bf16) == read_dequantized(bf16)
    assert tree_bytes(bf16) == before
    with pytest.raises(InputError, match="holds no FP8 weights: there is nothing to dequantise"):
        dequantize(bf16, tmp_path / "out")
    other = copy_checkpoint(tiny, tmp_path / "other")
    (other / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds the dequantised form of another source"):
        dequantize(other, bf16)
    assert not (tmp_path / "out").exists()
