"""The writing of one output file as a job of its own, which a thread, a process or another machine can take over."""

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from model.checkpoint.bands import write_bands
from model.checkpoint.digest import remember
from model.checkpoint.headers import FileStamp
from model.checkpoint.layout import FilePlan
from model.checkpoint.manifest import FileRecord
from model.checkpoint.memory import return_freed_memory, write_buffer
from model.checkpoint.reader import TensorReader
from model.checkpoint.storage import json_bytes, storage_errors, write_atomically
from model.checkpoint.writer import ShardWriter
from model.errors import RunError

Advance = Callable[[int], None]
"""Is told of bytes that are done, and raises where the work is to stop."""


@dataclass(frozen=True)
class FileJob:
    """All that writing one file takes; it travels between processes, so it holds of the source only what it reads.

    ``block`` is the (rows, columns) that one FP8 scale covers, ``memory`` the bytes that the job may use.
    """

    plan: FilePlan
    stamps: tuple[FileStamp, ...]
    block: tuple[int, int]
    partial: Path
    memory: int

    @property
    def name(self) -> str:
        """The file's name."""
        return self.plan.name

    @property
    def size(self) -> int:
        """Bytes that ``run`` tells of in all."""
        return self.plan.data_size

    def run(self, advance: Advance) -> FileRecord:
        """Write the file, and note that it is finished. Raises ``RunError`` where reading or writing fails."""
        path = self.partial / "files" / self.name
        buffer = write_buffer(self.memory)
        with TensorReader(self.stamps) as reader, ShardWriter(path, self.plan, buffer) as writer:
            write_bands(self.plan, reader, writer, self.block, self.memory - 2 * buffer, advance)
        record = FileRecord(self.name, writer.size, writer.sha256, len(self.plan.targets))
        remember(path, record.sha256)
        with storage_errors(path):
            write_atomically(note(self.partial, self.name), json_bytes(dataclasses.asdict(record)))
        return record


class Spread(Protocol):
    """Shares jobs out to workers: at most as many at a time on one machine as share its memory."""

    def __call__(self, jobs: Sequence[FileJob], advance: Advance) -> Sequence[FileRecord]:
        """Run ``jobs``; returns their records in order. The first failure stops the others, and is raised once no
        worker is at work any more.
        """


@dataclass(frozen=True)
class Threads:
    """The spread that needs nothing but this process."""

    workers: int

    def __call__(self, jobs: Sequence[FileJob], advance: Advance) -> Sequence[FileRecord]:
        """See ``Spread``."""
        stop = threading.Event()

        def advance_unless_stopped(size: int) -> None:
            if stop.is_set():
                raise stopped()
            advance(size)

        with ThreadPoolExecutor(self.workers, initializer=prepare_worker) as pool:
            futures = [pool.submit(job.run, advance_unless_stopped) for job in jobs]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                failures = [failure for future in futures if future.done() and (failure := future.exception())]
                if failures:
                    raise failures[0]
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]


def prepare_worker() -> None:
    """To be called in each thread that runs jobs.

    One thread of torch for each worker: two that wait for each other on a busy core are ten times slower.
    """
    torch.set_num_threads(1)
    return_freed_memory()


def stopped() -> RunError:
    """How a job ends that others' failure ends."""
    return RunError("stopped: another worker failed or the run was interrupted")


def jobs_for(
    plans: Sequence[FilePlan], stamps: Sequence[FileStamp], block: tuple[int, int], partial: Path, memory: int
) -> list[FileJob]:
    """One job for each of ``plans``, of which each may use ``memory`` bytes."""
    by_path = {stamp.path: FileStamp(stamp.path, stamp.size, stamp.mtime_ns) for stamp in stamps}
    return [FileJob(plan, tuple(by_path[path] for path in plan.sources()), block, partial, memory) for plan in plans]


def finished(partial: Path, plan: FilePlan) -> FileRecord | None:
    """The record of a file that an earlier run finished; an unreadable note notes nothing."""
    path = partial / "files" / plan.name
    try:
        record = FileRecord(**json.loads(note(partial, plan.name).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return record if path.is_file() and record.size == path.stat().st_size else None


def note(partial: Path, name: str) -> Path:
    """Where it is noted that the file ``name`` is finished: its size and digest."""
    return partial / "done" / f"{name}.json"
