"""The plan: from headers alone, every output file's tensors, and the slice of the source that each is made of."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from model.args import ModelArgs
from model.checkpoint.headers import ITEMSIZE, LENGTH_BYTES, TensorInfo
from model.checkpoint.names import Binding, source_scale, target_scale
from model.checkpoint.source import FP8, Source, shortened
from model.errors import InputError

WEIGHTS = ("bf16", "fp8")


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of an output file: ``source`` cut to ``[start, stop)`` along ``axis`` (None: all of it).

    With ``scale`` the source is FP8 and is dequantised on the way to ``dtype``; without, its bytes are copied.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorInfo
    scale: TensorInfo | None = None
    axis: int | None = None
    start: int = 0
    stop: int = 0

    @property
    def size(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One output file: its name and its tensors in the order of their bytes."""

    name: str
    targets: tuple[Target, ...]

    def header(self) -> bytes:
        """The safetensors header, length prefix included, padded so that the data is aligned to 8 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for target in self.targets:
            end = position + target.size
            entries[target.name] = {"dtype": target.dtype, "shape": target.shape, "data_offsets": [position, end]}
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @property
    def data_size(self) -> int:
        """Bytes of tensor data, the header not counted."""
        return sum(target.size for target in self.targets)


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
    legal = legal_mp(source, weights)
    if mp not in legal:
        raise InputError(
            f"mp = {mp} is not legal for {weights} shards of this checkpoint; legal are {', '.join(map(str, legal))}"
        )
    if mtp == "keep" and not source.args.n_mtp_layers:
        raise InputError(f"{source.directory}: holds no MTP layers to keep; use --mtp drop")
    main = (binding for binding in source.bindings if not binding.mtp)
    extra = [binding for binding in source.bindings if binding.mtp]
    files = _files("model", main, source, mp, weights) + (_files("mtp", extra, source, mp, weights) if extra else ())
    args = source.args.replace(
        dtype=weights,
        scale_fmt=source.args.scale_fmt if weights == "fp8" else None,
        n_mtp_layers=source.args.n_mtp_layers if mtp == "keep" else 0,
    )
    return Plan(source, args, mp, weights, mtp, files, dropped_rules(source), legal)


def legal_mp(source: Source, weights: str) -> tuple[int, ...]:
    """Every mp that divides the heads, the experts and all sharded dimensions.

    A slice of a weight that stays FP8 must also end on a block boundary, or its scales could not be cut.
    """
    args = source.args
    cuts = {(args.n_heads, 1), (args.n_routed_experts, 1), (args.vocab_size, 1)}
    for binding in source.bindings:
        if binding.axis is not None:
            stays_fp8 = weights == "fp8" and source.tensors[binding.source].dtype == FP8
            cuts.add((binding.shape[binding.axis], args.block_size[binding.axis] if stays_fp8 else 1))
    return tuple(
        mp
        for mp in range(1, args.n_heads + 1)
        if mp == 1 or all(size % mp == 0 and (size // mp) % block == 0 for size, block in cuts)
    )


def plan_dequantized(source: Source) -> tuple[FilePlan, ...]:
    """The BF16 files of a Hugging Face directory: the source's file names and tensor names, without the scales."""
    if source.weights != "fp8":
        raise InputError(f"{source.directory}: holds no FP8 weights: there is nothing to dequantise")
    files = []
    wanted = {binding.source for binding in source.bindings}
    for header in source.headers:
        targets = [
            _target(tensor.name, tensor, source.scale(tensor.name), None, 0, 1)
            for tensor in header.tensors.values()
            if tensor.name in wanted
        ]
        if targets:
            files.append(FilePlan(header.path.name, _laid_out(targets, source)))
    return tuple(files)


def dropped_rules(source: Source) -> tuple[DroppedRule, ...]:
    """The drop rules that took at least one tensor."""
    return tuple(
        DroppedRule(drop.name, drop.reason, len(tensors), sum(tensor.size for tensor in tensors))
        for drop, tensors in source.dropped
        if tensors
    )


def on_rank(bindings: Iterable[Binding], args: ModelArgs, mp: int, rank: int) -> Iterator[Binding]:
    """What ``rank`` of ``mp`` holds a part of: everything but the experts of other ranks."""
    experts_per_rank = args.n_routed_experts // mp
    for binding in bindings:
        if binding.expert is None or binding.expert // experts_per_rank == rank:
            yield binding


def cut(shape: tuple[int, ...], axis: int | None, mp: int) -> tuple[int, ...]:
    """``shape`` with its dimension ``axis`` divided over ``mp`` ranks."""
    return tuple(size // mp if dimension == axis else size for dimension, size in enumerate(shape))


def _files(kind: str, bindings: Iterable[Binding], source: Source, mp: int, weights: str) -> tuple[FilePlan, ...]:
    bindings = list(bindings)
    files = []
    for rank in range(mp):
        targets: list[Target] = []
        for binding in on_rank(bindings, source.args, mp, rank):
            weight, scale = source.tensors[binding.source], source.scale(binding.source)
            if weights == "bf16" or scale is None:
                targets.append(_target(binding.target, weight, scale, binding.axis, rank, mp))
            else:
                targets.append(_target(binding.target, weight, None, binding.axis, rank, mp))
                targets.append(_target(target_scale(binding.target), scale, None, binding.axis, rank, mp))
        files.append(FilePlan(f"{kind}{rank}-mp{mp}.safetensors", _laid_out(targets, source)))
    problems = _coverage_problems(bindings, source, files, weights)
    assert not problems, "\n".join(shortened(problems))
    return tuple(files)


def _target(name: str, source: TensorInfo, scale: TensorInfo | None, axis: int | None, rank: int, mp: int) -> Target:
    shape = cut(source.shape, axis, mp)
    part = shape[axis] if axis is not None else 0
    return Target(name, "BF16" if scale else source.dtype, shape, source, scale, axis, rank * part, (rank + 1) * part)


def _laid_out(targets: list[Target], source: Source) -> tuple[Target, ...]:
    """Wide dtypes first, so that every tensor is aligned; within one in source order, so that two files suffice."""
    order = {header.path: number for number, header in enumerate(source.headers)}

    def position(target: Target) -> tuple[int, int, int]:
        return -ITEMSIZE[target.dtype], order[target.source.file], target.source.start

    return tuple(sorted(targets, key=position))


def _coverage_problems(bindings: list[Binding], source: Source, files: list[FilePlan], weights: str) -> list[str]:
    """Both ways: every element of every bound tensor lands somewhere exactly once (replicas aside)."""
    mp = len(files)
    taken: dict[str, int] = {}
    problems = []
    for file in files:
        names = [target.name for target in file.targets]
        if len(set(names)) != len(names):
            problems.append(f"{file.name}: a tensor is produced twice")
        for target in file.targets:
            taken[target.source.name] = taken.get(target.source.name, 0) + prod(target.shape)
    for binding in bindings:
        copies = mp if binding.axis is None and binding.expert is None else 1
        names = [binding.source]
        if weights == "fp8" and source.scale(binding.source):
            names.append(source_scale(binding.source))
        for name in names:
            expected = copies * prod(source.tensors[name].shape)
            if taken.pop(name, 0) != expected:
                problems.append(f"tensor {name!r} is not covered once")
    problems.extend(f"tensor {name!r} is taken without a rule" for name in taken)
    return problems
