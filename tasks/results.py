"""What the tasks return: small pydantic records of files and facts, never tensors."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from model.checkpoint.manifest import FileRecord, Manifest
from model.rank_report import RankReport


class Result(BaseModel):
    """Base: immutable, and nothing unknown is taken along."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileResult(Result):
    """One file: size in bytes, digest in hex, number of tensors (None: no safetensors file)."""

    name: str
    size: int
    sha256: str
    tensors: int | None = None


class SourceResult(Result):
    """A source directory; repository and commit where it was downloaded."""

    directory: Path
    repo: str | None = None
    commit: str | None = None
    size: int = 0


class DequantizedResult(Result):
    """A BF16 Hugging Face directory."""

    directory: Path
    files: tuple[FileResult, ...]


class CheckpointResult(Result):
    """A shard directory with its manifest."""

    directory: Path
    mp: int
    weights: str
    mtp: str
    files: tuple[FileResult, ...]


class ValidationResult(Result):
    """What was proven of a checkpoint, see ``model.checkpoint.verify.Verification``."""

    directory: Path
    files: int
    tensors: int
    source_tensors: int
    source_size: int


class WarmUpResult(Result):
    """All ranks generated two tokens."""

    ranks: tuple[RankReport, ...]


def file_results(files: tuple[FileRecord, ...]) -> tuple[FileResult, ...]:
    """The records of ``files``."""
    return tuple(FileResult(name=f.name, size=f.size, sha256=f.sha256, tensors=f.tensors) for f in files)


def checkpoint_result(directory: Path, manifest: Manifest) -> CheckpointResult:
    """The record of the checkpoint that ``manifest`` describes."""
    return CheckpointResult(
        directory=directory,
        mp=manifest.mp,
        weights=manifest.weights,
        mtp=manifest.mtp,
        files=file_results(manifest.files),
    )
