"""A local source's fingerprint changes with anything that could change what is made of it."""

import os
import shutil

import pytest

from model.checkpoint.fingerprint import fingerprint
from model.errors import InputError
from tests.random_checkpoints import small_family, write_random


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_random(small_family(), tmp_path_factory.mktemp("fingerprint") / "source")


def test_a_copy_that_keeps_its_times_has_the_same(source, tmp_path):
    assert fingerprint(shutil.copytree(source, tmp_path / "copy")) == fingerprint(source)


def _append(path):
    path.write_bytes(path.read_bytes() + b" ")


def _change_in_place(path):
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def _change_header_and_hide_it(path):
    """Same size and time, another header."""
    status = path.stat()
    data = path.read_bytes().replace(b"down_proj", b"up___proj")
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_template_in_its_folder_counts(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    with_template = fingerprint(copy)
    assert with_template != fingerprint(source)
    (copy / "additional_chat_templates" / "tools.jinja").write_text("{{ message }}")
    assert fingerprint(copy) != with_template


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", _append),
        ("model-00001-of-000002.safetensors", _append),
        ("model-00001-of-000002.safetensors", _change_in_place),
        ("model-00001-of-000002.safetensors", _change_header_and_hide_it),
        ("model.safetensors.index.json", lambda path: path.unlink()),
        ("config.json", lambda path: path.rename(path.with_name("config.json.old"))),
    ],
)
def test_every_change_is_seen(source, tmp_path, name, change):
    copy = shutil.copytree(source, tmp_path / "copy")
    change(copy / name)
    assert fingerprint(copy) != fingerprint(source)


def test_a_file_that_cannot_be_read_is_named(source, tmp_path):
    with pytest.raises(InputError, match="gone"):
        fingerprint(tmp_path / "gone")
