"""Files are whole or absent, whatever the storage does."""

import errno
import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import digest
from model.checkpoint.digest import remember, sha256_of
from model.checkpoint.headers import TensorInfo
from model.checkpoint.layout import FilePlan, Piece, Target
from model.checkpoint.sidecars import find_sidecars
from model.checkpoint.storage import storage_errors, write_atomically
from model.checkpoint.writer import ShardWriter
from model.errors import InputError, RunError

SOURCE = TensorInfo("x", "F32", (3, 5), None, 0, 60)
PLAN = FilePlan("x.safetensors", (Target("x", "F32", (3, 5), (Piece(SOURCE),)),))


def test_the_writer_gives_what_the_library_reads(tmp_path):
    values = torch.randn(3, 5)
    with ShardWriter(tmp_path / "x.safetensors", PLAN) as writer:
        writer.append(values[:1])
        writer.append(values[1:])
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], values)
    assert writer.sha256 == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    assert writer.size == (tmp_path / "x.safetensors").stat().st_size


def test_the_writer_leaves_nothing_after_an_error(tmp_path):
    with pytest.raises(KeyError):
        _write_half_of(tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def _write_half_of(path):
    with ShardWriter(path, PLAN) as writer:
        writer.append(torch.randn(1, 5))
        raise KeyError


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch, call):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    path = tmp_path / "x.safetensors"
    with (
        pytest.raises(RunError, match="No space left on device; free some space") as caught,
        ShardWriter(path, PLAN) as w,
    ):
        w.append(torch.randn(3, 5))
    assert str(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "note.json"
    write_atomically(path, b"old")

    def broken(descriptor):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(RunError, match=r"note.json: broken"), storage_errors(path):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["note.json"]


def test_a_digest_is_computed_once_and_forgotten_with_the_file_s_time(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(b"abc" * 1000)
    told = []
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert sha256_of(path, told.append) == expected
    assert sum(told) == 3000

    def unexpected(*arguments):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(digest.hashlib, "sha256", unexpected)
        assert sha256_of(path) == expected
    os.utime(path, ns=(1, 1))
    path.write_bytes(b"abd" * 1000)
    assert sha256_of(path) == hashlib.sha256(b"abd" * 1000).hexdigest()


def test_a_damaged_memory_is_not_believed(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    remember(path, "nonsense")
    assert sha256_of(path) == hashlib.sha256(b"abc").hexdigest()


def test_sidecars_are_files_inside_the_directory_only(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    taken = ["chat_template.jinja", "tokenization_kimi.py", "tokenizer.json"]
    for name in (*taken, "weights.bin", ".hidden", "config.json"):
        (source / name).write_text("x")
    (source / "figures").mkdir()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("x")
    assert sorted(path.name for path in find_sidecars(source)) == sorted([*taken, "tools.jinja"])
    (source / "tokenizer").mkdir()
    with pytest.raises(InputError, match="'tokenizer' is a directory where a tokenizer's file is expected"):
        find_sidecars(source)
    (source / "tokenizer").rmdir()
    (source / "vocab.json").symlink_to("nowhere")
    with pytest.raises(InputError, match="'vocab.json' is a link that leads nowhere"):
        find_sidecars(source)
    (source / "vocab.json").unlink()
    (tmp_path / "secret").write_text("x")
    (source / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="'tokenizer_config.json' is a symbolic link to .*secret, outside"):
        find_sidecars(source)


def test_the_hub_cache_s_links_are_meant(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1234").write_text("x")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1234")
    assert [p.name for p in find_sidecars(snapshot)] == ["tokenizer.json"]
