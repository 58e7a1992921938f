"""The end of a conversion: a proven checkpoint gets its name, is announced, and what it was made of may go."""

import re
from pathlib import Path
from typing import Any

from prefect import task
from prefect.assets import Asset, add_asset_metadata, materialize

from model.checkpoint.manifest import MANIFEST, check_files, read_manifest
from model.checkpoint.released import discard, release
from model.checkpoint.storage import fsync_directory, storage_errors
from model.errors import InputError
from tasks.caching import OnDisk, this_run
from tasks.results import (
    CheckpointResult,
    DequantizedResult,
    ReleaseResult,
    SourceResult,
    ValidationResult,
    checkpoint_result,
)

ASSET_PREFIX = "shardflow://checkpoint"
LONGEST_PATH = 480
"""Prefect takes keys of up to 512 characters."""

NOT_IN_ASSET_KEYS = re.compile(r"[^\w./:@=+,~-]")


def checkpoint_asset(out: Path) -> str:
    """The asset key of the checkpoint at ``out``; characters that Prefect takes in none become underscores.

    A path that is too long keeps its end, which tells most.
    """
    return ASSET_PREFIX + "/" + NOT_IN_ASSET_KEYS.sub("_", str(out)).lstrip("/")[-LONGEST_PATH:]


def publish(checkpoint: CheckpointResult, validation: ValidationResult) -> CheckpointResult:
    """Rename a validated checkpoint into its place, as a task that materializes its asset unless it is cached."""
    asset = Asset(key=checkpoint_asset(checkpoint.out))
    published: CheckpointResult = _publish.with_options(assets=[asset])(checkpoint, validation)
    return published


@materialize(
    f"{ASSET_PREFIX}/any", name="publish", cache_policy=OnDisk(stage="publish"), result_serializer="json"
)  # fmt: skip
def _publish(checkpoint: CheckpointResult, validation: ValidationResult) -> CheckpointResult:
    staged, out = checkpoint.place, checkpoint.out
    if staged != out:
        with storage_errors(out):
            _replace(out, staged)
    manifest = read_manifest(out)
    result = checkpoint_result(out, out, manifest, this_run())
    add_asset_metadata(checkpoint_asset(out), _asset_metadata(result))
    return result


def _asset_metadata(result: CheckpointResult) -> dict[str, Any]:
    """What the materialization event tells the runs that it starts."""
    return {
        "checkpoint": str(result.out),
        "mp": result.mp,
        "weights": result.weights,
        "manifest_sha256": result.manifest_sha256,
    }


def _replace(out: Path, staged: Path) -> None:
    """Give ``staged`` the name ``out``; a checkpoint of the same inputs that lost a file makes way for it."""
    if out.exists() and any(out.iterdir()):
        _check_lost_a_file(out, staged)
        _keep_what_is_not_ours(out, staged)
    discard(out)
    staged.rename(out)
    fsync_directory(out.parent)


def _check_lost_a_file(out: Path, staged: Path) -> None:
    """Raise ``InputError`` where ``out`` is anything but the same checkpoint, no longer whole."""
    if (out / MANIFEST).exists() and read_manifest(out) == read_manifest(staged):
        try:
            check_files(out, read_manifest(out).files)
        except InputError:
            return
    raise InputError(f"{out}: another run has published there meanwhile; remove {staged} or {out}")


def _keep_what_is_not_ours(out: Path, staged: Path) -> None:
    """Files beside the shards, such as an evaluation, move along: they belong to the same checkpoint."""
    ours = {MANIFEST, *(file.name for file in read_manifest(out).files)}
    for path in out.iterdir():
        if path.name not in {name.split("/")[0] for name in ours}:
            path.rename(staged / path.name)


@task(cache_policy=OnDisk(stage="release"), result_serializer="json")
def release_intermediates(
    checkpoint: CheckpointResult,
    source: SourceResult,
    dequantized: DequantizedResult | None,
    keep_intermediates: str,
    purpose: str,
) -> ReleaseResult:
    """Remove what ``keep_intermediates`` (none, bf16, all) does not keep: the download, the BF16 directory.

    A local source is never touched. Each is remembered as released for ``purpose``.
    """
    doomed = []
    if source.repo and keep_intermediates != "all":
        doomed.append(source.directory)
    if dequantized and keep_intermediates == "none":
        doomed.append(dequantized.directory)
    for directory in doomed:
        release(directory, purpose, checkpoint.out)
    return ReleaseResult(released=tuple(doomed), made_by=this_run())
