"""How far a stage is, where its watchers look: the run's log, a progress artifact, and a terminal if there is one."""

import logging
import sys
import threading
import time
from types import TracebackType
from uuid import UUID

from httpx import HTTPError
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from rich.filesize import decimal

from tasks.terminal import TerminalProgress

INTERVAL_S = 5.0
"""Seconds between two updates: often enough to watch, seldom enough for a night-long run."""


class StageProgress:
    """Progress of one task run. Enter it in the task's own thread; ``advance`` may come from any."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._log: logging.Logger | logging.LoggerAdapter[logging.Logger] = get_run_logger()
        self._lock = threading.Lock()
        self._bars = TerminalProgress() if sys.stderr.isatty() else None
        self._label, self._total, self._done = "", 0, 0
        self._began = self._told = 0.0
        self._artifact: UUID | None = None

    def __enter__(self) -> "StageProgress":
        if self._bars:
            self._bars.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.__exit__(kind, error, trace)
        if kind is None:
            self._end_phase()

    def phase(self, label: str, total: int) -> None:
        """Begin a phase of ``total`` bytes."""
        self._end_phase()
        self._label, self._total, self._done = label, total, 0
        self._began = self._told = time.monotonic()
        key = f"{self._stage}-progress"
        artifact = create_progress_artifact(0.0, key=key, description=f"{label}: {decimal(total)}")
        assert isinstance(artifact, UUID), "a synchronous call returns the artifact's id"
        self._artifact = artifact
        self._log.info("%s: %s to go", label, decimal(total))
        if self._bars:
            self._bars.phase(label, total)

    def advance(self, size: int) -> None:
        """``size`` more bytes are done."""
        if self._bars:
            self._bars.advance(size)
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._told < INTERVAL_S:
                return
            self._told = now
            share = 100 * self._done / max(self._total, 1)
            rate = self._done / (now - self._began)
            left = (self._total - self._done) / rate if rate else 0.0
            if not self._bars:  # a line written into a moving bar spoils both
                facts = (self._label, share, decimal(self._total), decimal(int(rate)), left)
                self._log.info("%s: %.0f %% of %s, %s/s, %.0f s left", *facts)
            self._show(min(share, 100.0))

    def _end_phase(self) -> None:
        if self._artifact is None:
            return
        if self._bars:
            self._bars.pause()
        seconds = time.monotonic() - self._began
        self._show(100.0)
        self._log.info("%s: %s in %.1f s", self._label, decimal(self._done), seconds)
        self._artifact = None

    def _show(self, share: float) -> None:
        """Move the artifact. A server that does not answer for a moment must not end a night's conversion."""
        if self._artifact is None:
            return
        try:
            update_progress_artifact(self._artifact, share)
        except (HTTPError, PrefectException) as error:
            self._log.warning("progress artifact of %s not updated: %s", self._label, error)
