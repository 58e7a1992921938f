"""What a download notes beside its files: their digests, so that no later stage hashes hundreds of gigabytes again.

``.shardflow-source.json`` is written last. It vouches for a file as long as that keeps size and modification time.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from model.checkpoint.storage import write_atomically

RECORD_NAME = ".shardflow-source.json"


@dataclass(frozen=True)
class DownloadedFile:
    """One file of a source: name relative to the directory, size in bytes, sha256, modification time when hashed."""

    name: str
    size: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class DownloadRecord:
    """The hashed files of a source, sorted by name; repo and commit only while they are exactly that commit."""

    repo: str | None
    commit: str | None
    files: tuple[DownloadedFile, ...]


def read_record(directory: Path) -> DownloadRecord | None:
    """What the download's record still vouches for, or ``None`` if there is no (readable) record.

    An entry counts while the file's size and modification time are those it was hashed with; the others are left
    out. ``repo`` and ``commit`` are given only while every entry counts, because after that the directory is no
    longer that commit. Files that the record does not name (added by hand) are not its concern.
    """
    record = load_record(directory)
    if record is None:
        return None
    unchanged = tuple(unchanged_files(directory, record))
    return record if unchanged == record.files else DownloadRecord(None, None, unchanged)


def load_record(directory: Path) -> DownloadRecord | None:
    """The record as it was written, or None where there is no readable one."""
    try:
        data = json.loads((directory / RECORD_NAME).read_text(encoding="utf-8"))
        files = tuple(DownloadedFile(**file) for file in data["files"])
        return DownloadRecord(data["repo"], data["commit"], files)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None  # what cannot be read vouches for nothing: the files are hashed again


def unchanged_files(directory: Path, record: DownloadRecord | None) -> Iterator[DownloadedFile]:
    """The entries whose files still have the size and modification time they were hashed with."""
    for file in record.files if record is not None else ():
        path = directory / file.name
        if path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (file.size, file.mtime_ns):
            yield file


def write_record(directory: Path, record: DownloadRecord) -> None:
    """Write the record into ``directory``, whole or not at all."""
    write_atomically(directory / RECORD_NAME, (json.dumps(asdict(record), indent=1) + "\n").encode())
