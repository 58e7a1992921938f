"""The stages between source and served shards, one task each. What they do lies in ``model.checkpoint``."""

from pathlib import Path

from prefect import task

from model.checkpoint.build import Resources
from model.checkpoint.convert import convert_plan
from model.checkpoint.dequantize import dequantize as dequantize_directory
from model.checkpoint.describe import PlanSummary, describe
from model.checkpoint.manifest import MANIFEST, read_manifest
from model.checkpoint.plan import Plan, plan_shards
from model.checkpoint.source import open_source
from model.checkpoint.storage import fsync_directory, storage_errors
from model.checkpoint.verify import verify
from model.errors import InputError
from tasks import reports
from tasks.progress import StageProgress
from tasks.results import (
    CheckpointResult,
    DequantizedResult,
    ValidationResult,
    checkpoint_result,
    file_results,
)


def plan_of(source: Path, mp: int, weights: str | None, mtp: str) -> Plan:
    """The plan of a conversion, from headers alone. Raises ``InputError`` for everything they can tell."""
    return plan_shards(open_source(source, mtp), mp=mp, weights=weights, mtp=mtp)


@task(persist_result=False)
def plan(source: Path, mp: int, weights: str | None, mtp: str) -> PlanSummary:
    """Check everything that headers can tell and report what will be written; nothing is yet."""
    summary = describe(plan_of(source, mp, weights, mtp))
    reports.report_plan(summary)
    return summary


@task(persist_result=False)
def dequantize(source: Path, out: Path, resources: Resources) -> DequantizedResult:
    """FP8 to BF16, a Hugging Face directory that transformers loads; resumed where a killed run stopped."""
    with StageProgress("dequantize") as progress:
        result = dequantize_directory(source, out, resources=resources, progress=progress)
    return DequantizedResult(directory=out, files=file_results(result.files))


@task(persist_result=False)
def convert(source: Path, out: Path, mp: int, weights: str | None, mtp: str, resources: Resources) -> CheckpointResult:
    """The shards of every rank and their manifest; resumed where a killed run stopped."""
    with StageProgress("convert") as progress:
        manifest = convert_plan(plan_of(source, mp, weights, mtp), out, resources=resources, progress=progress)
    reports.report_shards(manifest)
    return checkpoint_result(out, manifest)


@task(persist_result=False)
def validate(checkpoint: Path, source: Path) -> ValidationResult:
    """Prove that the shards equal their source, tensor for tensor and bit for bit."""
    with StageProgress("validate") as progress:
        proven = verify(checkpoint, source, progress)
    result = ValidationResult(
        directory=checkpoint,
        files=proven.files,
        tensors=proven.tensors,
        source_tensors=proven.source_tensors,
        source_size=proven.source_size,
    )
    reports.report_validation(result)
    return result


@task(persist_result=False)
def publish(staged: Path, out: Path) -> CheckpointResult:
    """Rename a validated checkpoint into its place, where an earlier run has not done so already."""
    if staged != out:
        if (out / MANIFEST).exists():
            raise InputError(f"{out}: another run has published there meanwhile; remove {staged} or {out}")
        with storage_errors(out):
            staged.rename(out)
            fsync_directory(out.parent)
    return checkpoint_result(out, read_manifest(out))
