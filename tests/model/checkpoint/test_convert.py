import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from model.args import ModelArgs
from model.checkpoint import build, jobs
from model.checkpoint.build import Resources, work_directory
from model.checkpoint.convert import convert
from model.checkpoint.dequantize import dequantize
from model.checkpoint.manifest import read_manifest
from model.checkpoint.verify import verify
from model.errors import InputError, RunError
from model.load import load_model
from model.topology import Topology
from tests import official
from tests.checkpoints import copy_checkpoint, edit_file, edit_json, edit_tensor, file_of, load_tensors, tree_bytes
from tests.opened_files import counted_open_files

MTP_TENSORS = 2 * (5 + 3 + 3 * 16) + 12
"""5 attention, 3 shared and 48 expert matrices, each with its scales; 4 norms, router, bias and the 6 of MTP."""


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("weights", "mp"), [("bf16", 1), ("bf16", 2), ("bf16", 8), ("fp8", 1), ("fp8", 2), ("fp8", 4)])
def test_tensors_are_exactly_the_official_converter_s(tiny, tmp_path, weights, mp):
    convert(tiny, tmp_path / "out", mp=mp, weights=weights)
    source = load_tensors(tiny)
    expected = official.shards(
        source if weights == "fp8" else official.dequantised(source), mp, n_experts=16, n_layers=3
    )
    for rank in range(mp):
        path = tmp_path / "out" / f"model{rank}-mp{mp}.safetensors"
        assert as_bytes(load_file(path)) == as_bytes(expected[rank])
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert not list((tmp_path / "out").glob("mtp*"))


