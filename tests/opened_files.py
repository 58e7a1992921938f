"""How many files of a directory a piece of code holds open at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class OpenFiles:
    """``now``: descriptors that are open; ``most``: how many were at once."""

    def __init__(self) -> None:
        self.now: set[int] = set()
        self.most = 0


@contextmanager
def counted_open_files(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[OpenFiles]:
    """Count what ``os.open`` opens below ``directory`` in the block."""
    counted, really_open, really_close = OpenFiles(), os.open, os.close

    def counting_open(path, *arguments, **options):
        descriptor = really_open(path, *arguments, **options)
        if str(path).startswith(str(directory)):
            counted.now.add(descriptor)
            counted.most = max(counted.most, len(counted.now))
        return descriptor

    def counting_close(descriptor):
        counted.now.discard(descriptor)
        really_close(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", counting_open)
        patch.setattr(os, "close", counting_close)
        yield counted
