"""How far an evaluation is: a bar where standard error is a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL_S = 5.0
"""Seconds between two lines."""

Advance = Callable[[int, str], None]
"""Told how many more steps are done, and what is known by now."""


@contextmanager
def shown_progress(label: str, total: int, unit: str, *, quiet: bool = False) -> Iterator[Advance]:
    """Progress on standard error through ``total`` steps; nothing with ``quiet``, as on all ranks but the first."""
    if quiet:
        yield _nothing
    elif sys.stderr.isatty():
        with _bar(label, total, unit) as advance:
            yield advance
    else:
        yield _lines(label, total, unit)


def _nothing(_size: int, _note: str) -> None:
    """Shows nothing."""


@contextmanager
def _bar(label: str, total: int, unit: str) -> Iterator[Advance]:
    from tqdm import tqdm

    with tqdm(desc=label, total=total, unit=f" {unit}", file=sys.stderr) as bar:

        def advance(size: int, note: str) -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update(size)

        yield advance


def _lines(label: str, total: int, unit: str) -> Advance:
    done, told = 0, time.monotonic()

    def advance(size: int, note: str) -> None:
        nonlocal done, told
        done += size
        if done >= total or time.monotonic() - told >= INTERVAL_S:
            told = time.monotonic()
            said = f"{label}: {done:,} of {total:,} {unit}"
            print(f"{said}, {note}" if note else said, file=sys.stderr, flush=True)

    return advance
