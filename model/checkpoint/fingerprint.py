"""What tells one local source from another without reading terabytes: names, sizes, times, headers, small files."""

import hashlib
from pathlib import Path

from model.checkpoint.headers import LENGTH_BYTES
from model.checkpoint.sidecars import TEMPLATES
from model.checkpoint.storage import reading

SMALL = 1 << 20
"""Files up to this size are hashed whole: configs, indexes, tokenizers."""

LONGEST_HEADER = 100 << 20
"""The safetensors format's own bound."""


def fingerprint(directory: Path) -> str:
    """A digest, in hex, of every regular file's name, size and modification time, and of what costs little to read.

    Of a safetensors file that is the header. The modification time is part of it because weights that change in
    place keep their header and size. Raises ``InputError`` where a file cannot be read.
    """
    digest = hashlib.sha256()
    with reading(directory):
        directory.stat()
        for path in [*_files(directory), *_files(directory / TEMPLATES)]:
            status, name = path.stat(), path.relative_to(directory)
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            digest.update(_telling_bytes(path, status.st_size))
    return digest.hexdigest()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file()) if directory.exists() else []


def _telling_bytes(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = file.read(LENGTH_BYTES)
            return length + file.read(min(int.from_bytes(length, "little"), LONGEST_HEADER))
        return file.read() if size <= SMALL else b""
