"""The pipeline: source → BF16 where asked → shards, in a staging place → proof → publication → warm-up → reply."""

import shutil
from pathlib import Path

from prefect import flow
from rich.filesize import decimal

from flows.parameters import PipelineParameters
from model.checkpoint.convert import check_output
from model.checkpoint.describe import PlanSummary
from model.checkpoint.locate import check_revision, download_directory, is_hub_id
from model.checkpoint.manifest import MANIFEST
from model.checkpoint.verify import VerificationError
from tasks import reports, tables
from tasks.launches import reply, warm_up
from tasks.results import CheckpointResult, Result, SourceResult, ValidationResult, WarmUpResult
from tasks.source import download, resolve_revision, take_local
from tasks.stages import convert, dequantize, plan, publish, validate


class PipelineResult(Result):
    """What one run gave."""

    source: SourceResult
    checkpoint: CheckpointResult
    validation: ValidationResult
    warm_up: WarmUpResult
    reply: str | None = None


@flow(name="checkpoint-pipeline", flow_run_name="{params.source} to mp{params.mp}", persist_result=False)
def checkpoint_pipeline(params: PipelineParameters) -> PipelineResult:
    """Turn one checkpoint into shards that are proven equal to it and warmed up.

    Raises ``InputError`` before anything is written where the source or the parameters cannot be used.
    """
    out = params.out.absolute()
    check_revision(params.source, params.revision)
    check_output(out)
    source = _obtain(params)
    planned = plan(source.directory, params.mp, params.weights, params.mtp)
    shards = _convert(params, source, planned, out)
    validation = _validate(shards, source, out)
    checkpoint = publish(shards.directory, out)
    warmed = warm_up(out, params.mp, params.warm_up_timeout_s)
    answer = (
        reply(out, params.mp, params.prompt, params.max_new_tokens, params.warm_up_timeout_s) if params.prompt else None
    )
    result = PipelineResult(source=source, checkpoint=checkpoint, validation=validation, warm_up=warmed, reply=answer)
    reports.report_summary(_summary(result))
    return result


def _obtain(params: PipelineParameters) -> SourceResult:
    if not is_hub_id(params.source):
        return take_local(params.source)
    commit = resolve_revision(params.source, params.revision)
    return download(params.source, commit, params.work_directory / "hub")


def _convert(params: PipelineParameters, source: SourceResult, planned: PlanSummary, out: Path) -> CheckpointResult:
    """Into a staging place beside ``out``, unless an earlier run finished that: then it is only checked."""
    directory = source.directory
    if planned.source_weights == "fp8" and planned.weights == "bf16" and params.dequantize != "fused":
        directory = dequantize(directory, _bf16_directory(params, source), params.resources).directory
    target = out if (out / MANIFEST).exists() else out.with_name(out.name + ".staged")
    return convert(directory, target, params.mp, planned.weights, params.mtp, params.resources)


def _validate(shards: CheckpointResult, source: SourceResult, out: Path) -> ValidationResult:
    """Shards that fail leave nothing behind, or every later run would find them finished and fail again."""
    try:
        return validate(shards.directory, source.directory)
    except VerificationError:
        if shards.directory != out:
            shutil.rmtree(shards.directory)
        raise


def _bf16_directory(params: PipelineParameters, source: SourceResult) -> Path:
    """One for each source, so that another commit does not meet the leavings of the last."""
    place = params.work_directory / "bf16"
    if source.repo and source.commit:
        return download_directory(place, source.repo, source.commit)
    return place / source.directory.resolve().name


def _summary(result: PipelineResult) -> list[str]:
    origin = f"{result.source.repo} at {result.source.commit}" if result.source.repo else str(result.source.directory)
    size = decimal(sum(file.size for file in result.checkpoint.files))
    return [
        f"source: {origin}",
        f"checkpoint: {result.checkpoint.directory} ({result.checkpoint.weights}, mp {result.checkpoint.mp}, {size})",
        tables.validation_fact(result.validation),
        f"warm-up: {len(result.warm_up.ranks)} ranks, two tokens each",
    ]
