"""The safetensors header, read and checked in full before any data is touched.

Format: 8 bytes little-endian header length, a JSON object of that length, then the data, which the tensors'
``data_offsets`` must cover exactly once (safetensors format description).
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from model.errors import InputError

ITEMSIZE: dict[str, int] = {
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8,
    "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, for the format's dtype names that torch can hold. This module does without torch itself:
a plan needs headers alone, and importing torch takes longer than planning 671 billion parameters."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses a longer header, so no loader could read it."""

LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its header describes it; ``start`` is its first byte counted from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Elements in one row: the product of the other dimensions."""
        return prod(self.shape[1:])

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class FileStamp:
    """By which a file's change is noticed: its size and modification time when its header was read."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileHeader(FileStamp):
    """A whole file: its stamp, and its tensors by name."""

    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> FileHeader:
    """Parse and check the header of ``path``.

    Raises ``InputError`` naming the file, the tensor where one is to blame, and what to do.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = _raw_header(path, file.read(LENGTH_BYTES + len(LFS_POINTER)), status.st_size)
            file.seek(LENGTH_BYTES)
            text = file.read(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    entries = _parse(path, text)
    data_start = LENGTH_BYTES + len(text)
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        problem = _entry_problem(entry)
        if problem:
            problems.append(f"{path}: tensor {name!r}: {problem}")
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), path, data_start + begin, end - begin)
    problems = problems or _layout_problems(path, tensors.values(), data_start, status.st_size)
    if problems:
        raise InputError(problems)
    return FileHeader(path, status.st_size, status.st_mtime_ns, tensors)


def _raw_header(path: Path, head: bytes, file_size: int) -> int:
    """The header's length in bytes, once it is clear that the file can hold it."""
    if head.startswith(LFS_POINTER):
        raise InputError(
            f"{path}: is a Git LFS pointer, not the file itself; fetch it again (`git lfs pull`, or `hf download`)"
        )
    if len(head) < LENGTH_BYTES:
        raise InputError(f"{path}: {file_size} bytes are too few for a safetensors file; fetch it again")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or LENGTH_BYTES + length > file_size:
        raise InputError(
            f"{path}: states a header of {length} bytes in a file of {file_size}; "
            "it is truncated or no safetensors file: fetch it again"
        )
    return length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{path}: header names {twice!r} twice; fetch the file again")
        return found

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: header is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(entries, dict):
        raise InputError(f"{path}: header is not a JSON object; fetch the file again")
    notes = entries.get("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise InputError(f"{path}: header's __metadata__ is not an object of texts; fetch the file again")
    return entries


def _entry_problem(entry: Any) -> str | None:
    """What is wrong with one tensor's header entry on its own, or None."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        return "header entry lacks dtype, shape or data_offsets; fetch the file again"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        return f"dtype {dtype!r} is unknown; known: {', '.join(ITEMSIZE)}"
    if not _naturals(shape):
        return f"shape {shape!r} is not a list of sizes; fetch the file again"
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets!r} are not a beginning and an end; fetch the file again"
    needed = prod(shape) * ITEMSIZE[dtype]
    if offsets[1] - offsets[0] != needed:
        return (
            f"{dtype} of shape {shape} needs {needed} bytes, its data_offsets give {offsets[1] - offsets[0]}; "
            "fetch the file again"
        )
    return None


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _layout_problems(path: Path, tensors: Iterable[TensorInfo], data_start: int, file_size: int) -> list[str]:
    """The data must be covered exactly once: no hole, no overlap, nothing behind or missing."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != position:
            what = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            return [f"{path}: tensor {tensor.name!r} {what} (begins at byte {tensor.start}, expected {position})"]
        position += tensor.size
    if position != file_size:
        what = "truncated" if position > file_size else "followed by foreign bytes"
        return [f"{path}: is {what}: {file_size} bytes, its header describes {position}; fetch it again"]
    return []
