"""Which failures a task may meet again with better luck."""

from typing import Any

from prefect.client.schemas.objects import State
from prefect.tasks import Task, exponential_backoff

from model.checkpoint.hub_errors import TransientError

RETRIES = 5

DELAYS = exponential_backoff(backoff_factor=2)
"""Seconds before each retry: 2, 4, 8, …"""

JITTER = 0.5
"""Tasks that failed together do not come back together."""


def may_go_away(task: Task[..., Any], run: Any, state: State[Any]) -> bool:
    """Whether the failure is one of the network or the hub; a damaged file or a refused plan stays one."""
    return isinstance(state.data, TransientError)
