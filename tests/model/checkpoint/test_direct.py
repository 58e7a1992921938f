"""The direct writer gives the same bytes as a plain file would hold, whatever the sizes and the file system."""

import errno
import os

import pytest

from model.checkpoint.direct import ALIGNMENT, DirectFile

BUFFER = 2 * ALIGNMENT


def _write(path, data, step):
    file = DirectFile(path, len(data), BUFFER)
    try:
        for first in range(0, len(data), step):
            file.write(memoryview(data)[first : first + step])
        file.finish()
    finally:
        file.close()


@pytest.mark.parametrize("size", [1, 63, 4095, 4096, 4097, BUFFER, BUFFER + 1, 5 * BUFFER - 1, 5 * BUFFER, 100_003])
@pytest.mark.parametrize("step", [7, 4096, 100_003])
def test_every_byte_arrives_in_order(tmp_path, size, step):
    data = os.urandom(size)
    _write(tmp_path / "x", data, step)
    assert (tmp_path / "x").read_bytes() == data


def test_a_file_system_without_direct_writes_gets_plain_ones(tmp_path, monkeypatch):
    flags_seen, real_open = [], os.open

    def open_without_direct(path, flags, *rest, **named):
        flags_seen.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", open_without_direct)
    data = os.urandom(3 * BUFFER + 5)
    _write(tmp_path / "x", data, 1000)
    assert (tmp_path / "x").read_bytes() == data
    assert [bool(flags & os.O_DIRECT) for flags in flags_seen[:2]] == [True, False]


@pytest.mark.parametrize("parts", [1, 3])
def test_an_error_of_the_writing_thread_reaches_the_caller(tmp_path, monkeypatch, parts):
    def broken(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="Input/output error"):
        _write(tmp_path / "x", bytes(parts * BUFFER), BUFFER)


def test_writing_short_of_the_plan_is_a_bug(tmp_path):
    file = DirectFile(tmp_path / "x", 10, BUFFER)
    file.write(memoryview(b"four"))
    with pytest.raises(AssertionError, match="4 bytes written, 10 planned"):
        file.finish()
    file.close()
