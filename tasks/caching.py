"""When a stage need not run again: its key says what it depends on, and its files say whether that still stands."""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.results import ResultStore
from prefect.runtime import task_run

from tasks.results import Result

STAGE_VERSIONS = {
    "download": 1,
    "plan": 1,
    "dequantize": 1,
    "convert": 1,
    "validate": 1,
    "publish": 1,
    "release": 1,
    "warm-up": 1,
    "reply": 1,
}
"""Raise a stage's number when what it does changes: its earlier results, and those after it, no longer count."""

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def this_run() -> str:
    """The id of the task run at work, by which later stages know which execution their input is of."""
    return str(task_run.id)


def stage_key(stage: str, inputs: dict[str, Any], ignored: tuple[str, ...] = ()) -> str:
    """What decides a stage's result, as a key: its name, its version, and its inputs except the ``ignored``.

    Of an earlier stage's result that is the execution which made it, and the identity of the source.
    """
    facts = {name: _fact(value) for name, value in inputs.items() if name not in ignored}
    text = json.dumps([STAGE_VERSIONS[stage], facts], sort_keys=True, default=str)
    return f"shardflow-{stage}-{hashlib.sha256(text.encode()).hexdigest()}"


def _fact(value: Any) -> Any:
    return value.key_facts() if isinstance(value, Result) else value


@dataclass
class OnDisk(CachePolicy):
    """A cache that looks at the disk: a remembered result counts only while ``Result.is_there`` says so.

    ``ignored`` names arguments that change how a stage runs but not what it gives. Prefect itself only knows that a
    stage succeeded once; it has no deletion, so that a result which no longer stands is made to have expired.
    """

    stage: str = ""
    ignored: tuple[str, ...] = ()

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        """The stage's key, under which nothing is found unless the files are there too."""
        key = stage_key(self.stage, inputs, self.ignored)
        store = task_ctx.result_store
        if store.exists(key):
            problem = _problem(store, key, inputs)
            if problem:
                get_run_logger(task_ctx).info("%s runs again: %s", self.stage, problem)
                expired = store.create_result_record(None, key=key, expiration=LONG_AGO)  # type: ignore[arg-type]  # any datetime will do
                store.persist_result_record(expired)
        return key


def _problem(store: ResultStore, key: str, inputs: dict[str, Any]) -> str | None:
    """Why the remembered result of ``key`` does not count; None if it does."""
    try:
        result = store.read(key).result
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its remembered result cannot be read ({type(error).__name__}: {error})"
    if not isinstance(result, Result):
        return f"its remembered result is a {type(result).__name__}"
    return None if result.is_there(inputs) else "what it wrote is gone or has another size"
