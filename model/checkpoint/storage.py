"""Files that are either whole or absent: temporary name, fsync, rename; and what a full or read-only disk says."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.errors import InputError, RunError

TEMPORARY_SUFFIX = ".tmp"

ADVICE = {
    errno.ENOSPC: "free some space and run again: finished files are kept",
    errno.EDQUOT: "the quota is used up: free some space and run again",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EACCES: "permission denied: choose another place or mend its permissions",
    errno.EPERM: "permission denied: choose another place or mend its permissions",
}


def write_atomically(path: Path, data: bytes, durable: bool = True) -> None:
    """Write ``path`` so that it never shows half its content."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        temporary.write_bytes(data)
        if durable:
            publish_file(temporary, path)
        else:
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def publish_file(temporary: Path, path: Path) -> None:
    """Give a complete file its final name, once its bytes are on the disk."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_directory(path.parent)


def json_bytes(value: Any) -> bytes:
    """``value`` as indented JSON, the same bytes for the same value."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def fsync_directory(directory: Path) -> None:
    """Make renames and new names in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``RunError`` that names ``path`` and says what to do."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "see to the storage and run again")
        raise RunError(f"{path}: {error.strerror or error}; {advice}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the block into an ``InputError`` that names the file, or ``path`` if it tells none."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
