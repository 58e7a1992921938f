"""Building an output directory that is either finished or absent, and that a killed run can take up again.

Beside ``OUT`` lies ``OUT.partial`` while the work lasts::

    OUT.partial/resume.json      of what and how: another source or option may not go on here
    OUT.partial/lock             held by the one run at work (released by the system when that dies)
    OUT.partial/done/<file>.json size and digest of each finished file
    OUT.partial/at-work/         how far workers in other processes are, see ``tally``
    OUT.partial/files/           becomes OUT, by one rename, when all is there
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.headers import FileHeader
from model.checkpoint.jobs import Spread, Threads, finished, jobs_for, note
from model.checkpoint.layout import FilePlan
from model.checkpoint.manifest import FileRecord
from model.checkpoint.memory import band_memory
from model.checkpoint.progress import Progress
from model.checkpoint.reader import check_unchanged
from model.checkpoint.source import read_json
from model.checkpoint.storage import fsync_directory, json_bytes, storage_errors, write_atomically
from model.checkpoint.tally import DIRECTORY, dissolve
from model.errors import InputError, RunError

DEFAULT_MAX_MEMORY = 2 << 30
PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class Inputs:
    """The files that are read, and the (rows, columns) that one FP8 scale covers in them."""

    headers: tuple[FileHeader, ...]
    block: tuple[int, int]


@dataclass(frozen=True)
class Resources:
    """What a build may use: ``max_memory`` bytes beyond the interpreter, shared among ``workers`` files at a time."""

    max_memory: int = DEFAULT_MAX_MEMORY
    workers: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InputError(f"workers = {self.workers} is not at least 1")
        if self.max_memory < 1:
            raise InputError(f"max_memory = {self.max_memory} bytes is not positive")


def check_vacant(out: Path) -> None:
    """Raise ``InputError`` if ``out`` is anything but absent or an empty directory that a rename can replace."""
    problem = None
    with storage_errors(out):
        if out.is_symlink():
            problem = "is a symbolic link; name the directory itself"
        elif os.path.ismount(out):
            problem = "is a mount point, which no rename can replace; choose a directory inside it"
        elif out.exists() and (not out.is_dir() or any(out.iterdir())):
            problem = "exists and is not empty; choose another place or remove it"
    if problem:
        raise InputError(f"{out}: {problem}")


def check_ready(out: Path, plans: tuple[FilePlan, ...], identity: dict[str, Any]) -> None:
    """Raise, before hours of hashing, what ``work_directory`` and ``build_files`` would raise after them.

    ``identity`` may lack what only the hashing tells.
    """
    check_vacant(out)
    partial = _partial(out)
    if (partial / "lock").exists():
        with _lock(partial / "lock", out):
            _check_resume(partial, identity)
    _check_space(partial, [plan for plan in plans if finished(partial, plan) is None])


@contextlib.contextmanager
def work_directory(out: Path, identity: dict[str, Any]) -> Iterator[Path]:
    """Hold ``out``'s partial directory for work of this ``identity``, and publish its files as ``out`` at the end.

    Raises ``InputError`` where ``out`` is taken, another run is at work, or the partial directory belongs to
    other inputs or options. An error in the block leaves the finished files for the next run, and nothing else.
    """
    out = out.absolute()
    check_vacant(out)
    partial = _partial(out)
    with storage_errors(partial):
        (partial / "files").mkdir(parents=True, exist_ok=True)
        (partial / "done").mkdir(exist_ok=True)
    with _lock(partial / "lock", out):
        try:
            check_vacant(out)
            _check_resume(partial, identity)
            with storage_errors(partial):
                _remove_unfinished(partial)
                write_atomically(partial / "resume.json", json_bytes(identity))
            yield partial
            with storage_errors(out):
                fsync_directory(partial / "files")
                (partial / "files").rename(out)
                fsync_directory(out.parent)
        finally:
            if not (partial / "files").exists() or not any((partial / "done").iterdir()):
                shutil.rmtree(partial, ignore_errors=True)


def _partial(out: Path) -> Path:
    return out.absolute().with_name(out.absolute().name + PARTIAL_SUFFIX)


def _check_resume(partial: Path, identity: dict[str, Any]) -> None:
    """``identity`` must not differ from what the unfinished work, if there is any, was begun with."""
    path = partial / "resume.json"
    if not path.exists():
        return
    begun = read_json(path)
    wanted: dict[str, Any] = json.loads(json_bytes(identity))
    differing = [name for name in wanted if name not in begun or begun[name] != wanted[name]]
    if differing:
        raise InputError(
            f"{partial}: holds unfinished work that differs in {', '.join(differing)}; "
            "finish that, remove the directory, or choose another place"
        )


def _remove_unfinished(partial: Path) -> None:
    """What a killed run left half-written, or had not noted yet; workers that it left are told to stop."""
    if (partial / DIRECTORY).exists():
        dissolve(partial / DIRECTORY)
    for path in (partial / "files").rglob("*"):
        if path.is_file() and not note(partial, path.name).exists():
            path.unlink()


@contextlib.contextmanager
def _lock(path: Path, out: Path) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        with storage_errors(path):
            file = held.enter_context(path.open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(f"{out}: another run is writing it at this moment; wait for it or stop it") from error
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise InputError(f"{out}: another run finished it at this moment; run again")
        yield


def build_files(
    plans: tuple[FilePlan, ...],
    inputs: Inputs,
    partial: Path,
    resources: Resources,
    progress: Progress,
    label: str,
    spread: Spread | None = None,
) -> tuple[FileRecord, ...]:
    """Write every planned file that ``partial`` does not hold yet; returns the records of all, in order.

    ``spread`` shares the files out to workers, by default threads of this process; each has its own reader and part
    of the memory.
    """
    done = {plan.name: finished(partial, plan) for plan in plans}
    remaining = [plan for plan in plans if done[plan.name] is None]
    _check_space(partial, remaining)
    progress.phase(label, sum(plan.data_size for plan in plans))
    progress.advance(sum(plan.data_size for plan in plans if done[plan.name]))
    if remaining:
        memory = band_memory(resources.max_memory, min(resources.workers, len(remaining)), plans)
        jobs = jobs_for(remaining, inputs.headers, inputs.block, partial, memory)
        spread = spread or Threads(resources.workers)
        done |= {record.name: record for record in spread(jobs, progress.advance)}
    for header in inputs.headers:
        check_unchanged(header)
    return tuple(record for plan in plans if (record := done[plan.name]))


def _check_space(partial: Path, plans: list[FilePlan]) -> None:
    needed = sum(plan.data_size for plan in plans)
    place = next(directory for directory in partial.parents if directory.exists())
    with storage_errors(place):
        free = shutil.disk_usage(place).free
    if needed > free:
        raise RunError(f"{place}: {needed:,} bytes are needed, {free:,} are free; free some space and run again")
