"""A manifest for shards that the official converter wrote, so that they load, verify and serve like our own."""

import re
from pathlib import Path

from model.args import ModelArgs
from model.checkpoint.digest import sha256_of
from model.checkpoint.headers import FileHeader, read_header
from model.checkpoint.manifest import MANIFEST, FileRecord, Manifest, shard_name, tool_version, write_manifest
from model.checkpoint.progress import Progress, Silent
from model.checkpoint.sidecars import BESIDE_SHARDS, find_sidecars
from model.checkpoint.source import FP8, read_json, shortened
from model.checkpoint.verify import shard_problems
from model.errors import InputError
from model.hf_config import from_hf

SHARD = re.compile(r"model(\d+)-mp(\d+)\.safetensors")
NOTE = "adopted: shards of the official converter, not compared with a source"


def adopt(checkpoint: Path, config: Path, progress: Progress | None = None) -> Manifest:
    """Check the shards in ``checkpoint`` against ``config`` and write their manifest beside them.

    ``config`` is an official ``config_*.json`` or a Hugging Face ``config.json``. Whether the weights are FP8, and
    whether the router has a bias, is read from the shards: the official fields do not say. Raises ``InputError``
    naming file and tensor where shards and config do not belong together; nothing is written then.
    """
    progress = progress or Silent()
    if (checkpoint / MANIFEST).exists():
        raise InputError(f"{checkpoint / MANIFEST}: exists already; there is nothing to adopt")
    mp = _world_size(checkpoint)
    shards = [read_header(checkpoint / shard_name(rank, mp)) for rank in range(mp)]
    args = _arguments(config, shards[0])
    problems = []
    if args.n_heads % mp or args.n_routed_experts % mp or args.vocab_size % mp:
        problems = [
            f"{config}: n_heads = {args.n_heads}, n_routed_experts = {args.n_routed_experts} and "
            f"vocab_size = {args.vocab_size} do not all divide by the {mp} shards"
        ]
    for rank, header in enumerate([] if problems else shards):
        problems += shard_problems(header, args, mp, rank)
    if problems:
        raise InputError(shortened(problems))
    manifest = Manifest(
        source=None,
        args=args,
        mp=mp,
        weights=args.dtype,
        mtp="drop",
        files=_records(checkpoint, shards, progress),
        dropped=(),
        notes=(NOTE,),
        tool=tool_version(),
    )
    write_manifest(checkpoint, manifest)
    return manifest


def _world_size(checkpoint: Path) -> int:
    found = [match for path in sorted(checkpoint.glob("*")) if (match := SHARD.fullmatch(path.name))]
    if not found:
        raise InputError(f"{checkpoint}: holds no model<rank>-mp<N>.safetensors files to adopt")
    sizes = {int(match[2]) for match in found}
    if len(sizes) > 1:
        raise InputError(f"{checkpoint}: holds shards of several mp ({', '.join(map(str, sorted(sizes)))}); keep one")
    (mp,) = sizes
    missing = sorted(set(range(mp)) - {int(match[1]) for match in found})
    if missing:
        raise InputError(f"{checkpoint / shard_name(rank, mp)}: is missing" for rank in missing)
    return mp


def _arguments(config: Path, shard: FileHeader) -> ModelArgs:
    fields = read_json(config)
    weights = "fp8" if any(tensor.dtype == FP8 for tensor in shard.tensors.values()) else "bf16"
    bias = any(name.endswith(".ffn.gate.bias") for name in shard.tensors)
    try:
        args = from_hf(fields) if "model_type" in fields else ModelArgs.from_official(fields, gate_bias=bias)
    except InputError as error:
        raise InputError([f"{config}: {problem}" for problem in error.problems]) from error
    return args.replace(dtype=weights, n_mtp_layers=0)


def _records(checkpoint: Path, shards: list[FileHeader], progress: Progress) -> tuple[FileRecord, ...]:
    counts: dict[Path, int | None] = {header.path: len(header.tensors) for header in shards}
    counts |= dict.fromkeys(find_sidecars(checkpoint, (*BESIDE_SHARDS, "config.json")))
    progress.phase("hash shards", sum(path.stat().st_size for path in counts))
    return tuple(
        FileRecord(path.name, path.stat().st_size, sha256_of(path, progress.advance), count)
        for path, count in counts.items()
    )
