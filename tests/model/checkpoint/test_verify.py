import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.convert import convert
from model.checkpoint.digest import sha256_of
from model.checkpoint.verify import VerificationError, verify
from model.errors import InputError
from tests.checkpoints import copy_checkpoint, edit_json, edit_tensor, load_tensors


@pytest.fixture(scope="module")
def shards(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    for weights in ("bf16", "fp8"):
        convert(tiny, root / weights, mp=2, weights=weights, mtp="keep" if weights == "fp8" else "drop")
    return root


def tamper(checkpoint, name, change, *, honest=True):
    """Change one shard; ``honest`` also corrects its size and digest in the manifest, so that only data tells."""
    path = checkpoint / name
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    if honest:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        record = next(file for file in manifest["files"] if file["name"] == name)
        record |= {"size": path.stat().st_size, "sha256": sha256_of(path), "tensors": len(tensors)}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_counts_what_it_proved(tiny, shards):
    index = json.loads((tiny / "model.safetensors.index.json").read_text())["weight_map"]
    fp8 = verify(shards / "fp8", tiny)
    assert fp8.source_tensors == len(index)
    model = [name for name in index if ".layers.3." not in name and not name.endswith("_scale_inv")]
    bf16 = verify(shards / "bf16", tiny)
    assert bf16.source_tensors == len(model)
    without_source = verify(shards / "bf16")
    assert (without_source.files, without_source.tensors) == (bf16.files, bf16.tensors)
    assert without_source.source_tensors == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "layers.1.ffn.experts.9.w2.weight",
            "model1-mp2.safetensors: tensor 'layers.1.ffn.experts.9.w2.weight' differs",
        ),
        ("layers.0.attn.wo.weight", "model0…1-mp2.safetensors: tensor 'layers.0.attn.wo.weight' differs"),
        ("layers.2.ffn.gate.bias", "model1-mp2.safetensors: tensor 'layers.2.ffn.gate.bias' differs"),
    ],
)
def test_one_flipped_bit_is_found_in_every_kind_of_tensor(tiny, shards, tmp_path, name, message):
    checkpoint = copy_checkpoint(shards / "bf16", tmp_path / "c")

    def flip(tensors):
        tensors[name].view(-1).view(torch.uint8)[2] ^= 1

    tamper(checkpoint, "model1-mp2.safetensors", flip)
    with pytest.raises(VerificationError) as caught:
        verify(checkpoint, tiny)
    assert message in str(caught.value)
    assert " in 1 elements, first at [" in str(caught.value)
    assert len(caught.value.problems) == 1


def test_swapped_experts_are_found(tiny, shards, tmp_path):
    checkpoint = copy_checkpoint(shards / "fp8", tmp_path / "c")

    def swap(tensors):
        one, two = "layers.1.ffn.experts.8.w1.weight", "layers.1.ffn.experts.9.w1.weight"
        tensors[one], tensors[two] = tensors[two], tensors[one]

    tamper(checkpoint, "model1-mp2.safetensors", swap)
    with pytest.raises(VerificationError) as caught:
        verify(checkpoint, tiny)
    assert {problem.split("'")[1] for problem in caught.value.problems} == {
        "layers.1.ffn.experts.8.w1.weight",
        "layers.1.ffn.experts.9.w1.weight",
    }


def test_a_changed_scale_is_found_in_fp8_shards(tiny, shards, tmp_path):
    checkpoint = copy_checkpoint(shards / "fp8", tmp_path / "c")

    def double(tensors):
        tensors["layers.0.attn.wkv_a.scale"][1, 1] *= 2

    tamper(checkpoint, "model0-mp2.safetensors", double)
    with pytest.raises(
        VerificationError, match=r"'layers.0.attn.wkv_a.scale' differs from source .* first at \[1, 1\]"
    ):
        verify(checkpoint, tiny)


def test_without_a_source_digests_names_and_shapes_still_tell(shards, tmp_path):
    changed = copy_checkpoint(shards / "bf16", tmp_path / "changed")
    with (changed / "model0-mp2.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    with pytest.raises(VerificationError, match="model0-mp2.safetensors: expected sha256 "):
        verify(changed)
    lacking = copy_checkpoint(shards / "bf16", tmp_path / "lacking")
    tamper(lacking, "model1-mp2.safetensors", lambda tensors: tensors.pop("layers.2.attn.wo.weight"))
    with pytest.raises(VerificationError, match="model1-mp2.safetensors: tensor 'layers.2.attn.wo.weight' is missing"):
        verify(lacking)
    foreign = copy_checkpoint(shards / "bf16", tmp_path / "foreign")
    tamper(foreign, "model1-mp2.safetensors", lambda tensors: tensors.update(extra=torch.ones(1)))
    with pytest.raises(VerificationError, match="tensor 'extra' belongs to no rule of this model"):
        verify(foreign)
    short = copy_checkpoint(shards / "bf16", tmp_path / "short")
    (short / "tokenizer.json").unlink()
    with pytest.raises(VerificationError, match="tokenizer.json: is listed in the manifest but missing"):
        verify(short)


def test_what_cannot_be_verified_is_refused(tiny, shards, tmp_path):
    with pytest.raises(InputError, match="holds no manifest.json, so it is no checkpoint"):
        verify(tmp_path)
    other = copy_checkpoint(tiny, tmp_path / "other")
    edit_json(other / "config.json", routed_scaling_factor=1.5)
    with pytest.raises(
        InputError, match="is not the source of this checkpoint: route_scale = 1.5, the manifest says 2.5"
    ):
        verify(shards / "bf16", other)
    damaged = tmp_path / "damaged"
    shutil.copytree(shards / "bf16", damaged)
    (damaged / "manifest.json").write_text('{"schema": 1}')
    with pytest.raises(InputError, match="manifest.json: is damaged"):
        verify(damaged)
    edit_json(damaged / "manifest.json", schema=2)
    with pytest.raises(InputError, match="schema 2 is unknown to this version"):
        verify(damaged)


def test_nan_codes_of_the_source_are_counted_and_located(tiny, tmp_path):
    source = copy_checkpoint(tiny, tmp_path / "source")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    codes = load_tensors(tiny)[name].view(torch.uint8).clone()
    codes[5, 7], codes[100, 9] = 0x7F, 0xFF
    edit_tensor(source, name, codes.view(torch.float8_e4m3fn))
    for weights in ("fp8", "bf16"):
        convert(source, tmp_path / weights, mp=1, weights=weights)
        with pytest.raises(VerificationError) as caught:
            verify(tmp_path / weights, source)
        assert len(caught.value.problems) == 1
        assert f"source tensor {name!r} holds 2 NaN, first at [5, 7]" in str(caught.value)
