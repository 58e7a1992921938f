"""The plan: from headers alone, every output file's tensors, and the slice of the source that each is made of."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from model.args import ModelArgs
from model.checkpoint.layout import FilePlan, Piece, Store, Stored, Target, laid_out, shard_files
from model.checkpoint.names import Binding
from model.checkpoint.source import Source, in_file_order
from model.errors import InputError

WEIGHTS = ("bf16", "fp8")


@dataclass(frozen=True)
class DroppedRule:
    """How many source tensors, of how many bytes, a named rule leaves out."""

    rule: str
    reason: str
    tensors: int
    size: int


@dataclass(frozen=True)
class Plan:
    """All output files of one conversion. ``args`` are those of the shards (``dtype`` as stored there)."""

    source: Source
    args: ModelArgs
    mp: int
    weights: str
    mtp: str
    files: tuple[FilePlan, ...]
    dropped: tuple[DroppedRule, ...]
    legal_mp: tuple[int, ...]

    @property
    def data_size(self) -> int:
        """Bytes of tensor data in all output files."""
        return sum(file.data_size for file in self.files)


def plan_shards(source: Source, *, mp: int, weights: str | None = None, mtp: str = "drop") -> Plan:
    """The plan of ``mp`` shards of ``source``, which was opened with the same ``mtp``.

    ``weights`` defaults to what the source holds. Raises ``InputError`` for an mp that is not legal, naming the
    legal ones, or for FP8 shards of a source without FP8 weights.
    """
    weights = weights or source.weights
    if weights not in WEIGHTS:
        raise InputError(f"weights = {weights!r} is neither {' nor '.join(map(repr, WEIGHTS))}")
    if weights == "fp8" and source.weights != "fp8":
        raise InputError(f"{source.directory}: holds no FP8 weights, so it gives only bf16 shards")
    keep_fp8 = weights == "fp8"
    legal = legal_mp(source.args, source.bindings, {b.source for b in source.bindings if keep_fp8 and source.is_fp8(b)})
    check_legal(mp, legal, weights)
    if mtp == "keep" and not source.args.n_mtp_layers:
        raise InputError(f"{source.directory}: holds no MTP layers to keep; use --mtp drop")

    def store(binding: Binding) -> tuple[Stored, Stored | None]:
        scale = source.scale(binding.source)
        return Stored((source.tensors[binding.source],)), Stored((scale,)) if scale else None

    files = all_shard_files(source.bindings, source.args, mp, store, keep_fp8=keep_fp8)
    args = source.args.replace(
        dtype=weights,
        scale_fmt=source.args.scale_fmt if weights == "fp8" else None,
        n_mtp_layers=source.args.n_mtp_layers if mtp == "keep" else 0,
    )
    return Plan(source, args, mp, weights, mtp, files, dropped_rules(source), legal)


def all_shard_files(
    bindings: tuple[Binding, ...], args: ModelArgs, mp: int, store: Store, *, keep_fp8: bool
) -> tuple[FilePlan, ...]:
    """The main model's files, and those of the MTP layers where ``bindings`` hold any."""
    main = [binding for binding in bindings if not binding.mtp]
    extra = [binding for binding in bindings if binding.mtp]
    files = shard_files("model", main, args, mp, store, keep_fp8=keep_fp8)
    return files + (shard_files("mtp", extra, args, mp, store, keep_fp8=keep_fp8) if extra else ())


def legal_mp(args: ModelArgs, bindings: Iterable[Binding], fp8: Collection[str]) -> tuple[int, ...]:
    """Every mp that divides the heads, the experts and all sharded dimensions.

    ``fp8`` names the source tensors that stay FP8: a slice of such a weight must also end on a block boundary, or
    its scales could not be cut.
    """
    cuts = {(args.n_heads, 1), (args.n_routed_experts, 1), (args.vocab_size, 1)}
    for binding in bindings:
        if binding.axis is not None:
            block = args.block_size[binding.axis] if binding.source in fp8 else 1
            cuts.add((binding.shape[binding.axis], block))
    return tuple(
        mp
        for mp in range(1, args.n_heads + 1)
        if mp == 1 or all(size % mp == 0 and (size // mp) % block == 0 for size, block in cuts)
    )


def check_legal(mp: int, legal: tuple[int, ...], weights: str) -> None:
    """Raise ``InputError`` naming the legal values where ``mp`` is none of them."""
    if mp not in legal:
        raise InputError(
            f"mp = {mp} is not legal for {weights} shards of this checkpoint; legal are {', '.join(map(str, legal))}"
        )


def plan_dequantized(source: Source) -> tuple[FilePlan, ...]:
    """The BF16 files of a Hugging Face directory: the source's file names and tensor names, without the scales."""
    if source.weights != "fp8":
        raise InputError(f"{source.directory}: holds no FP8 weights: there is nothing to dequantise")
    files = []
    for header in source.headers:
        targets = [
            Target(name, "BF16" if scale else tensor.dtype, tensor.shape, (Piece(tensor),), scale=scale)
            for name, tensor in in_file_order(header)
            if name in source.weight_names
            for scale in (source.scale(name),)
        ]
        if targets:
            files.append(FilePlan(header.path.name, laid_out(targets)))
    return tuple(files)


def dropped_rules(source: Source) -> tuple[DroppedRule, ...]:
    """The drop rules that took at least one tensor."""
    return tuple(
        DroppedRule(drop.name, drop.reason, len(tensors), sum(tensor.size for tensor in tensors))
        for drop, tensors in source.dropped
        if tensors
    )
