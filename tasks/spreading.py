"""The writing of files, shared out over a Prefect task runner: threads, processes, or a Ray cluster's machines."""

import os
import queue
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from model.checkpoint.jobs import Advance, FileJob, Spread, prepare_worker
from model.checkpoint.manifest import FileRecord
from model.checkpoint.tally import INTERVAL_S, Desk, Tally
from model.errors import InputError, RunError
from model.ranks import end_with_parent

RunnerName = Literal["threads", "processes", "ray"]

Start = Callable[[int], AbstractContextManager[TaskRunner[Any]]]
"""Gives a runner of a number of workers, to be entered."""


def spread_by(runner: RunnerName, workers: int, ray_address: str | None = None) -> Spread:
    """The spread over a runner of ``workers`` files at a time, to be called in a flow or task run.

    On a Ray cluster that is the number for each machine. ``ray_address`` is that of the cluster; None starts one on
    this machine. The machines share the storage under the same paths, and have this project installed.
    """
    starts: dict[RunnerName, Start] = {
        "threads": ThreadPoolTaskRunner,
        "processes": _processes,
        "ray": partial(_ray, address=ray_address),
    }
    return RunnerSpread(starts[runner], workers)


class Assignment:
    """A job, and where its worker tells how far it is.

    A plain class, since Prefect looks for futures in every field of a dataclass: in those of thousands of tensors.
    """

    def __init__(self, job: FileJob, told: Path) -> None:
        self.job, self.told = job, told

    def __str__(self) -> str:
        return self.job.name


@task(persist_result=False, cache_policy=NO_CACHE, task_run_name="write {assignment}")
def write_file(assignment: Assignment) -> FileRecord:
    """One output file, written by whichever worker the runner chose."""
    prepare_worker()
    desk = Desk(assignment.told)
    desk.advance(0)
    record = assignment.job.run(desk.advance)
    get_run_logger().info("%s: written by process %d of %s", record.name, os.getpid(), socket.gethostname())
    return record


@dataclass(frozen=True)
class RunnerSpread:
    """A ``Spread`` over the runner that ``start`` starts for a number of files at a time."""

    start: Start
    workers: int

    def __call__(self, jobs: Sequence[FileJob], advance: Advance) -> Sequence[FileRecord]:
        """See ``Spread``. Leaving the tally tells the workers to stop, leaving the runner waits until they have."""
        with self.start(min(self.workers, len(jobs))) as runner, Tally(jobs, advance) as tally:
            with _server_for_workers():
                assignments = [Assignment(job, tally.path(job)) for job in jobs]
                futures = runner.map(write_file, {"assignment": assignments})  # type: ignore[arg-type]
            return _records(jobs, futures, tally)


def _records(jobs: Sequence[FileJob], futures: Sequence[PrefectFuture[FileRecord]], tally: Tally) -> list[FileRecord]:
    """The records in the order of ``jobs``. Raises the first failure as soon as it is there."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _future, number=number: ended.put(number))  # type: ignore[misc]
    records: dict[int, FileRecord] = {}
    while len(records) < len(jobs):
        try:
            number = ended.get(timeout=INTERVAL_S)
        except queue.Empty:
            tally.read()
            continue
        records[number] = futures[number].result()
        tally.finish(jobs[number])
    return [records[number] for number in range(len(jobs))]


@contextmanager
def _server_for_workers() -> Iterator[None]:
    """Workers in other processes talk to this one's Prefect server, where that is embedded too, or each would start
    a server of its own.
    """
    with get_client(sync_client=True) as client, temporary_settings({PREFECT_API_URL: str(client.api_url)}):
        yield


@contextmanager
def _processes(workers: int) -> Iterator[TaskRunner[Any]]:
    try:
        with ProcessPoolTaskRunner(workers, initializer=end_with_parent, initargs=(os.getpid(),)) as runner:
            yield runner
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process was killed, for want of memory perhaps; run again: finished files are kept"
        ) from error


@contextmanager
def _ray(workers: int, address: str | None) -> Iterator[TaskRunner[Any]]:
    try:
        from tasks.ray_runner import cluster
    except ImportError as error:
        raise InputError(f"task runner ray: {error}; install the extra: pip install 'shardflow[ray]'") from error
    with cluster(workers, address) as runner:
        yield runner
