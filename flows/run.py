"""The verb ``run``: the whole pipeline from a terminal, with the plan before it and the results after it."""

import logging
import os
from typing import Any

from pydantic import ValidationError

from flows.parameters import PipelineParameters
from model.checkpoint.convert import check_output
from model.checkpoint.describe import describe
from model.checkpoint.locate import check_revision, is_hub_id, local_directory
from model.checkpoint.manifest import read_manifest
from model.checkpoint.plan import plan_shards
from model.checkpoint.source import open_source
from model.errors import InputError, ShardflowError
from tasks import tables
from tasks.terminal import show_plan, stderr, table

PREFECT_SETTINGS = {
    # The embedded server takes about 15 s to start; the default limit of 20 s is too near.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
"""They must stand before Prefect is imported; what the user has set stays."""

ENGINE_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


def without_our_tracebacks(record: logging.LogRecord) -> bool:
    """A log filter: where a run ends in one of the project's own errors, its line says all that a person needs."""
    if record.exc_info and isinstance(record.exc_info[1], ShardflowError):
        record.exc_info = None
    return True


def parameters(given: dict[str, Any]) -> PipelineParameters:
    """The pipeline's parameters. Raises ``InputError`` with the path of each wrong one."""
    try:
        return PipelineParameters(**given)
    except ValidationError as error:
        raise InputError(
            f"{'.'.join(map(str, problem['loc'])) or 'parameters'}: {problem['msg']}" for problem in error.errors()
        ) from error


def run_pipeline(params: PipelineParameters) -> None:
    """Run the flow; results go to standard output, what leads to them to standard error.

    A local source is planned first, so that a bad one is refused at once, before a server starts.
    """
    console = stderr()
    check_revision(params.source, params.revision)
    check_output(params.out)
    if not is_hub_id(params.source):
        source = open_source(local_directory(params.source), params.mtp)
        show_plan(describe(plan_shards(source, mp=params.mp, weights=params.weights, mtp=params.mtp)), console)
    for name, value in PREFECT_SETTINGS.items():
        os.environ.setdefault(name, value)
    from flows.pipeline import checkpoint_pipeline

    for name in ENGINE_LOGGERS:
        logging.getLogger(name).addFilter(without_our_tracebacks)
    result = checkpoint_pipeline(params)
    rows = tables.shard_rows(read_manifest(result.checkpoint.directory))
    console.print(table("shards", [row | {"sha256": row["sha256"][:16] + "…"} for row in rows]))
    console.print(tables.validation_fact(result.validation), style="bold green")
    console.print(table("warm-up", tables.warm_up_rows(result.warm_up)))
    if result.reply is not None:
        print(result.reply)
