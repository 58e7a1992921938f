"""Progress bars and tables for a person at a terminal; all of it on standard error, so that results stay clean."""

import threading
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from model.checkpoint.describe import PlanSummary
from tasks.tables import plan_facts, plan_rows


def stderr() -> Console:
    """A console on standard error."""
    return Console(stderr=True, highlight=False)


class TerminalProgress:
    """One bar for each phase of a stage; where standard error is no terminal, only its last state is printed."""

    def __init__(self, console: Console | None = None) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console or stderr(),
        )
        self._current: TaskID | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()

    def pause(self) -> None:
        """Leave the last bar as it is, and the terminal to whoever writes next."""
        self._bars.stop()
        if self._current is not None:
            self._bars.remove_task(self._current)
            self._current = None

    def phase(self, label: str, total: int) -> None:
        """A new bar."""
        self._bars.start()
        self._current = self._bars.add_task(label, total=total)

    def advance(self, size: int) -> None:
        """Move the newest bar."""
        with self._lock:
            if self._current is not None:
                self._bars.advance(self._current, size)


def table(title: str, rows: Sequence[dict[str, object]]) -> Table:
    """``rows`` under their keys; numbers to the right."""
    shown = Table(title=title, title_justify="left", title_style="bold")
    for name in rows[0] if rows else ():
        numeric = all(isinstance(row[name], int | float) for row in rows)
        shown.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    return shown


def show_plan(summary: PlanSummary, console: Console) -> None:
    """The plan as a table and a few facts."""
    console.print(table("plan", plan_rows(summary)))
    for fact in plan_facts(summary):
        console.print(fact)
