"""``manifest.json``: what a checkpoint directory holds, of what it was made, and by which rules.

Written last, and the same bytes for the same inputs: no time, host, duration or path. A directory without one is
no checkpoint.
"""

import dataclasses
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.args import ModelArgs
from model.checkpoint.plan import WEIGHTS, DroppedRule
from model.checkpoint.source import read_json, shortened
from model.checkpoint.storage import json_bytes, write_atomically
from model.errors import InputError

MANIFEST = "manifest.json"
SCHEMA = 1


@dataclass(frozen=True)
class FileRecord:
    """One file: its size in bytes, its digest in hex, and how many tensors it holds (None: no safetensors file)."""

    name: str
    size: int
    sha256: str
    tensors: int | None = None


@dataclass(frozen=True)
class SourceRecord:
    """Of what a checkpoint was made: hub repository and commit where known, and every file that was read."""

    repo: str | None
    commit: str | None
    files: tuple[FileRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``. ``args`` are those of the shards; ``notes`` say what a reader must know.

    ``parent`` is the sha256 of the manifest that the shards were resharded from, or None.
    """

    source: SourceRecord | None
    args: ModelArgs
    mp: int
    weights: str
    mtp: str
    files: tuple[FileRecord, ...]
    dropped: tuple[DroppedRule, ...]
    notes: tuple[str, ...] = ()
    tool: str = ""
    parent: str | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """JSON values, in the order in which a person wants to read them."""
        fields = dataclasses.asdict(self) | {"args": self.args.to_json()}
        first = ("schema", "tool", "mp", "weights", "mtp")
        return {name: fields[name] for name in (*first, *(name for name in fields if name not in first))}


def shard_name(rank: int, mp: int) -> str:
    """File name of one rank's part of the model."""
    return f"model{rank}-mp{mp}.safetensors"


def tool_version() -> str:
    """Name and version of this project, as it is installed."""
    try:
        return f"shardflow {importlib.metadata.version('shardflow')}"
    except importlib.metadata.PackageNotFoundError:
        return "shardflow (not installed)"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into ``directory``, whole or not at all."""
    write_atomically(directory / MANIFEST, json_bytes(manifest.to_json()))


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``.

    Raises ``InputError`` where there is none, or one that this version cannot read.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{directory}: holds no {MANIFEST}, so it is no checkpoint; convert into it, or use "
            "`shardflow adopt` for shards of the official converter"
        )
    fields = read_json(path)
    if fields.get("schema") != SCHEMA:
        raise InputError(f"{path}: schema {fields.get('schema')!r} is unknown to this version, which reads {SCHEMA}")
    try:
        return _from_json(fields)
    except InputError as error:
        raise InputError([f"{path}: {problem}" for problem in error.problems]) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error}); convert again") from error


def check_files(directory: Path, files: tuple[FileRecord, ...]) -> None:
    """Raise ``InputError`` where a file of ``directory`` is missing or not of the recorded size."""
    problems = []
    for file in files:
        path = directory / file.name
        actual = path.stat().st_size if path.is_file() else None
        if actual != file.size:
            problems.append(f"{path}: expected {file.size} bytes, found {actual}; remove {directory} and run again")
    if problems:
        raise InputError(shortened(problems))


def file_records(files: Any) -> tuple[FileRecord, ...]:
    """The records of a parsed JSON list. Raises ``TypeError`` where it holds anything else."""
    records = tuple(FileRecord(**file) for file in files)
    for record in records:
        kinds = (type(record.name), type(record.size), type(record.sha256), type(record.tensors))
        if kinds[:3] != (str, int, str) or kinds[3] not in (int, type(None)):
            raise TypeError(f"{record} is no record of a file")
    return records


def source_record_from(fields: dict[str, Any]) -> SourceRecord:
    """The record of a source from parsed JSON."""
    return SourceRecord(fields["repo"], fields["commit"], file_records(fields["files"]))


def _from_json(fields: dict[str, Any]) -> Manifest:
    source = fields["source"]
    manifest = Manifest(
        source=source and source_record_from(source),
        args=ModelArgs.from_json(fields["args"]),
        mp=fields["mp"],
        weights=fields["weights"],
        mtp=fields["mtp"],
        files=file_records(fields["files"]),
        dropped=tuple(DroppedRule(**rule) for rule in fields["dropped"]),
        notes=tuple(fields["notes"]),
        tool=fields["tool"],
        parent=fields.get("parent"),
    )
    if type(manifest.mp) is not int or manifest.mp < 1:
        raise InputError(f"mp = {manifest.mp!r} is not a whole number of at least 1")
    if manifest.weights not in WEIGHTS or manifest.mtp not in ("drop", "keep"):
        raise InputError(f"weights = {manifest.weights!r} or mtp = {manifest.mtp!r} is unknown")
    missing = {shard_name(rank, manifest.mp) for rank in range(manifest.mp)} - {file.name for file in manifest.files}
    if missing:
        raise InputError(f"mp = {manifest.mp}, but {', '.join(sorted(missing))} is not listed")
    return manifest
