"""How far workers in other processes, or on other machines, are: small files on the storage that they share.

Beside the files that are written lies ``OUT.partial/at-work/<run>/<file>``, the bytes done of each as text. Where its
directory is gone a worker stops, so that those of a killed run end with the next run, wherever they are.
"""

import errno
import math
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from model.checkpoint.jobs import Advance, FileJob, stopped
from model.checkpoint.storage import storage_errors, write_atomically

INTERVAL_S = 1.0
"""Seconds between two words of a worker: the others' delay, too, where one fails."""

DIRECTORY = "at-work"

ABSENT = (errno.ENOENT, errno.ESTALE)
"""ESTALE: another machine replaced the file or removed the directory."""


class Desk:
    """A worker's side: tells how far one job is."""

    def __init__(self, path: Path) -> None:
        self._path, self._done, self._told = path, 0, -math.inf

    def advance(self, size: int) -> None:
        """``size`` more bytes are done. Raises ``RunError`` where the run is over."""
        self._done += size
        now = time.monotonic()
        if now - self._told >= INTERVAL_S:
            self._told = now
            with storage_errors(self._path):
                self._tell()

    def _tell(self) -> None:
        try:
            write_atomically(self._path, str(self._done).encode(), durable=False)
        except OSError as error:
            if error.errno in ABSENT:
                raise stopped() from error
            raise


class Tally:
    """The run's side: a context in which workers may be at work on ``jobs``, all of one partial directory."""

    def __init__(self, jobs: Sequence[FileJob], advance: Advance) -> None:
        self._directory = jobs[0].partial / DIRECTORY / secrets.token_hex(8)
        self._open = {job.name: job for job in jobs}
        self._told = dict.fromkeys(self._open, 0)
        self._advance = advance

    def __enter__(self) -> "Tally":
        with storage_errors(self._directory):
            self._directory.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with storage_errors(self._directory):
            dissolve(self._directory)

    def path(self, job: FileJob) -> Path:
        """Where the worker of ``job`` tells how far it is."""
        return self._directory / job.name

    def read(self) -> None:
        """Advance by what the workers have told since the last time."""
        for job in self._open.values():
            try:
                self._to(job, int(self.path(job).read_bytes()))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise

    def finish(self, job: FileJob) -> None:
        """All of ``job`` is done."""
        self._to(self._open.pop(job.name), job.size)

    def _to(self, job: FileJob, done: int) -> None:
        # Storage that machines share may answer with what was there before.
        if done > self._told[job.name]:
            self._advance(done - self._told[job.name])
            self._told[job.name] = done


def dissolve(directory: Path) -> None:
    """Remove ``directory``; renamed first, so that nobody adds to it meanwhile."""
    gone = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}.gone")
    directory.rename(gone)
    shutil.rmtree(gone)