def test_kept_mtp_layer_has_its_own_files(tiny, tmp_path):
    manifest = convert(tiny, tmp_path / "out", mp=2, weights="bf16", mtp="keep")
    source = official.dequantised(load_tensors(tiny))
    for rank in range(2):
        kept = load_file(tmp_path / "out" / f"mtp{rank}-mp2.safetensors")
        assert all(name.startswith("layers.3.") for name in kept)
        assert torch.equal(kept["layers.3.embed.weight"], source["model.layers.3.embed_tokens.weight"].chunk(2)[rank])
        assert torch.equal(kept["layers.3.eh_proj.weight"], source["model.layers.3.eh_proj.weight"])
        head = source["model.layers.3.shared_head.head.weight"].chunk(2)[rank]
        assert torch.equal(kept["layers.3.shared_head.head.weight"], head)
        assert ("layers.3.ffn.experts.8.w1.weight" in kept) == (rank == 1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert (manifest.mtp, manifest.dropped) == ("keep", ())


def test_written_config_and_manifest_tell_what_was_done(tiny, tmp_path):
    manifest = convert(tiny, tmp_path / "out", mp=2, weights="bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["num_nextn_predict_layers"] == 0
    assert manifest == read_manifest(tmp_path / "out")
    assert (manifest.mp, manifest.weights, manifest.mtp, manifest.args.dtype) == (2, "bf16", "drop", "bf16")
    assert [(rule.rule, rule.tensors) for rule in manifest.dropped] == [("mtp_layers", MTP_TENSORS)]
    on_disk = {path.name for path in (tmp_path / "out").iterdir()} - {"manifest.json"}
    assert {file.name for file in manifest.files} == on_disk
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"} <= on_disk
    assert "model_args.json" not in on_disk  # a router bias where dim is 256: the official code has none
    assert any("router has a bias exactly where dim is 7168" in note for note in manifest.notes)
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(tmp_path) not in text


def test_fp8_shards_keep_the_quantization_config(tiny, tmp_path):
    convert(tiny, tmp_path / "out", mp=2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == json.loads((tiny / "config.json").read_text())["quantization_config"]
    assert read_manifest(tmp_path / "out").args.dtype == "fp8"


def test_same_input_gives_the_same_bytes(tiny, tmp_path):
    convert(tiny, tmp_path / "a", mp=2, resources=Resources(workers=1))
    convert(tiny, tmp_path / "b", mp=2, resources=Resources(workers=2, max_memory=1 << 16))
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")


def test_illegal_mp_names_the_legal_ones_and_leaves_nothing(tiny, tmp_path):
    with pytest.raises(InputError, match=r"mp = 8 is not legal for fp8 shards of this checkpoint; legal are 1, 2, 4$"):
        convert(tiny, tmp_path / "out", mp=8, weights="fp8")
    with pytest.raises(InputError, match=r"mp = 3 is not legal for bf16 shards .* legal are 1, 2, 4, 8$"):
        convert(tiny, tmp_path / "out", mp=3, weights="bf16")
    assert list(tmp_path.iterdir()) == []


def test_never_more_than_two_source_files_open_per_worker(tiny, tmp_path, monkeypatch):
    with counted_open_files(monkeypatch, tiny) as files:
        convert(tiny, tmp_path / "out", mp=4, weights="bf16", resources=Resources(workers=1))
    assert files.most == 2
    assert not files.now


def fail_in(monkeypatch, name: str):
    """Make writing one file fail half-way, as a full disk would."""
    really = jobs.write_bands

    def failing(plan, *arguments):
        if plan.name == name:
            raise RunError("the disk is on fire")
        really(plan, *arguments)

    monkeypatch.setattr(jobs, "write_bands", failing)


def test_a_broken_run_leaves_nothing_and_resumes(tiny, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert(tiny, tmp_path / "whole", mp=2)
    with monkeypatch.context() as patch:
        fail_in(patch, "model1-mp2.safetensors")
        with pytest.raises(RunError, match="on fire"):
            convert(tiny, out, mp=2, resources=Resources(workers=1))
    assert not out.exists()
    first = tmp_path / "out.partial" / "files" / "model0-mp2.safetensors"
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    before = first.stat().st_mtime_ns, first.stat().st_ino
    convert(tiny, out, mp=2)
    finished = out / first.name
    assert (finished.stat().st_mtime_ns, finished.stat().st_ino) == before
    assert tree_bytes(out) == tree_bytes(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_resume_with_other_options_is_refused(tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fail_in(patch, "model1-mp2.safetensors")
        with pytest.raises(RunError):
            convert(tiny, tmp_path / "out", mp=2, resources=Resources(workers=1))
    before = tree_bytes(tmp_path)
    for options in ({"mp": 4}, {"mp": 2, "weights": "bf16"}, {"mp": 2, "mtp": "keep"}):
        with pytest.raises(InputError, match=r"out\.partial: holds unfinished work that differs in (mp|weights|mtp)"):
            convert(tiny, tmp_path / "out", **options)
    assert tree_bytes(tmp_path) == before


def test_finished_output_is_left_as_it_is(tiny, tmp_path):
    first = convert(tiny, tmp_path / "out", mp=2)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert convert(tiny, tmp_path / "out", mp=2) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times
    with pytest.raises(InputError, match="holds a checkpoint that differs in mp, weights, args"):
        convert(tiny, tmp_path / "out", mp=1, weights="bf16")
    (tmp_path / "out" / "model1-mp2.safetensors").unlink()
    with pytest.raises(InputError, match=r"model1-mp2.safetensors: expected \d+ bytes, found None"):
        convert(tiny, tmp_path / "out", mp=2)


def test_other_non_empty_output_is_refused(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty"):
        convert(tiny, tmp_path / "out", mp=2)
    assert tree_bytes(tmp_path) == {"out/precious.txt": b"mine"}


def test_an_output_that_no_rename_can_replace_is_refused_first(tiny, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(InputError, match="is a symbolic link; name the directory itself"):
            convert(tiny, tmp_path / name, mp=1)
    with pytest.raises(InputError, match="is a mount point"):
        convert(tiny, Path("/proc"), mp=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "real"]


def test_what_a_killed_run_left_half_written_is_not_published(tiny, tmp_path, monkeypatch):
    convert(tiny, tmp_path / "whole", mp=2)
    with monkeypatch.context() as patch:
        fail_in(patch, "model1-mp2.safetensors")
        with pytest.raises(RunError, match="on fire"):
            convert(tiny, tmp_path / "out", mp=2, resources=Resources(workers=1))
    files = tmp_path / "out.partial" / "files"
    (files / "tokenizer.json.4711.tmp").write_text("half")
    (files / "model1-mp2.safetensors.tmp").write_text("half")
    (files / "model1-mp2.safetensors").write_text("whole, but not noted yet")
    (tmp_path / "out.partial" / "done" / "model1-mp2.safetensors.json").write_text("")
    convert(tiny, tmp_path / "out", mp=2)
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "whole")


def test_too_small_a_disk_is_told_before_anything_is_hashed_or_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(build.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    monkeypatch.setattr("model.checkpoint.convert.source_record", None)  # a call would fail
    with pytest.raises(RunError, match=r"bytes are needed, 1,000 are free; free some space"):
        convert(tiny, tmp_path / "out", mp=1)
    assert list(tmp_path.iterdir()) == []


def test_a_sidecar_that_changes_during_the_run_is_noticed(tiny, tmp_path, monkeypatch):
    source = copy_checkpoint(tiny, tmp_path / "source")
    really = jobs.write_bands

    def editing(plan, *arguments):
        really(plan, *arguments)
        (source / "tokenizer_config.json").write_text("{}")

    monkeypatch.setattr(jobs, "write_bands", editing)
    with pytest.raises(RunError, match=r"tokenizer_config.json: changed during the run"):
        convert(source, tmp_path / "out", mp=1)
    assert not (tmp_path / "out").exists()


def test_a_source_kept_by_hand_is_not_passed_off_as_its_origin(tiny, tmp_path):
    bf16 = tmp_path / "bf16"
    dequantize(tiny, bf16)
    edit_json(bf16 / "dequantized.json", source={"repo": "org/tiny", "commit": "c" * 40, "files": []})
    assert convert(bf16, tmp_path / "as-written", mp=1).source.repo == "org/tiny"
    edit_tensor(bf16, "model.norm.weight", torch.ones(256, dtype=torch.bfloat16))
    assert convert(bf16, tmp_path / "edited", mp=1).source.repo is None


def test_an_empty_output_directory_is_fine(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    convert(tiny, tmp_path / "out", mp=1)
    assert read_manifest(tmp_path / "out").mp == 1


def test_a_second_run_at_once_is_refused(tiny, tmp_path):
    with work_directory(tmp_path / "out", {"stage": "another"}):
        with pytest.raises(InputError, match="another run is writing it at this moment"):
            convert(tiny, tmp_path / "out", mp=1)
        (tmp_path / "out.partial" / "files" / "x").write_text("whole")
    assert tree_bytes(tmp_path) == {"out/x": b"whole"}


def test_a_source_that_changes_during_the_run_is_noticed(tiny, tmp_path, monkeypatch):
    source = copy_checkpoint(tiny, tmp_path / "source")
    really = jobs.write_bands

    def touching(plan, *arguments):
        really(plan, *arguments)
        os.utime(source / "model-00007-of-000007.safetensors", ns=(1, 1))

    monkeypatch.setattr(jobs, "write_bands", touching)
    with pytest.raises(RunError, match=r"model-00007-of-000007.safetensors: changed during the run"):
        convert(source, tmp_path / "out", mp=1)
    assert not (tmp_path / "out").exists()


def test_a_stored_inv_freq_is_dropped_by_its_rule(tiny, tmp_path):
    source = copy_checkpoint(tiny, tmp_path / "source")
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_file(source / "model-00003-of-000007.safetensors", {name: torch.ones(32)})
    manifest = convert(source, tmp_path / "out", mp=1)
    assert [(rule.rule, rule.tensors) for rule in manifest.dropped] == [
        ("rotary_inv_freq", 1),
        ("mtp_layers", MTP_TENSORS),
    ]


def test_an_official_loader_gets_its_arguments(tmp_path):
    """V2-Lite's fields are the defaults of the official ModelArgs."""
    official_fields, notes = ModelArgs().to_official()
    assert notes == []
    assert ModelArgs.from_official(official_fields) == ModelArgs()


def rewrite_header(path, change):
    """Change the parsed header of a file, its data untouched."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def shifted(header):
    first = next(name for name in header if name != "__metadata__")
    header[first]["data_offsets"] = [offset + 8 for offset in header[first]["data_offsets"]]


def duplicate_tensor(source):
    tensor = load_tensors(source)["model.norm.weight"]
    edit_file(source / "model-00001-of-000007.safetensors", {"model.norm.weight": tensor}, index=False)


def remove_layer(source):
    for name in list(load_tensors(source)):
        if name.startswith("model.layers.2."):
            edit_tensor(source, name, None)
    named = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"].values()
    for path in source.glob("*.safetensors"):
        if path.name not in named:
            path.unlink()


def as_e8m0(tensor):
    return (tensor.log2().round() + 127).to(torch.uint8)


O_PROJ_SCALE = "model.layers.1.self_attn.o_proj.weight_scale_inv"
SECOND_FILE = "model-00002-of-000007.safetensors"

BAD_SOURCES = {
    "LFS pointer": (
        lambda source: (source / SECOND_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        f"{SECOND_FILE}: is a Git LFS pointer, not the file itself",
    ),
    "header beyond the file": (
        lambda source: (source / SECOND_FILE).write_bytes((1 << 33).to_bytes(8, "little") + b"{}"),
        f"{SECOND_FILE}: states a header of 8589934592 bytes in a file of 10",
    ),
    "overlapping offsets": (
        lambda source: rewrite_header(source / SECOND_FILE, shifted),
        f"{SECOND_FILE}: tensor ",
    ),
    "index that is no JSON": (
        lambda source: (source / "model.safetensors.index.json").write_text("{nonsense"),
        "model.safetensors.index.json: is not valid JSON",
    ),
    "tensor in two files": (
        duplicate_tensor,
        "tensor 'model.norm.weight' is also in model-00001-of-000007.safetensors",
    ),
    "index naming a missing tensor": (
        lambda source: edit_json(
            source / "model.safetensors.index.json",
            weight_map=json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
            | {"model.extra.weight": SECOND_FILE},
        ),
        f"{SECOND_FILE}: the index places tensor 'model.extra.weight' here, but no file holds it",
    ),
    "absolute path": (
        lambda source: edit_json(source / "model.safetensors.index.json", weight_map={"a": "/etc/passwd"}),
        "file name '/etc/passwd' is not a plain name inside the checkpoint's directory",
    ),
    "link out of the directory": (
        lambda source: (
            (source / SECOND_FILE).rename(source.parent / "elsewhere"),
            (source / SECOND_FILE).symlink_to(source.parent / "elsewhere"),
        ),
        f"file '{SECOND_FILE}' is a symbolic link to ",
    ),
    "tokenizer directory": (
        lambda source: (source / "tokenizer").mkdir(),
        "'tokenizer' is a directory where a tokenizer's file is expected",
    ),
    "transposed scale grid": (
        lambda source: edit_tensor(source, O_PROJ_SCALE, torch.ones(4, 2)),
        f"scale '{O_PROJ_SCALE}' has shape [4, 2], expected [2, 4]",
    ),
    "oversized scale grid": (
        lambda source: edit_tensor(source, O_PROJ_SCALE, torch.ones(3, 4)),
        f"scale '{O_PROJ_SCALE}' has shape [3, 4], expected [2, 4]",
    ),
    "uint8 weights": (
        lambda source: edit_tensor(
            source, "model.layers.1.self_attn.o_proj.weight", torch.zeros(256, 512, dtype=torch.uint8)
        ),
        "tensor 'model.layers.1.self_attn.o_proj.weight' is U8; readable are",
    ),
    "byte scales without ue8m0": (
        lambda source: edit_tensor(source, O_PROJ_SCALE, torch.full((2, 4), 127, dtype=torch.uint8)),
        f"scale '{O_PROJ_SCALE}' is U8, which only quantization_config.scale_fmt 'ue8m0' explains",
    ),
    "E8M0 byte 255": (
        lambda source: edit_tensor(
            source,
            O_PROJ_SCALE,
            torch.tensor([[127] * 4, [127, 127, 255, 127]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        ),
        f"scale '{O_PROJ_SCALE}' is not finite in 1 blocks, first in block [1, 2]: byte 255 (NaN)",
    ),
    "infinite scale": (
        lambda source: edit_tensor(source, O_PROJ_SCALE, torch.full((2, 4), torch.inf)),
        f"scale '{O_PROJ_SCALE}' is not finite in 8 blocks, first in block [0, 0]: inf",
    ),
    "missing layer": (remove_layer, "layer 2: "),
    "missing scale": (
        lambda source: edit_tensor(source, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", None),
        "tensor 'model.layers.1.mlp.experts.3.up_proj.weight' is F8_E4M3 but its scale",
    ),
    "truncated file": (
        lambda source: os.truncate(source / "model-00004-of-000007.safetensors", 1_000_000),
        "model-00004-of-000007.safetensors: is truncated: 1000000 bytes",
    ),
    "foreign architecture": (
        lambda source: edit_json(source / "config.json", model_type="llama", architectures=["LlamaForCausalLM"]),
        "config.json: model_type 'llama' (LlamaForCausalLM) is a Llama model",
    ),
    "missing file": (
        lambda source: (source / "model-00002-of-000007.safetensors").unlink(),
        "model-00002-of-000007.safetensors: is named by model.safetensors.index.json but does not exist",
    ),
    "stray file": (
        lambda source: shutil.copy(source / "model-00002-of-000007.safetensors", source / "other.safetensors"),
        "other.safetensors: is not named by the index",
    ),
    "layer taken for an MTP layer": (
        lambda source: edit_json(source / "config.json", num_hidden_layers=2),
        "num_hidden_layers = 2 and num_nextn_predict_layers = 1 call for layers up to 2, the files hold layers 2, 3",
    ),
    "MTP layer that the config denies": (
        lambda source: edit_json(source / "config.json", num_nextn_predict_layers=0),
        "num_nextn_predict_layers = 0 call for layers up to 2, the files hold layers 3",
    ),
    "FP8 without quantization_config": (
        lambda source: edit_json(source / "config.json", quantization_config=...),
        "config.json: holds no quantization_config, so the blocks of the F8_E4M3 weights are unknown",
    ),
    "no index": (
        lambda source: (source / "model.safetensors.index.json").unlink(),
        "holds neither model.safetensors.index.json nor model.safetensors; fetch the index again",
    ),
    "surrogate in the config": (
        lambda source: (source / "config.json").write_text('{"model_type": "\\ud800"}'),
        "config.json: is not valid JSON in UTF-8",
    ),
    "missing expert": (
        lambda source: edit_file(
            file_of(source, "model.layers.2.mlp.experts.15.up_proj.weight"),
            {f"model.layers.2.mlp.experts.15.up_proj.weight{end}": None for end in ("", "_scale_inv")},
        ),
        "tensor 'model.layers.2.mlp.experts.15.up_proj.weight' is missing",
    ),
    "expert too many": (
        lambda source: edit_file(
            source / "model-00003-of-000007.safetensors",
            {"model.layers.1.mlp.experts.16.up_proj.weight": torch.zeros(128, 256, dtype=torch.bfloat16)},
        ),
        "tensor 'model.layers.1.mlp.experts.16.up_proj.weight': expert 16 lies past n_routed_experts = 16",
    ),
    "wrong shape": (
        lambda source: edit_tensor(source, "model.embed_tokens.weight", torch.zeros(1500, 256, dtype=torch.bfloat16)),
        "tensor 'model.embed_tokens.weight' has shape [1500, 256], the config calls for [1536, 256]",
    ),
    "packed weights": (
        lambda source: edit_tensor(
            source, "model.layers.1.self_attn.o_proj.weight", torch.zeros(256, 512, dtype=torch.int8)
        ),
        "tensor 'model.layers.1.self_attn.o_proj.weight' is I8; readable are F8_E4M3, BF16, F16, F32",
    ),
    "floor-shaped scale grid": (
        lambda source: edit_tensor(
            source, "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv", torch.ones(1, 2)
        ),
        "scale 'model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv' has shape [1, 2], expected [2, 2]",
    ),
    "path trick": (
        lambda source: edit_json(source / "model.safetensors.index.json", weight_map={"a": "../model.safetensors"}),
        "file name '../model.safetensors' is not a plain name inside the checkpoint's directory",
    ),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_bad_source_is_refused_by_name_before_anything_is_written(tiny, tmp_path, case):
    damage, message = BAD_SOURCES[case]
    source = copy_checkpoint(tiny, tmp_path / "source")
    damage(source)
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "out", mp=2)
    assert message in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} - {"elsewhere"} == {"source"}


@pytest.mark.parametrize("kind", ["BF16", "E8M0", "U8"])
def test_scales_of_every_kind_are_read_as_the_numbers_they_stand_for(tiny, tmp_path, kind):
    source = copy_checkpoint(tiny, tmp_path / "source")
    scales = {name: tensor for name, tensor in load_tensors(tiny).items() if name.endswith("_scale_inv")}
    stored, values = {}, {}
    for name, tensor in scales.items():
        if kind == "BF16":
            stored[name] = tensor.bfloat16()
            values[name] = stored[name].float()
        else:
            codes = as_e8m0(tensor)
            stored[name] = codes if kind == "U8" else codes.view(torch.float8_e8m0fnu)
            values[name] = torch.exp2(codes.float() - 127)
    for path in source.glob("*.safetensors"):
        edit_file(path, {name: stored[name] for name in load_file(path) if name in stored})
    if kind == "U8":
        quantization = json.loads((source / "config.json").read_text())["quantization_config"]
        edit_json(source / "config.json", quantization_config=quantization | {"scale_fmt": "ue8m0"})
    convert(source, tmp_path / "bf16", mp=2, weights="bf16")
    expected = official.shards(official.dequantised(load_tensors(tiny) | values), 2, n_experts=16, n_layers=3)
    for rank in range(2):
        assert as_bytes(load_file(tmp_path / "bf16" / f"model{rank}-mp2.safetensors")) == as_bytes(expected[rank])
    assert verify(tmp_path / "bf16", source).source_tensors > 0
    convert(source, tmp_path / "fp8", mp=2, weights="fp8")
    kept = official.shards(load_tensors(source), 2, n_experts=16, n_layers=3)
    for rank in range(2):
        assert as_bytes(load_file(tmp_path / "fp8" / f"model{rank}-mp2.safetensors")) == as_bytes(kept[rank])
    assert verify(tmp_path / "fp8", source).source_tensors > 0
    models = [
        load_model(tmp_path / weights, read_manifest(tmp_path / weights), Topology(0, 2), torch.device("cpu"))
        for weights in ("bf16", "fp8")
    ]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
