"""The stages between source and published checkpoint, one task each. What they do lies in ``model.checkpoint``."""

from pathlib import Path

from prefect import task

from model.checkpoint.build import Resources
from model.checkpoint.convert import convert_plan, is_finished
from model.checkpoint.dequantize import RECORD, is_damaged
from model.checkpoint.dequantize import dequantize as dequantize_directory
from model.checkpoint.describe import describe
from model.checkpoint.digest import hashed
from model.checkpoint.jobs import Spread
from model.checkpoint.plan import plan_shards
from model.checkpoint.released import discard, require
from model.checkpoint.source import open_source
from model.checkpoint.verify import verify
from tasks import reports
from tasks.caching import OnDisk, this_run
from tasks.progress import StageProgress
from tasks.results import (
    CheckpointResult,
    DequantizedResult,
    PlanResult,
    SourceResult,
    ValidationResult,
    checkpoint_result,
    file_results,
)

HOW = ("resources", "spread")
"""Arguments that decide how a stage works, not what it gives."""

STAGED_SUFFIX = ".staged"
"""Beside the output: where shards lie until they are proven."""


@task(cache_policy=OnDisk(stage="plan"), result_serializer="json")
def plan(source: SourceResult, mp: int, weights: str | None, mtp: str) -> PlanResult:
    """Check everything that headers can tell and report what will be written; nothing is yet."""
    require(source.directory)
    summary = describe(plan_shards(open_source(source.directory, mtp), mp=mp, weights=weights, mtp=mtp))
    reports.report_plan(summary)
    return PlanResult(summary=summary, made_by=this_run())


@task(cache_policy=OnDisk(stage="dequantize", ignored=(*HOW, "purpose")), result_serializer="json")
def dequantize(
    source: SourceResult, out: Path, resources: Resources, spread: Spread, purpose: str
) -> DequantizedResult:
    """FP8 to BF16, a Hugging Face directory that transformers loads; resumed where a killed run stopped.

    Each file is a task of its own where ``spread`` puts it, see ``tasks.spreading``.
    ``purpose`` tells which released directory counts as present, see ``model.checkpoint.released``.
    """
    require(source.directory)
    if is_damaged(out):
        discard(out)
    with StageProgress("dequantize") as progress:
        result = dequantize_directory(source.directory, out, resources=resources, progress=progress, spread=spread)
    files = file_results(result.files)
    return DequantizedResult(directory=out, files=files, record_sha256=hashed(out / RECORD), made_by=this_run())


@task(cache_policy=OnDisk(stage="convert", ignored=HOW), result_serializer="json")
def convert(
    source: SourceResult | DequantizedResult,
    out: Path,
    mp: int,
    weights: str,
    mtp: str,
    resources: Resources,
    spread: Spread,
) -> CheckpointResult:
    """Write the shards of every rank into a staging place beside ``out``; resumed where a killed run stopped.

    Each rank is a task of its own where ``spread`` puts it, see ``tasks.spreading``.
    A finished checkpoint of the same inputs at ``out`` is taken as it is; one that lost a file is made anew.
    """
    require(source.directory)
    wanted = plan_shards(open_source(source.directory, mtp), mp=mp, weights=weights, mtp=mtp)
    staged = out.with_name(out.name + STAGED_SUFFIX)
    place = out if is_finished(out, wanted) else staged
    with StageProgress("convert") as progress:
        manifest = convert_plan(wanted, place, resources=resources, progress=progress, spread=spread)
    reports.report_shards(manifest)
    return checkpoint_result(place, out, manifest, this_run())


@task(cache_policy=OnDisk(stage="validate"), result_serializer="json")
def validate(checkpoint: CheckpointResult, source: SourceResult) -> ValidationResult:
    """Prove that the shards equal their source, tensor for tensor and bit for bit."""
    require(source.directory)
    with StageProgress("validate") as progress:
        proven = verify(checkpoint.place, source.directory, progress)
    result = ValidationResult(
        directory=checkpoint.out,
        files=proven.files,
        tensors=proven.tensors,
        source_tensors=proven.source_tensors,
        source_size=proven.source_size,
        made_by=this_run(),
    )
    reports.report_validation(result)
    return result
