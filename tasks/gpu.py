"""The GPU as something that one run has at a time: a global concurrency limit of the Prefect server."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.concurrency.sync import concurrency


@contextmanager
def gpu_slot(limit: str | None) -> Iterator[None]:
    """Hold one slot of the global concurrency limit of that name; None: hold nothing.

    The limit must exist (``prefect gcl create gpu --limit 1``): one that is missing is an error, not a free pass. The
    slot is leased, so that it comes back when its holder dies.
    """
    if limit is None:
        yield
        return
    with concurrency(limit, occupy=1, strict=True):
        yield
