"""A checkpoint gets its name once it is proven; what it was made of goes by policy."""

import shutil
from pathlib import Path
from uuid import uuid4

import pytest
from prefect import flow
from prefect.assets import Asset

from model.checkpoint.convert import convert
from model.checkpoint.manifest import read_manifest
from model.errors import InputError
from tasks.publication import checkpoint_asset, publish, release_intermediates
from tasks.results import DequantizedResult, SourceResult, ValidationResult, checkpoint_result
from tests.checkpoints import tree_bytes
from tests.random_checkpoints import small_family, write_random


@pytest.mark.parametrize(
    "path",
    ["/models/deepseek-v3/mp8", "/Models/with a blank", "/models/50%/é#?&{}[]|\\^`<>'\"", "/" + "long/" * 300 + "x"],
)
def test_every_path_gives_a_key_that_prefect_takes(path):
    key = checkpoint_asset(Path(path))
    assert Asset(key=key).key == key
    assert key.startswith("shardflow://checkpoint/")


@flow
def published(directory, out):
    checkpoint = checkpoint_result(directory, out, read_manifest(directory), made_by=str(uuid4()))
    validation = ValidationResult(
        directory=out, files=0, tensors=0, source_tensors=0, source_size=0, made_by=str(uuid4())
    )
    return publish(checkpoint, validation)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    place = tmp_path_factory.mktemp("published")
    convert(write_random(small_family(), place / "source"), place / "shards", mp=2, weights="bf16")
    return place / "shards"


@pytest.fixture
def staged(converted, tmp_path):
    return Path(shutil.copytree(converted, tmp_path / "out.staged"))


@pytest.mark.usefixtures("prefect_server")
def test_a_staged_checkpoint_gets_its_name(staged, tmp_path):
    before = tree_bytes(staged)
    result = published(staged, tmp_path / "out")
    assert (result.directory, result.place) == (tmp_path / "out", tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("prefect_server")
def test_one_that_lost_a_file_makes_way(staged, tmp_path):
    before = tree_bytes(staged)
    shutil.copytree(staged, tmp_path / "out")
    (tmp_path / "out" / "model0-mp2.safetensors").unlink()
    (tmp_path / "out" / "evaluation.json").write_text("{}")
    published(staged, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == before | {"evaluation.json": b"{}"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("taken_by", ["a whole checkpoint", "another checkpoint that lost a file", "something else"])
def test_what_another_run_put_there_is_not_lost(staged, converted, tmp_path, taken_by):
    if taken_by == "a whole checkpoint":
        shutil.copytree(staged, tmp_path / "out")
    elif taken_by == "another checkpoint that lost a file":
        convert(converted.parent / "source", tmp_path / "out", mp=1, weights="bf16")
        (tmp_path / "out" / "model0-mp1.safetensors").unlink()
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious.txt").write_text("mine")
    before = tree_bytes(tmp_path)
    with pytest.raises(InputError, match=r"out: another run has published there meanwhile; remove .*out.staged or"):
        published(staged, tmp_path / "out")
    assert tree_bytes(tmp_path) == before


@flow
def released(checkpoint, source, dequantized, keep):
    return release_intermediates(checkpoint, source, dequantized, keep, "purpose").released


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("repo", "keep", "left"),
    [
        ("org/model", "none", set()),
        ("org/model", "bf16", {"bf16"}),
        ("org/model", "all", {"download", "bf16"}),
        (None, "none", {"download"}),
        (None, "bf16", {"download", "bf16"}),
    ],
)
def test_a_policy_removes_what_it_says_and_never_a_local_source(converted, tmp_path, repo, keep, left):
    for name in ("download", "bf16"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    checkpoint = checkpoint_result(converted, converted, read_manifest(converted), made_by=str(uuid4()))
    source = SourceResult(directory=tmp_path / "download", repo=repo, commit=repo and "0" * 40, made_by=str(uuid4()))
    dequantized = DequantizedResult(directory=tmp_path / "bf16", files=(), made_by=str(uuid4()))
    gone = released(checkpoint, source, dequantized, keep)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == left
    assert {path.name for path in gone} == {"download", "bf16"} - left
