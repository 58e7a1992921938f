"""From a Hugging Face directory to ``model<rank>-mp<N>.safetensors``: a plan, then one streamed file a rank."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from model.checkpoint.build import Inputs, Resources, build_files, check_ready, check_vacant, work_directory
from model.checkpoint.jobs import Spread
from model.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    SourceRecord,
    check_files,
    read_manifest,
    tool_version,
    write_manifest,
)
from model.checkpoint.plan import Plan, plan_shards
from model.checkpoint.progress import Progress, Silent
from model.checkpoint.scales import check_scales
from model.checkpoint.sidecars import (
    BESIDE_SHARDS,
    copy_sidecars,
    find_sidecars,
    source_record,
    write_sidecar,
    written_config,
)
from model.checkpoint.source import open_source, read_json
from model.checkpoint.storage import json_bytes
from model.errors import InputError

MODEL_ARGS = "model_args.json"


def convert(
    source: Path,
    out: Path,
    *,
    mp: int,
    weights: str | None = None,
    mtp: str = "drop",
    resources: Resources | None = None,
    progress: Progress | None = None,
    spread: Spread | None = None,
) -> Manifest:
    """Convert the checkpoint in ``source`` into ``mp`` shards in ``out``.

    ``weights`` (``bf16`` or ``fp8``) defaults to what the source holds; BF16 from FP8 is dequantised on the way.
    ``spread`` shares the shards out to workers, by default threads of this process.
    Taken up where a killed run stopped; a finished ``out`` of the same inputs is left as it is. Raises
    ``InputError`` before anything is written, ``RunError`` where reading or writing fails.
    """
    plan = plan_shards(open_source(source, mtp), mp=mp, weights=weights, mtp=mtp)
    return convert_plan(plan, out, resources=resources or Resources(), progress=progress or Silent(), spread=spread)


def check_output(out: Path) -> None:
    """Raise ``InputError`` unless ``out`` is absent, empty, or a finished checkpoint."""
    if not (out / MANIFEST).exists():
        check_vacant(out)


def is_finished(out: Path, plan: Plan) -> bool:
    """Whether ``out`` holds a checkpoint of ``plan``, with every file at its size.

    Raises ``InputError`` where it holds one of other inputs or options, as far as headers tell.
    """
    if not (out / MANIFEST).exists():
        return False
    _check_same(out, _identity(plan))
    try:
        check_files(out, read_manifest(out).files)
    except InputError:
        return False
    return True


def convert_plan(
    plan: Plan, out: Path, *, resources: Resources, progress: Progress, spread: Spread | None = None
) -> Manifest:
    """Carry out ``plan``; see ``convert``."""
    identity = _identity(plan)
    if (out / MANIFEST).exists():
        finished_checkpoint(out, identity)
        return finished_checkpoint(out, identity | _source_identity(source_record(plan.source, progress)))
    sidecars = find_sidecars(plan.source.directory, BESIDE_SHARDS)
    check_ready(out, plan.files, identity)
    check_scales(plan.source)
    record = source_record(plan.source, progress)
    inputs = Inputs(plan.source.headers, plan.args.block_size)
    with work_directory(out, identity | _source_identity(record)) as partial:
        files = build_files(plan.files, inputs, partial, resources, progress, "write shards", spread)
        return _finish(plan, record, partial / "files", files, sidecars)


def _finish(
    plan: Plan, record: SourceRecord, directory: Path, shards: tuple[FileRecord, ...], sidecars: tuple[Path, ...]
) -> Manifest:
    """The small files, and last the manifest."""
    config = written_config(plan.source, plan.weights, plan.args.n_mtp_layers)
    files = [*shards, write_sidecar(directory / "config.json", config), *copy_sidecars(sidecars, directory, record)]
    official, notes = plan.args.to_official()
    if official is not None:
        files.append(write_sidecar(directory / MODEL_ARGS, json_bytes(official)))
    manifest = Manifest(
        source=record,
        args=plan.args,
        mp=plan.mp,
        weights=plan.weights,
        mtp=plan.mtp,
        files=tuple(files),
        dropped=plan.dropped,
        notes=tuple(f"{MODEL_ARGS} is left out: {note}" for note in notes),
        tool=tool_version(),
    )
    write_manifest(directory, manifest)
    return manifest


def _identity(plan: Plan) -> dict[str, Any]:
    """What decides the output's bytes besides the source's: a resumed or repeated run must have the same."""
    return {
        "stage": "convert",
        "tool": tool_version(),
        "mp": plan.mp,
        "weights": plan.weights,
        "mtp": plan.mtp,
        "args": plan.args.to_json(),
    }


def _source_identity(record: SourceRecord) -> dict[str, Any]:
    return {"source": dataclasses.asdict(record)}


def finished_checkpoint(out: Path, identity: dict[str, Any]) -> Manifest:
    """The manifest of a finished ``out``.

    Raises ``InputError`` where it was made of other inputs than ``identity`` says, or lacks files.
    """
    manifest = read_manifest(out)
    _check_same(out, identity)
    check_files(out, manifest.files)
    return manifest


def _check_same(out: Path, identity: dict[str, Any]) -> None:
    made_of, wanted = read_json(out / MANIFEST), json.loads(json_bytes(identity))
    differing = [name for name in wanted if name not in ("stage", "tool") and wanted[name] != made_of.get(name)]
    if differing:
        raise InputError(f"{out}: holds a checkpoint that differs in {', '.join(differing)}; choose another place")
