import hashlib
import json

import pytest

from model.checkpoint import jobs
from model.checkpoint.build import Resources
from model.checkpoint.convert import convert
from model.checkpoint.manifest import read_manifest
from model.checkpoint.reshard import reshard
from model.checkpoint.verify import verify
from model.errors import InputError, RunError
from tests.checkpoints import copy_checkpoint, tree_bytes

WAYS = [("fp8", 1, 4), ("fp8", 4, 1), ("fp8", 2, 4), ("fp8", 4, 2), ("bf16", 8, 2), ("bf16", 1, 8), ("bf16", 2, 2)]


@pytest.fixture(scope="module")
def converted(tiny, tmp_path_factory):
    root, made = tmp_path_factory.mktemp("converted"), {}

    def get(weights, mp, mtp="keep"):
        key = f"{weights}-{mp}-{mtp}"
        if key not in made:
            convert(tiny, root / key, mp=mp, weights=weights, mtp=mtp)
            made[key] = root / key
        return made[key]

    return get


def without_manifest(directory):
    return {name: data for name, data in tree_bytes(directory).items() if name != "manifest.json"}


@pytest.mark.parametrize(("weights", "old", "new"), WAYS)
def test_every_file_is_the_one_that_convert_writes(converted, tiny, tmp_path, weights, old, new):
    parent = converted(weights, old)
    manifest = reshard(parent, tmp_path / "out", mp=new)
    assert without_manifest(tmp_path / "out") == without_manifest(converted(weights, new))
    assert manifest.parent == hashlib.sha256((parent / "manifest.json").read_bytes()).hexdigest()
    direct = read_manifest(converted(weights, new))
    assert (manifest.source, manifest.args, manifest.files) == (direct.source, direct.args, direct.files)
    assert verify(tmp_path / "out", tiny).source_tensors > 0


def test_small_memory_gives_the_same(converted, tmp_path):
    reshard(converted("fp8", 4), tmp_path / "out", mp=2, resources=Resources(max_memory=4096, workers=3))
    assert without_manifest(tmp_path / "out") == without_manifest(converted("fp8", 2))


def test_illegal_mp_is_refused(converted, tmp_path):
    with pytest.raises(InputError, match=r"mp = 8 is not legal for fp8 shards of this checkpoint; legal are 1, 2, 4"):
        reshard(converted("fp8", 2), tmp_path / "out", mp=8)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_not_whole_is_refused(converted, tmp_path):
    broken = copy_checkpoint(converted("fp8", 2), tmp_path / "broken")
    convertible = broken / "model1-mp2.safetensors"
    data = convertible.read_bytes()
    convertible.write_bytes(data[:-10])
    with pytest.raises(InputError, match=r"model1-mp2.safetensors: is truncated"):
        reshard(broken, tmp_path / "out", mp=4)
    (broken / "manifest.json").unlink()
    convertible.write_bytes(data)
    with pytest.raises(InputError, match="holds no manifest.json, so it is no checkpoint"):
        reshard(broken, tmp_path / "out", mp=4)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_it_resumes_and_repeats_as_convert_does(converted, tmp_path, monkeypatch):
    parent, out = converted("bf16", 1), tmp_path / "out"
    really = jobs.write_bands

    def failing(plan, *arguments):
        if plan.name == "model1-mp2.safetensors":
            raise RunError("the disk is on fire")
        really(plan, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "write_bands", failing)
        with pytest.raises(RunError, match="on fire"):
            reshard(parent, out, mp=2, resources=Resources(workers=1))
    assert not out.exists()
    with pytest.raises(InputError, match="holds unfinished work that differs in mp"):
        reshard(parent, out, mp=4)
    first = reshard(parent, out, mp=2)
    assert without_manifest(out) == without_manifest(converted("bf16", 2))
    assert reshard(parent, out, mp=2) == first
    with pytest.raises(InputError, match="holds a checkpoint that differs in mp"):
        reshard(parent, out, mp=4)
    assert json.loads((out / "manifest.json").read_text())["parent"] == first.parent
