"""Loading is strict both ways, and dequantises exactly where a shard is FP8 and the model is not."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint.manifest import read_manifest
from model.errors import InputError
from model.load import load_model
from model.topology import Topology
from tests.checkpoints import edit_file

CPU = torch.device("cpu")
SHARD = "model1-mp2.safetensors"


def load(directory, rank=1, mp=2, **how):
    return load_model(directory, read_manifest(directory), Topology(rank, mp), CPU, **how)


@pytest.fixture
def copied(shards, tmp_path):
    """``copied(case)``: an mp 2 checkpoint to break."""

    def copy(case: str):
        directory = tmp_path / case
        shutil.copytree(shards(case, 2), directory)
        return directory

    return copy


def problems_of(directory, changes, **how) -> tuple[str, ...]:
    edit_file(directory / SHARD, changes, index=False)
    with pytest.raises(InputError) as caught:
        load(directory, **how)
    return caught.value.problems


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("attention", ["naive", "absorbed"])
def test_state_names_are_the_artifact_names(shards, fp8, attention):
    """FP8 in the model wherever the shard is, but for wkv_b in absorbed form, which is multiplied as it is."""
    directory = shards("tiny-v3-fp8", 2)
    model = load(directory, fp8=fp8, attention=attention)
    stored = set(load_file(directory / SHARD))
    quantised = {name for name in stored if name.endswith(".scale")}
    kept = {name for name in quantised if attention == "naive" or ".wkv_b." not in name} if fp8 else set()
    assert set(model.state_dict()) == stored - quantised | kept


def test_fp8_shards_are_dequantised_to_what_the_bf16_shards_hold(shards):
    """Bit for bit, whatever the compute dtype."""
    from_fp8 = load(shards("tiny-v3-fp8", 2), fp8=False).state_dict()
    from_bf16 = load(shards("tiny-v3", 2)).state_dict()
    assert from_fp8.keys() == from_bf16.keys()
    for name, tensor in from_bf16.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(from_fp8[name], tensor), name


def test_norms_and_router_stay_float32_in_bf16_compute(shards):
    state = load(shards("tiny-v3", 2), dtype=torch.bfloat16).state_dict()
    float32 = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert float32 == {name for name in state if "norm." in name or ".gate." in name}
    stored = load_file(shards("tiny-v3", 2) / SHARD)
    assert all(torch.equal(tensor, stored[name].to(tensor.dtype)) for name, tensor in state.items())


@pytest.mark.parametrize("case", ["tiny-v3", "tiny-v3-fp8"])
def test_cpu_computes_in_float32_without_fp8(shards, case):
    model = load(shards(case, 2))
    assert (model.execution.dtype, model.execution.fp8) == (torch.float32, False)
    assert model.layers[1].attn.wo.weight.dtype == torch.float32


def test_the_fp8_product_can_be_asked_for(shards):
    model = load(shards("tiny-v3-fp8", 2), fp8=True)
    assert model.layers[1].attn.wo.weight.dtype == torch.float8_e4m3fn
    assert model.layers[1].attn.wkv_b.weight.dtype == torch.float32
    assert model.head.weight.dtype == torch.float32
    with pytest.raises(InputError, match="holds BF16 weights"):
        load(shards("tiny-v3", 2), fp8=True)


def test_missing_left_over_and_misshapen_tensors_are_named(copied):
    directory = copied("tiny-v3")
    problems = problems_of(
        directory,
        {
            "norm.weight": None,
            "layers.1.ffn.experts.8.w1.weight": None,
            "layers.1.ffn.experts.7.w1.weight": torch.zeros(128, 256, dtype=torch.bfloat16),
            "head.weight": torch.zeros(768, 255, dtype=torch.bfloat16),
            "embed.weight": torch.zeros(768, 256, dtype=torch.int8),
        },
    )
    shard = directory / SHARD
    assert set(problems) == {
        f"{shard}: tensor 'norm.weight' [256] is missing; convert again for this config",
        f"{shard}: tensor 'layers.1.ffn.experts.8.w1.weight' [128, 256] is missing; convert again for this config",
        f"{shard}: tensor 'layers.1.ffn.experts.7.w1.weight' is not part of this model; convert again for this config",
        f"{shard}: tensor 'head.weight' has shape [768, 255], expected [768, 256]; convert again for this config",
        f"{shard}: tensor 'embed.weight' has dtype I8, expected a float or F8_E4M3; convert again",
    }


def test_fp8_weight_without_its_scale_is_named(copied):
    problems = problems_of(copied("tiny-v3-fp8"), {"layers.0.attn.wo.scale": None}, fp8=False)
    assert len(problems) == 1
    assert "tensor 'layers.0.attn.wo.scale' [2, 2] is missing" in problems[0]


def test_scale_of_another_grid_is_named(copied):
    scale = {"layers.0.attn.wkv_a.scale": torch.ones(1, 2)}
    problems = problems_of(copied("tiny-v3-fp8"), scale, fp8=False)
    assert len(problems) == 1
    assert "tensor 'layers.0.attn.wkv_a.scale' has shape [1, 2], expected [2, 2]" in problems[0]


def test_a_weight_that_should_be_fp8_and_is_not_is_named(copied):
    weight = {"layers.0.attn.wo.weight": torch.zeros(256, 256)}
    problems = problems_of(copied("tiny-v3-fp8"), weight, fp8=True)
    assert len(problems) == 1
    assert "tensor 'layers.0.attn.wo.weight' has dtype F32, expected F8_E4M3" in problems[0]


def test_missing_and_truncated_shards_are_named(copied):
    directory = copied("tiny-v3")
    shard = directory / SHARD
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match="model1-mp2.safetensors: is truncated"):
        load(directory)
    shard.unlink()
    with pytest.raises(InputError, match="model1-mp2.safetensors: cannot be read: No such file"):
        load(directory)
