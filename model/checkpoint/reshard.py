"""From shards of one mp to shards of another, without the source: slices are cut finer, or joined."""

import hashlib
from pathlib import Path
from typing import Any

from model.checkpoint.build import Inputs, Resources, build_files, check_ready, work_directory
from model.checkpoint.convert import MODEL_ARGS, finished_checkpoint
from model.checkpoint.headers import FileHeader, read_header
from model.checkpoint.jobs import Spread
from model.checkpoint.layout import Stored
from model.checkpoint.manifest import MANIFEST, Manifest, read_manifest, tool_version, write_manifest
from model.checkpoint.names import Binding, bindings, target_scale
from model.checkpoint.plan import all_shard_files, check_legal, legal_mp
from model.checkpoint.progress import Progress, Silent
from model.checkpoint.sidecars import BESIDE_SHARDS, copy_sidecars, find_sidecars
from model.checkpoint.source import FP8, shortened
from model.checkpoint.verify import shard_problems
from model.errors import InputError


def reshard(
    checkpoint: Path,
    out: Path,
    *,
    mp: int,
    resources: Resources | None = None,
    progress: Progress | None = None,
    spread: Spread | None = None,
) -> Manifest:
    """Write the tensors of ``checkpoint`` as ``mp`` shards into ``out``: the bytes that ``convert`` gives for ``mp``.

    The new manifest names the same source, and its parent by the digest of the parent's manifest. Spreads, resumes,
    refuses and raises as ``convert`` does; ``mp`` must be legal for the model and the weights that the shards hold.
    """
    parent = read_manifest(checkpoint)
    shards = _Shards(checkpoint, parent)
    names = tuple(bindings(parent.args, parent.args.n_mtp_layers))
    fp8 = {binding.source for binding in names if shards.store(binding)[1]}
    check_legal(mp, legal_mp(parent.args, names, fp8), parent.weights)
    plans = all_shard_files(names, parent.args, mp, shards.store, keep_fp8=True)
    sidecars = find_sidecars(checkpoint, (*BESIDE_SHARDS, "config.json", MODEL_ARGS))
    identity = _identity(checkpoint, parent, mp)
    if (out / MANIFEST).exists():
        return finished_checkpoint(out, identity)
    check_ready(out, plans, identity)
    inputs = Inputs(shards.headers, parent.args.block_size)
    with work_directory(out, identity) as partial:
        label = f"reshard mp {parent.mp} to {mp}"
        files = build_files(plans, inputs, partial, resources or Resources(), progress or Silent(), label, spread)
        directory = partial / "files"
        manifest = Manifest(
            source=parent.source,
            args=parent.args,
            mp=mp,
            weights=parent.weights,
            mtp=parent.mtp,
            files=(*files, *copy_sidecars(sidecars, directory)),
            dropped=parent.dropped,
            notes=parent.notes,
            tool=tool_version(),
            parent=identity["parent"],
        )
        write_manifest(directory, manifest)
    return manifest


class _Shards:
    """The checkpoint's files, found by binding. Raises ``InputError`` where they are not what the manifest says."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._experts_per_rank = manifest.args.n_routed_experts // manifest.mp
        kinds = ("model", "mtp") if manifest.mtp == "keep" else ("model",)
        self._files: dict[str, list[FileHeader]] = {
            kind: [read_header(checkpoint / f"{kind}{rank}-mp{manifest.mp}.safetensors") for rank in range(manifest.mp)]
            for kind in kinds
        }
        self.headers = tuple(header for files in self._files.values() for header in files)
        sizes = {file.name: file.size for file in manifest.files}
        problems = [
            f"{header.path}: expected {sizes.get(header.path.name)} bytes, found {header.size}; convert again"
            for header in self.headers
            if sizes.get(header.path.name) != header.size
        ]
        for kind, files in self._files.items():
            for rank, header in enumerate(files):
                problems += shard_problems(header, manifest.args, manifest.mp, rank, mtp=kind == "mtp")
        if problems:
            raise InputError(shortened(problems))

    def store(self, binding: Binding) -> tuple[Stored, Stored | None]:
        """The weight's parts on all ranks, and those of its scales where it is FP8."""
        files = self._files["mtp" if binding.mtp else "model"]
        if binding.expert is not None:
            files = [files[binding.expert // self._experts_per_rank]]
        elif binding.axis is None:
            files = files[:1]
        weight = Stored(tuple(file.tensors[binding.target] for file in files))
        if weight.dtype != FP8:
            return weight, None
        return weight, Stored(tuple(file.tensors[target_scale(binding.target)] for file in files))


def _identity(checkpoint: Path, parent: Manifest, mp: int) -> dict[str, Any]:
    return {
        "stage": "reshard",
        "tool": tool_version(),
        "parent": hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest(),
        "args": parent.args.to_json(),
        "mp": mp,
        "weights": parent.weights,
        "mtp": parent.mtp,
    }
