"""What the tasks return: small pydantic records of files and facts, never tensors. Prefect keeps them as JSON."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from model.checkpoint.dequantize import RECORD
from model.checkpoint.describe import PlanSummary
from model.checkpoint.digest import hashed
from model.checkpoint.manifest import MANIFEST, FileRecord, Manifest, check_files
from model.checkpoint.released import is_released, is_whole, manifest_digest
from model.errors import InputError
from model.rank_report import RankReport


class Result(BaseModel):
    """Base: immutable, and nothing unknown is taken along. ``made_by`` is the task run that really did the work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    made_by: str = ""

    def key_facts(self) -> dict[str, Any]:
        """What of this result decides the results of later stages: which execution it is of."""
        return {"made_by": self.made_by}

    def is_there(self, inputs: dict[str, Any]) -> bool:
        """Whether the files that this result tells of are where it says, by names and sizes.

        ``inputs`` are the arguments of the task that asks.
        """
        return True


class FileResult(BaseModel):
    """One file: size in bytes, digest in hex, number of tensors (None: no safetensors file)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size: int
    sha256: str
    tensors: int | None = None


class SourceResult(Result):
    """A source directory; repository, commit and files where it was downloaded, else a fingerprint."""

    directory: Path
    repo: str | None = None
    commit: str | None = None
    size: int = 0
    fingerprint: str | None = None
    files: tuple[FileResult, ...] = ()

    def key_facts(self) -> dict[str, Any]:
        """The content itself, too: a commit or a fingerprint."""
        return {"made_by": self.made_by, "content": self.commit or self.fingerprint}

    def is_there(self, inputs: dict[str, Any]) -> bool:
        """Downloaded files may have been released once they had served their purpose."""
        return _are_there(self.directory, self.files, inputs)


class PlanResult(Result):
    """What will be written."""

    summary: PlanSummary


class DequantizedResult(Result):
    """A BF16 Hugging Face directory; the digest of its record tells of which source it is."""

    directory: Path
    files: tuple[FileResult, ...]
    record_sha256: str = ""

    def is_there(self, inputs: dict[str, Any]) -> bool:
        """The directory may have been released once it had served its purpose."""
        record = self.directory / RECORD
        same = not record.exists() or hashed(record) == self.record_sha256
        return same and _are_there(self.directory, self.files, inputs)


class CheckpointResult(Result):
    """A checkpoint: ``directory`` is where it was written, ``out`` where it belongs once it is published."""

    directory: Path
    out: Path
    mp: int
    weights: str
    mtp: str
    manifest_sha256: str
    files: tuple[FileResult, ...]

    @property
    def place(self) -> Path:
        """Where it lies now: still where it was written, or published already."""
        return self.directory if (self.directory / MANIFEST).exists() else self.out

    def is_there(self, inputs: dict[str, Any]) -> bool:
        """The manifest is the same, and every file in it has its size."""
        return is_whole(self.place, self.manifest_sha256)


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


class ReplyResult(Result):
    """What the shards say to a prompt."""

    text: str


class ReleaseResult(Result):
    """Which intermediates are gone by policy."""

    released: tuple[Path, ...]

    def is_there(self, inputs: dict[str, Any]) -> bool:
        """Nothing of them has come back."""
        return not any(directory.exists() for directory in self.released)


def _are_there(directory: Path, files: tuple[FileResult, ...], inputs: dict[str, Any]) -> bool:
    records = tuple(FileRecord(f.name, f.size, f.sha256, f.tensors) for f in files)
    try:
        check_files(directory, records)
    except InputError:
        return is_released(directory, inputs.get("purpose", ""))
    return True


def file_results(files: tuple[FileRecord, ...]) -> tuple[FileResult, ...]:
    """The records of ``files``."""
    return tuple(FileResult(name=f.name, size=f.size, sha256=f.sha256, tensors=f.tensors) for f in files)


def checkpoint_result(directory: Path, out: Path, manifest: Manifest, made_by: str) -> CheckpointResult:
    """The record of the checkpoint in ``directory`` that ``manifest`` describes and that belongs at ``out``."""
    return CheckpointResult(
        directory=directory,
        out=out,
        mp=manifest.mp,
        weights=manifest.weights,
        mtp=manifest.mtp,
        manifest_sha256=manifest_digest(directory),
        files=file_results(manifest.files),
        made_by=made_by,
    )
