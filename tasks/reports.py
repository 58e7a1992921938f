"""The reports of a run, as Prefect artifacts that a person reads: from the plan to a summary of the whole."""

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.settings import get_current_settings

from model.checkpoint.describe import PlanSummary
from model.checkpoint.manifest import Manifest
from tasks.results import ValidationResult, WarmUpResult
from tasks.tables import plan_facts, plan_rows, shard_rows, validation_fact, warm_up_rows


def report_plan(summary: PlanSummary) -> None:
    """The plan table, with what is left out and why."""
    create_table_artifact(plan_rows(summary), key="plan", description="\n\n".join(plan_facts(summary)))


def report_shards(manifest: Manifest) -> None:
    """The shard table."""
    description = f"mp {manifest.mp}, {manifest.weights} weights, MTP layers: {manifest.mtp}"
    create_table_artifact(shard_rows(manifest), key="shards", description=description)


def report_validation(result: ValidationResult) -> None:
    """What was proven."""
    create_markdown_artifact(validation_fact(result), key="validation", description="Shards against their source")


def report_warm_up(result: WarmUpResult) -> None:
    """The table of ranks."""
    create_table_artifact(warm_up_rows(result), key="warm-up", description="Two tokens on every rank")


def report_reply(prompt: str, text: str) -> None:
    """A prompt and what the shards say to it."""
    quoted = "\n".join(f"> {line}" for line in text.splitlines())
    create_markdown_artifact(f"**{prompt}**\n\n{quoted}", key="reply", description="A greedy reply of the shards")


def link(text: str, key: str) -> str:
    """Markdown that leads to the artifact of that key in the UI; the text alone where no UI is known."""
    ui = get_current_settings().ui_url
    return f"[{text}]({str(ui).rstrip('/')}/artifacts/key/{key})" if ui else text


def report_summary(lines: list[str]) -> None:
    """The whole run on one page."""
    create_markdown_artifact("\n".join(f"- {line}" for line in lines), key="summary", description="The run in brief")
