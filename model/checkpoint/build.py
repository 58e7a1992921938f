"""Building an output directory that is either finished or absent, and that a killed run can take up again.

Beside ``OUT`` lies ``OUT.partial`` while the work lasts::

    OUT.partial/resume.json      of what and how: another source or option may not go on here
    OUT.partial/lock             held by the one run at work (released by the system when that dies)
    OUT.partial/done/<file>.json size and digest of each finished file
    OUT.partial/files/           becomes OUT, by one rename, when all is there
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.bands import write_bands
from model.checkpoint.digest import remember
from model.checkpoint.headers import FileHeader
from model.checkpoint.layout import FilePlan
from model.checkpoint.manifest import FileRecord
from model.checkpoint.progress import Progress
from model.checkpoint.reader import TensorReader, check_unchanged
from model.checkpoint.storage import fsync_directory, json_bytes, storage_errors, write_atomically
from model.checkpoint.writer import ShardWriter
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
    """What a build may use: ``max_memory`` bytes beyond the interpreter, shared among ``workers`` threads."""

    max_memory: int = DEFAULT_MAX_MEMORY
    workers: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InputError(f"workers = {self.workers} is not at least 1")
        if self.max_memory < 1:
            raise InputError(f"max_memory = {self.max_memory} bytes is not positive")


def check_vacant(out: Path) -> None:
    """Raise ``InputError`` if ``out`` exists and is not an empty directory."""
    with storage_errors(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out}: exists and is not empty; choose another place or remove it")


@contextlib.contextmanager
def work_directory(out: Path, identity: dict[str, Any]) -> Iterator[Path]:
    """Hold ``out``'s partial directory for work of this ``identity``, and publish its files as ``out`` at the end.

    Raises ``InputError`` where ``out`` is taken, another run is at work, or the partial directory belongs to
    other inputs or options. An error in the block leaves the finished files for the next run.
    """
    check_vacant(out)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    with storage_errors(partial):
        (partial / "files").mkdir(parents=True, exist_ok=True)
        (partial / "done").mkdir(exist_ok=True)
    with _lock(partial / "lock", out):
        check_vacant(out)
        resume = partial / "resume.json"
        if resume.exists() and json.loads(resume.read_text()) != json.loads(json_bytes(identity)):
            raise InputError(
                f"{partial}: holds unfinished work on another source or with other options; "
                "finish that, remove the directory, or choose another place"
            )
        with storage_errors(partial):
            write_atomically(resume, json_bytes(identity))
        yield partial
        with storage_errors(out):
            fsync_directory(partial / "files")
            (partial / "files").rename(out)
            fsync_directory(out.parent)
            shutil.rmtree(partial)


@contextlib.contextmanager
def _lock(path: Path, out: Path) -> Iterator[None]:
    with storage_errors(path), path.open("w") as file:
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
) -> tuple[FileRecord, ...]:
    """Write every planned file that ``partial`` does not hold yet; returns the records of all, in order.

    Files are shared out to worker threads, each with its own reader and part of the memory.
    """
    done = {plan.name: _finished(partial, plan) for plan in plans}
    remaining = [plan for plan in plans if done[plan.name] is None]
    _check_space(partial, sum(plan.data_size for plan in remaining))
    progress.phase(label, sum(plan.data_size for plan in plans))
    progress.advance(sum(plan.data_size for plan in plans if done[plan.name]))
    stop = threading.Event()

    def advance(size: int) -> None:
        if stop.is_set():
            raise RunError("stopped: another worker failed or the run was interrupted")
        progress.advance(size)

    workers = min(resources.workers, len(remaining)) or 1
    memory = resources.max_memory // workers
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(_build_file, plan, inputs, partial, memory, advance): plan for plan in remaining}
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failures = [failure for future in futures if future.done() and (failure := future.exception())]
            if failures:
                raise failures[0]
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    done |= {plan.name: future.result() for future, plan in futures.items()}
    for header in inputs.headers:
        check_unchanged(header)
    return tuple(record for plan in plans if (record := done[plan.name]))


def _build_file(
    plan: FilePlan, inputs: Inputs, partial: Path, memory: int, advance: Callable[[int], None]
) -> FileRecord:
    path = partial / "files" / plan.name
    with TensorReader(inputs.headers) as reader, ShardWriter(path, plan) as writer:
        write_bands(plan, reader, writer, inputs.block, memory, advance)
    record = FileRecord(plan.name, writer.size, writer.sha256, len(plan.targets))
    remember(path, record.sha256)
    with storage_errors(path):
        write_atomically(_note(partial, plan.name), json_bytes(dataclasses.asdict(record)))
    return record


def _finished(partial: Path, plan: FilePlan) -> FileRecord | None:
    note, path = _note(partial, plan.name), partial / "files" / plan.name
    if not note.exists() or not path.exists():
        return None
    record = FileRecord(**json.loads(note.read_text()))
    return record if record.size == path.stat().st_size else None


def _note(partial: Path, name: str) -> Path:
    return partial / "done" / f"{name}.json"


def _check_space(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise RunError(
            f"{partial.parent}: {needed:,} bytes are needed, {free:,} are free; free some space and run again"
        )
