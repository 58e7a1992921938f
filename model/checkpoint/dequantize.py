"""From an FP8 Hugging Face directory to a BF16 one that transformers loads as it stands."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.build import Inputs, Resources, build_files, check_ready, work_directory
from model.checkpoint.jobs import Spread
from model.checkpoint.layout import FilePlan
from model.checkpoint.manifest import (
    FileRecord,
    SourceRecord,
    check_files,
    file_records,
    source_record_from,
    tool_version,
)
from model.checkpoint.plan import DroppedRule, dropped_rules, plan_dequantized
from model.checkpoint.progress import Progress, Silent
from model.checkpoint.scales import check_scales
from model.checkpoint.sidecars import copy_sidecars, find_sidecars, source_record, write_sidecar, written_config
from model.checkpoint.source import INDEX, open_source, read_json
from model.checkpoint.storage import json_bytes, write_atomically
from model.errors import InputError

RECORD = "dequantized.json"
SCHEMA = 1


@dataclass(frozen=True)
class Dequantized:
    """The contents of ``dequantized.json``, written last: of what the directory was made, and every file in it."""

    source: SourceRecord
    files: tuple[FileRecord, ...]
    dropped: tuple[DroppedRule, ...]


def dequantize(
    source: Path,
    out: Path,
    *,
    resources: Resources | None = None,
    progress: Progress | None = None,
    spread: Spread | None = None,
) -> Dequantized:
    """Write the FP8 checkpoint in ``source`` as BF16 into ``out``, file by file under the same names.

    Each FP8 weight becomes ``float32(code) * scale`` rounded once to BF16; every other tensor keeps its bytes.
    MTP layers are kept. Spreads, resumes, refuses and raises as ``convert`` does.
    """
    progress = progress or Silent()
    opened = open_source(source)
    plans = plan_dequantized(opened)
    identity: dict[str, Any] = {"stage": "dequantize", "tool": tool_version()}
    if (out / RECORD).exists():
        return _finished(out, source_record(opened, progress))
    sidecars = find_sidecars(source)
    check_ready(out, plans, identity)
    check_scales(opened)
    record = source_record(opened, progress)
    identity["source"] = dataclasses.asdict(record)
    inputs = Inputs(opened.headers, opened.args.block_size)
    with work_directory(out, identity) as partial:
        weights = build_files(plans, inputs, partial, resources or Resources(), progress, "dequantise", spread)
        directory = partial / "files"
        config = written_config(opened, "bf16", opened.args.n_mtp_layers)
        files = (
            *weights,
            write_sidecar(directory / "config.json", config),
            write_sidecar(directory / INDEX, _index(plans)),
            *copy_sidecars(sidecars, directory, record),
        )
        result = Dequantized(record, files, dropped_rules(opened))
        fields = {"schema": SCHEMA, "tool": tool_version()} | dataclasses.asdict(result)
        write_atomically(directory / RECORD, json_bytes(fields))
    return result


def read_dequantized(directory: Path) -> Dequantized:
    """The record of a dequantised directory. Raises ``InputError`` where it is missing or damaged."""
    path = directory / RECORD
    fields = read_json(path)
    try:
        return Dequantized(
            source_record_from(fields["source"]),
            file_records(fields["files"]),
            tuple(DroppedRule(**rule) for rule in fields["dropped"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error}); dequantise again") from error


def is_damaged(directory: Path) -> bool:
    """Whether a dequantised directory that was finished once has lost a file since."""
    if not (directory / RECORD).exists():
        return False
    try:
        check_files(directory, read_dequantized(directory).files)
    except InputError:
        return True
    return False


def _finished(out: Path, record: SourceRecord) -> Dequantized:
    result = read_dequantized(out)
    if result.source != record:
        raise InputError(f"{out}: holds the dequantised form of another source; choose another place")
    check_files(out, result.files)
    return result


def _index(plans: tuple[FilePlan, ...]) -> bytes:
    weight_map = {target.name: plan.name for plan in plans for target in plan.targets}
    total = sum(plan.data_size for plan in plans)
    return json_bytes({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
