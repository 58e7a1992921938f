"""Stages that load the shards: each starts the ranks of a command of ``model`` and reads what they print."""

import json

from prefect import task
from prefect.logging import get_run_logger

from model.errors import InputError, RunError
from model.launch import start_ranks
from model.rank_report import RankReport
from tasks import reports
from tasks.caching import OnDisk, this_run
from tasks.gpu import gpu_slot
from tasks.results import CheckpointResult, ReplyResult, WarmUpResult

HOW = ("timeout_s", "gpu_limit")


@task(cache_policy=OnDisk(stage="warm-up", ignored=HOW), result_serializer="json")
def warm_up(checkpoint: CheckpointResult, timeout_s: float, gpu_limit: str | None = None) -> WarmUpResult:
    """Load the shards on every rank and generate two tokens; ended after ``timeout_s`` seconds whatever happens."""
    with gpu_slot(gpu_limit):
        report = json.loads(_output_of("model.warmup", [str(checkpoint.out)], checkpoint.mp, timeout_s))
    result = WarmUpResult(ranks=tuple(RankReport(**rank) for rank in report["ranks"]), made_by=this_run())
    reports.report_warm_up(result)
    return result


@task(cache_policy=OnDisk(stage="reply", ignored=HOW), result_serializer="json")
def reply(
    checkpoint: CheckpointResult, prompt: str, max_new_tokens: int, timeout_s: float, gpu_limit: str | None = None
) -> ReplyResult:
    """The greedy reply to one prompt."""
    arguments = [str(checkpoint.out), f"--prompt={prompt}", "--max-new-tokens", str(max_new_tokens)]
    with gpu_slot(gpu_limit):
        text = _output_of("model.generate", arguments, checkpoint.mp, timeout_s).rstrip("\n")
    reports.report_reply(prompt, text)
    return ReplyResult(text=text, made_by=this_run())


def _output_of(module: str, arguments: list[str], mp: int, timeout_s: float) -> str:
    """Standard output of the ranks; what they say on standard error goes to the run's log.

    Raises ``InputError`` or ``RunError`` with the ranks' own ``error:`` lines where they end with status 2 or 1, and
    ``start_ranks``'s own ``RunError``, which holds their last words, where a signal or the time limit ends them.
    """
    finished = start_ranks(module, arguments, mp, timeout=timeout_s, capture=True)
    said = [line for line in (finished.stderr or "").splitlines() if line.strip()]
    for line in said:
        get_run_logger().info("%s: %s", module, line)
    if finished.returncode != 0:
        problems = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        kind = InputError if finished.returncode == InputError.exit_status else RunError
        raise kind(problems or [f"{module} ended with status {finished.returncode}: {said[-1] if said else 'no word'}"])
    return finished.stdout or ""
