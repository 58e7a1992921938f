"""The layout of output files: each tensor's dtype, shape and place, and the stored pieces that it is made of."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from model.args import ModelArgs
from model.checkpoint.headers import ITEMSIZE, LENGTH_BYTES, TensorInfo
from model.checkpoint.names import Binding, target_scale


@dataclass(frozen=True, slots=True)
class Piece:
    """``tensor`` cut to ``[start, stop)`` along its target's axis; all of it where that is None."""

    tensor: TensorInfo
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of an output file: ``pieces`` joined along ``axis``.

    With ``scale`` there is one piece, which is FP8 and is dequantised on the way to ``dtype``; without, bytes are
    copied.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    axis: int | None = None
    scale: TensorInfo | None = None

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

    def sources(self) -> tuple[Path, ...]:
        """The files that its tensors are read from, each once, in the order of their first use."""
        tensors = (
            tensor
            for target in self.targets
            for tensor in (*(piece.tensor for piece in target.pieces), target.scale)
            if tensor is not None
        )
        return tuple(dict.fromkeys(tensor.file for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one whole tensor lies: its parts, in order along the axis they were cut along (one part: not cut)."""

    parts: tuple[TensorInfo, ...]

    @property
    def dtype(self) -> str:
        """The dtype of every part."""
        return self.parts[0].dtype

    def shape(self, axis: int | None) -> tuple[int, ...]:
        """The shape of the whole."""
        first = self.parts[0].shape
        return tuple(size * len(self.parts) if dimension == axis else size for dimension, size in enumerate(first))


Store = Callable[[Binding], tuple[Stored, Stored | None]]
"""Finds a binding's weight and, where that is FP8, its scales."""


def shard_files(
    kind: str, bindings: Iterable[Binding], args: ModelArgs, mp: int, store: Store, *, keep_fp8: bool
) -> tuple[FilePlan, ...]:
    """One file for each of ``mp`` ranks, named ``<kind><rank>-mp<N>.safetensors``.

    FP8 weights keep their codes and scales with ``keep_fp8``, and become BF16 without.
    """
    bindings = list(bindings)
    files = []
    for rank in range(mp):
        targets: list[Target] = []
        for binding in on_rank(bindings, args, mp, rank):
            weight, scale = store(binding)
            if scale is None or keep_fp8:
                targets.append(_cut_target(binding.target, weight, binding.axis, rank, mp))
            else:
                targets.append(_cut_target(binding.target, weight, binding.axis, rank, mp, scale))
            if scale is not None and keep_fp8:
                targets.append(_cut_target(target_scale(binding.target), scale, binding.axis, rank, mp))
        files.append(FilePlan(f"{kind}{rank}-mp{mp}.safetensors", laid_out(targets)))
    _check_coverage(bindings, store, files)
    return tuple(files)


def on_rank(bindings: Iterable[Binding], args: ModelArgs, mp: int, rank: int) -> Iterator[Binding]:
    """What ``rank`` of ``mp`` holds a part of: everything but the experts of other ranks."""
    experts_per_rank = args.n_routed_experts // mp
    for binding in bindings:
        if binding.expert is None or binding.expert // experts_per_rank == rank:
            yield binding


def cut(shape: tuple[int, ...], axis: int | None, mp: int) -> tuple[int, ...]:
    """``shape`` with its dimension ``axis`` divided over ``mp`` ranks."""
    return tuple(size // mp if dimension == axis else size for dimension, size in enumerate(shape))


def laid_out(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Wide dtypes first, so that every tensor is aligned; within one as they come."""
    return tuple(sorted(targets, key=lambda target: -ITEMSIZE[target.dtype]))


def _cut_target(name: str, stored: Stored, axis: int | None, rank: int, mp: int, scale: Stored | None = None) -> Target:
    shape = cut(stored.shape(axis), axis, mp)
    if axis is None:
        pieces: tuple[Piece, ...] = (Piece(stored.parts[0]),)
    else:
        pieces = tuple(_pieces(stored, axis, rank * shape[axis], (rank + 1) * shape[axis]))
    return Target(name, "BF16" if scale else stored.dtype, shape, pieces, axis, scale.parts[0] if scale else None)


def _pieces(stored: Stored, axis: int, start: int, stop: int) -> Iterator[Piece]:
    """The parts of ``stored`` that the range ``[start, stop)`` of the whole touches, each cut to it."""
    offset = 0
    for part in stored.parts:
        first, last = max(start - offset, 0), min(stop - offset, part.shape[axis])
        if first < last:
            yield Piece(part, first, last)
        offset += part.shape[axis]


def _check_coverage(bindings: list[Binding], store: Store, files: list[FilePlan]) -> None:
    """Every element of every stored tensor lands somewhere exactly once, replicas aside; no name comes twice."""
    produced: dict[str, int] = {}
    for file in files:
        assert len({target.name for target in file.targets}) == len(file.targets), f"{file.name}: a name comes twice"
        for target in file.targets:
            produced[target.name] = produced.get(target.name, 0) + prod(target.shape)
    for binding in bindings:
        weight, scale = store(binding)
        copies = len(files) if binding.axis is None and binding.expert is None else 1
        for name, stored in ((binding.target, weight), (target_scale(binding.target), scale)):
            expected = copies * prod(stored.shape(binding.axis)) if stored and name in produced else 0
            assert produced.pop(name, 0) == expected, f"tensor {name!r} is not covered exactly once"
        assert binding.target not in produced
    assert not produced, f"tensors {sorted(produced)} are produced without a rule"
