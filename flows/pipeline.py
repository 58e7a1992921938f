"""The pipeline: source → BF16 where asked → shards, in a staging place → proof → publication → warm-up → reply."""

import hashlib
import json
from pathlib import Path

from prefect import flow
from prefect.logging import get_run_logger
from prefect.transactions import transaction
from rich.filesize import decimal

from flows.parameters import PipelineParameters
from model.checkpoint.convert import check_output
from model.checkpoint.describe import PlanSummary
from model.checkpoint.jobs import Spread
from model.checkpoint.locate import check_revision, download_directory, is_hub_id
from model.checkpoint.released import RELEASED_SUFFIX, ReleasedError, discard, forget
from model.checkpoint.verify import VerificationError
from tasks import reports, tables
from tasks.caching import STAGE_VERSIONS
from tasks.launches import reply, warm_up
from tasks.publication import publish, release_intermediates
from tasks.results import CheckpointResult, DequantizedResult, Result, SourceResult, ValidationResult, WarmUpResult
from tasks.source import download, local_source, resolve_revision
from tasks.spreading import spread_by
from tasks.stages import convert, dequantize, plan, validate

READERS_OF_INTERMEDIATES = ("plan", "dequantize", "convert", "validate")
"""Stages that read the download or the BF16 directory: a new version of one needs them again."""


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

    Every stage that an earlier run finished, and whose files are still there, is taken from the cache. Raises
    ``InputError`` before anything is written where the source or the parameters cannot be used.
    """
    out = params.out.absolute()
    check_revision(params.source, params.revision)
    check_output(out)
    purpose = _purpose(params)
    try:
        made = _make(params, out, purpose)
    except ReleasedError as error:
        get_run_logger().info("made again: %s", error)
        _forget_released(params)
        made = _make(params, out, purpose)
    source, dequantized, shards, validation = made
    checkpoint = publish(shards, validation)
    release_intermediates(checkpoint, source, dequantized, params.keep_intermediates, purpose)
    warmed = warm_up(checkpoint, params.warm_up_timeout_s, params.gpu_limit)
    text = _reply(params, checkpoint)
    result = PipelineResult(source=source, checkpoint=checkpoint, validation=validation, warm_up=warmed, reply=text)
    reports.report_summary(_summary(result))
    return result


def _make(
    params: PipelineParameters, out: Path, purpose: str
) -> tuple[SourceResult, DequantizedResult | None, CheckpointResult, ValidationResult]:
    """From the source to proven shards. Raises ``ReleasedError`` where a stage that must run lacks its input."""
    source = _obtain(params, purpose)
    planned = plan(source, params.mp, params.weights, params.mtp).summary
    dequantized = _dequantize(params, source, planned, purpose)
    shards, validation = _convert_and_validate(params, source, dequantized or source, planned, out)
    return source, dequantized, shards, validation


def _forget_released(params: PipelineParameters) -> None:
    for note in params.work_directory.rglob("*" + RELEASED_SUFFIX):
        forget(note.with_name(note.name.removesuffix(RELEASED_SUFFIX)))


def _purpose(params: PipelineParameters) -> str:
    """For what this run makes its intermediates, as a digest: for which output, and by which versions of stages."""
    facts = params.model_dump(mode="json", include={"source", "out", "mp", "weights", "dequantize", "mtp"})
    facts["versions"] = [STAGE_VERSIONS[stage] for stage in READERS_OF_INTERMEDIATES]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _obtain(params: PipelineParameters, purpose: str) -> SourceResult:
    if not is_hub_id(params.source):
        return local_source(params.source)
    commit = resolve_revision(params.source, params.revision)
    return download(params.source, commit, params.work_directory / "hub", purpose)


def _dequantize(
    params: PipelineParameters, source: SourceResult, planned: PlanSummary, purpose: str
) -> DequantizedResult | None:
    """The BF16 directory, where there is one to make: BF16 shards of an FP8 source, not dequantised on the way."""
    if (planned.source_weights, planned.weights) != ("fp8", "bf16") or params.dequantize == "fused":
        return None
    return dequantize(source, _bf16_directory(params, source), params.resources, _spread(params), purpose)


def _spread(params: PipelineParameters) -> Spread:
    return spread_by(params.task_runner, params.workers, params.ray_address)


def _bf16_directory(params: PipelineParameters, source: SourceResult) -> Path:
    """One for each source, so that another commit does not meet the leavings of the last."""
    place = params.work_directory / "bf16"
    if source.repo and source.commit:
        return download_directory(place, source.repo, source.commit)
    return place / source.directory.resolve().name


def _convert_and_validate(
    params: PipelineParameters,
    source: SourceResult,
    converted_from: SourceResult | DequantizedResult,
    planned: PlanSummary,
    out: Path,
) -> tuple[CheckpointResult, ValidationResult]:
    """One transaction: shards that fail their proof are remembered by no cache, and none of them stays.

    Only a failed proof removes them. A run that is cancelled or killed while it proves keeps hours of conversion, and
    a checkpoint that was published before is nobody's to remove.
    """
    with transaction():
        what = (converted_from, out, params.mp, planned.weights, params.mtp)
        shards = convert(*what, params.resources, _spread(params))
        try:
            return shards, validate(shards, source)
        except VerificationError:
            if shards.place != out:
                discard(shards.place)
            raise


def _reply(params: PipelineParameters, checkpoint: CheckpointResult) -> str | None:
    if not params.prompt:
        return None
    return reply(checkpoint, params.prompt, params.max_new_tokens, params.warm_up_timeout_s, params.gpu_limit).text


def _summary(result: PipelineResult) -> list[str]:
    origin = f"{result.source.repo} at {result.source.commit}" if result.source.repo else str(result.source.directory)
    size = decimal(sum(file.size for file in result.checkpoint.files))
    lines = [
        f"source: {origin}, {reports.link('plan', 'plan')}",
        f"checkpoint: {result.checkpoint.out} ({result.checkpoint.weights}, mp {result.checkpoint.mp}, {size}), "
        f"{reports.link('shards', 'shards')}",
        f"{tables.validation_fact(result.validation)}, {reports.link('validation', 'validation')}",
        f"warm-up: {len(result.warm_up.ranks)} ranks, two tokens each, {reports.link('warm-up', 'warm-up')}",
    ]
    return [*lines, reports.link("reply", "reply")] if result.reply else lines
