"""What is removed on purpose is remembered for that purpose alone, and only while its checkpoint is whole."""

import json
import os

import pytest

from model.checkpoint.convert import convert
from model.checkpoint.released import (
    ReleasedError,
    discard,
    forget,
    is_released,
    is_whole,
    manifest_digest,
    release,
    require,
)
from model.errors import InputError
from tests.random_checkpoints import small_family, write_random


@pytest.fixture
def checkpoint(tmp_path):
    source = write_random(small_family(), tmp_path / "source")
    convert(source, tmp_path / "out", mp=2, weights="bf16")
    return tmp_path / "out"


@pytest.fixture
def intermediate(tmp_path):
    directory = tmp_path / "work" / "bf16"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"large")
    return directory


def test_released_for_its_purpose_while_the_checkpoint_is_whole(checkpoint, intermediate):
    assert not is_released(intermediate, "this")
    release(intermediate, "this", checkpoint)
    assert [path.name for path in intermediate.parent.iterdir()] == ["bf16.released.json"]
    assert is_released(intermediate, "this")
    assert not is_released(intermediate, "another")
    os.truncate(checkpoint / "model1-mp2.safetensors", 10)
    assert not is_released(intermediate, "this")


def test_another_checkpoint_in_the_same_place_does_not_count(checkpoint, intermediate, tmp_path):
    release(intermediate, "this", checkpoint)
    checkpoint.rename(tmp_path / "old")
    convert(tmp_path / "source", checkpoint, mp=1, weights="bf16")
    assert not is_released(intermediate, "this")


@pytest.mark.parametrize("note", ["", "{", "[]", '{"purpose": "this"}', '{"purpose": "this", "checkpoint": null}'])
def test_a_damaged_note_vouches_for_nothing(checkpoint, intermediate, note):
    release(intermediate, "this", checkpoint)
    intermediate.with_name("bf16.released.json").write_text(note)
    assert not is_released(intermediate, "this")


def test_a_release_that_was_killed_in_between_counts_and_is_finished_by_the_next(checkpoint, intermediate):
    note = {"purpose": "this", "checkpoint": str(checkpoint), "manifest_sha256": manifest_digest(checkpoint)}
    intermediate.with_name("bf16.released.json").write_text(json.dumps(note))
    leftover = intermediate.with_name(".bf16.shardflow-removed")
    leftover.mkdir()
    (leftover / "half.safetensors").write_bytes(b"half")
    assert is_released(intermediate, "this")
    release(intermediate, "this", checkpoint)
    assert [path.name for path in intermediate.parent.iterdir()] == ["bf16.released.json"]


def test_what_is_needed_again_is_said_and_can_be_forgotten(checkpoint, intermediate):
    require(intermediate)
    release(intermediate, "this", checkpoint)
    with pytest.raises(ReleasedError, match="bf16: was released when its checkpoint was published"):
        require(intermediate)
    forget(intermediate)
    assert not is_released(intermediate, "this")
    require(intermediate)  # absent, but not released: whoever reads it says so


def test_a_link_and_a_neighbour_are_not_ours_to_remove(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    with pytest.raises(InputError, match="out: is a symbolic link"):
        discard(tmp_path / "out")
    (tmp_path / "real.removed").mkdir()
    discard(tmp_path / "real")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real.removed"]


def test_discarding_what_is_not_there_is_no_error(tmp_path):
    discard(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "model0-mp2.safetensors", "config.json"])
def test_a_checkpoint_is_whole_by_manifest_names_and_sizes(checkpoint, name):
    digest = manifest_digest(checkpoint)
    assert is_whole(checkpoint, digest)
    assert not is_whole(checkpoint, "0" * 64)
    (checkpoint / name).unlink()
    assert not is_whole(checkpoint, digest)
