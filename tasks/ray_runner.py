"""Prefect's task runner for Ray, as the writing of files needs it. Imported only where Ray is asked for."""

import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import ray
from prefect import State, Task
from prefect.client.schemas.objects import TaskRun
from prefect.events.worker import EventsWorker
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from prefect_ray.task_runners import PrefectRayFuture
from ray.exceptions import RayError, RayTaskError

from model.errors import RunError

PATIENCE_S = 10.0
"""How long a cluster may take to answer at all."""


class ClusterRunner(RayTaskRunner[Any]):  # type: ignore[misc] # its library has no types
    """``RayTaskRunner`` that leaves nothing behind: like the other runners it cancels and waits at its end."""

    _submitted: list[Any]

    def submit(self, task: Task[..., Any], *arguments: Any, **named: Any) -> PrefectRayFuture[Any]:
        """See ``TaskRunner``."""
        task = task.with_options(on_completion=[_send_all], on_failure=[_send_all])
        future = super().submit(task, *arguments, **named)
        self._submitted.append(future.wrapped_future)
        return future

    def __enter__(self) -> "ClusterRunner":
        self._submitted = []
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _, pending = ray.wait(self._submitted, num_returns=len(self._submitted), timeout=0)
        for reference in pending:
            ray.cancel(reference)
        ray.wait(pending, num_returns=len(pending))
        super().__exit__(*error)


@contextmanager
def cluster(workers: int, address: str | None) -> Iterator[ClusterRunner]:
    """A runner of at most ``workers`` tasks at a time on each machine of the cluster at ``address``.

    None starts a cluster on this machine. Raises ``RunError`` where none answers, or a worker dies.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
    options = {} if address else {"num_cpus": workers, "include_dashboard": False}
    with ExitStack() as held:
        try:
            if address:
                _check_answers(address)
            runner = held.enter_context(ClusterRunner(address or "local", init_kwargs=options))
        except (OSError, ValueError) as error:
            raise RunError(
                f"ray_address {address}: no Ray cluster answers: {_said(error)}; check the address and, where the "
                "cluster asks for a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN"
            ) from error
        held.enter_context(remote_options(num_cpus=_share(workers), max_retries=0))
        try:
            yield runner
        except RayError as error:
            raise RunError(f"Ray: {_said(error)}; run again: finished files are kept") from error


def _send_all(task: Task[..., Any], run: TaskRun, state: State[Any]) -> None:
    """Bring log and state to the server: Ray ends its workers without asking what they still had to say."""
    EventsWorker.instance().wait_until_empty()
    for handler in logging.getLogger("prefect.task_runs").handlers:
        handler.flush()


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes."""
    place = urlsplit(address if "://" in address else f"ray://{address}")
    if place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), PATIENCE_S).close()


def _share(workers: int) -> int:
    """How many of a machine's processors a task must claim, for no machine to run more than ``workers`` at a time."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    most: float = max(node["Resources"].get("CPU", 0) for node in nodes if node["Alive"])
    return max(1, math.ceil(most / workers))


def _said(error: Exception) -> str:
    """One line of what Ray says on many."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause else error
    return str(cause).strip().partition("\n")[0]
