"""Proof that shards equal their source, by other code than the converter's: the safetensors library and torch.cat."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from model.args import ModelArgs
from model.checkpoint.digest import hashed
from model.checkpoint.headers import FileHeader, TensorInfo, read_header
from model.checkpoint.layout import cut, on_rank
from model.checkpoint.manifest import FileRecord, Manifest, read_manifest, shard_name
from model.checkpoint.names import Binding, bindings, scale_shape, target_scale
from model.checkpoint.progress import Progress, Silent
from model.checkpoint.scales import nan_codes
from model.checkpoint.source import FP8, SCALE_DTYPES, WEIGHT_DTYPES, Source, open_source, shortened
from model.errors import InputError, RunError

ADVICE = "remove the directory and convert again"


class VerificationError(RunError):
    """A checkpoint that is not what its manifest or its source says; a line for each difference."""


@dataclass(frozen=True)
class Verification:
    """What was proven: files whose digests are the manifest's, tensors with the right names, shapes and dtypes, and
    how many source tensors of how many bytes equal the shards bit for bit (0 without a source)."""

    files: int
    tensors: int
    source_tensors: int
    source_size: int


def verify(
    checkpoint: Path, source: Path | None = None, progress: Progress | None = None, workers: int | None = None
) -> Verification:
    """Check ``checkpoint`` against its manifest, and against ``source`` where one is given, in ``workers`` threads.

    Raises ``InputError`` where there is nothing to verify or the source does not belong to it, and
    ``VerificationError`` naming file, tensor, expected and actual for everything that differs.
    """
    progress, workers = progress or Silent(), workers or os.cpu_count() or 1
    manifest = read_manifest(checkpoint)
    opened = _matching_source(manifest, source) if source else None
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        problems = _digest_problems(checkpoint, manifest, progress, pool)
        if problems:
            raise VerificationError(shortened(problems))
        tensors, problems = _header_problems(checkpoint, manifest)
        if problems:
            raise VerificationError(shortened(problems))
        compared = _compare(checkpoint, manifest, opened, progress, pool) if opened else (0, 0)
    return Verification(len(manifest.files), tensors, *compared)


def _matching_source(manifest: Manifest, directory: Path) -> Source:
    source = open_source(directory, manifest.mtp)
    # How weights are stored is compared tensor by tensor, and how long a context may be is the loader's choice.
    free = ("dtype", "scale_fmt", "n_mtp_layers", "max_seq_len", "max_batch_size")
    made_of = manifest.args.replace(**{name: getattr(source.args, name) for name in free})
    if source.args != made_of:
        theirs, ours = source.args.to_json(), made_of.to_json()
        raise InputError(
            f"{directory}: is not the source of this checkpoint: "
            f"{name} = {theirs[name]!r}, the manifest says {ours[name]!r}"
            for name in ours
            if theirs[name] != ours[name]
        )
    return source


def _digest_problems(checkpoint: Path, manifest: Manifest, progress: Progress, pool: ThreadPoolExecutor) -> list[str]:
    """Every byte is read again: a remembered digest proves nothing about the disk."""
    progress.phase("hash shards", sum(file.size for file in manifest.files))

    def problem(file: FileRecord) -> str | None:
        path = checkpoint / file.name
        if not path.is_file():
            return f"{path}: is listed in the manifest but missing; {ADVICE}"
        if path.stat().st_size != file.size:
            return f"{path}: expected {file.size} bytes, found {path.stat().st_size}; {ADVICE}"
        actual = hashed(path, progress.advance)
        return None if actual == file.sha256 else f"{path}: expected sha256 {file.sha256}, found {actual}; {ADVICE}"

    return [found for found in pool.map(problem, manifest.files) if found]


def _header_problems(checkpoint: Path, manifest: Manifest) -> tuple[int, list[str]]:
    """How many tensors the shards hold, and what is wrong with their names, shapes or dtypes."""
    count, problems = 0, []
    for kind in ("model", "mtp") if manifest.mtp == "keep" else ("model",):
        for rank in range(manifest.mp):
            header = read_header(checkpoint / f"{kind}{rank}-mp{manifest.mp}.safetensors")
            count += len(header.tensors)
            problems += shard_problems(header, manifest.args, manifest.mp, rank, mtp=kind == "mtp")
    return count, problems


def shard_problems(header: FileHeader, args: ModelArgs, mp: int, rank: int, *, mtp: bool = False) -> list[str]:
    """What a rank's file lacks, has too many of, or holds in another shape than ``args`` call for."""
    problems = []
    tensors, rest = header.tensors, set(header.tensors)
    wanted = [binding for binding in bindings(args, args.n_mtp_layers) if binding.mtp == mtp]
    for binding in on_rank(wanted, args, mp, rank):
        expected = {binding.target: cut(binding.shape, binding.axis, mp)}
        stored = tensors.get(binding.target)
        if binding.linear and stored and stored.dtype == FP8:
            scales = cut(scale_shape(binding.shape, args.block_size), binding.axis, mp)
            expected[target_scale(binding.target)] = scales
        for name, shape in expected.items():
            rest.discard(name)
            if name not in tensors:
                problems.append(f"{header.path}: tensor {name!r} is missing")
            elif tensors[name].shape != shape:
                actual = list(tensors[name].shape)
                problems.append(f"{header.path}: tensor {name!r} has shape {actual}, expected {list(shape)}")
            elif tensors[name].dtype not in (WEIGHT_DTYPES if name == binding.target else SCALE_DTYPES):
                problems.append(f"{header.path}: tensor {name!r} is {tensors[name].dtype}, which no model loads")
    problems += [f"{header.path}: tensor {name!r} belongs to no rule of this model" for name in sorted(rest)]
    return problems


def _compare(
    checkpoint: Path, manifest: Manifest, source: Source, progress: Progress, pool: ThreadPoolExecutor
) -> tuple[int, int]:
    """Reassemble every source tensor from the shards and compare the bits; how many tensors, of how many bytes."""
    progress.phase("compare with source", sum(source.tensors[binding.source].size for binding in source.bindings))
    with _Shards(checkpoint, manifest) as shards:

        def compare(binding: Binding) -> tuple[int, list[str]]:
            weight = source.tensors[binding.source]
            expected, problems = _expected(binding, source, manifest.weights)
            for name, values in expected.items():
                for where, actual in shards.copies(binding, name):
                    problems += _difference(where, name, binding.source, values, actual)
            progress.advance(weight.size)
            return len(expected), problems

        results = list(pool.map(compare, source.bindings))
    problems = [problem for _, found in results for problem in found]
    if problems:
        raise VerificationError(shortened(problems))
    size = sum(source.tensors[binding.source].size for binding in source.bindings)
    return sum(count for count, _ in results), size


def _expected(binding: Binding, source: Source, weights: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What the shards must hold of one binding, by their names, and what is wrong with the source itself."""
    weight, scale = source.tensors[binding.source], source.scale(binding.source)
    original = _original(weight)
    problems = _nan_problems(weight, original)
    if scale is None:
        return {binding.target: original}, problems
    if weights == "bf16":
        return {binding.target: _dequantized(original, _original(scale), source.args.block_size)}, problems
    return {binding.target: original, target_scale(binding.target): _original(scale)}, problems


class _Shards(contextlib.ExitStack):
    """The shard files of all ranks, through the safetensors library."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        super().__init__()
        self.mp, self.experts_per_rank = manifest.mp, manifest.args.n_routed_experts // manifest.mp
        self._files = {
            kind: [
                self.enter_context(safe_open(checkpoint / f"{kind}{rank}-mp{manifest.mp}.safetensors", framework="pt"))
                for rank in range(manifest.mp)
            ]
            for kind in (("model", "mtp") if manifest.mtp == "keep" else ("model",))
        }

    def copies(self, binding: Binding, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each copy of the whole tensor that the shards hold, and where: sharded ones are put together first."""
        kind = "mtp" if binding.mtp else "model"
        files = self._files[kind]
        if binding.expert is not None:
            rank = binding.expert // self.experts_per_rank
            yield f"{kind}{rank}-mp{self.mp}.safetensors", files[rank].get_tensor(name)
        elif binding.axis is None:
            for rank, file in enumerate(files):
                yield f"{kind}{rank}-mp{self.mp}.safetensors", file.get_tensor(name)
        else:
            parts = torch.cat([file.get_tensor(name) for file in files], dim=binding.axis)
            yield f"{kind}0…{self.mp - 1}-mp{self.mp}.safetensors" if self.mp > 1 else shard_name(0, 1), parts


def _nan_problems(weight: TensorInfo, values: torch.Tensor) -> list[str]:
    """Shards may equal their source bit for bit and still be worthless: a NaN weight makes every reply NaN."""
    if weight.dtype == FP8:
        count, first = nan_codes(values)
    else:
        nan = values.isnan()
        count = int(nan.sum())
        first = [int(index) for index in nan.nonzero()[0]] if count else []
    if not count:
        return []
    return [f"{weight.file}: source tensor {weight.name!r} holds {count} NaN, first at {first}; fetch the file again"]


def _original(tensor: TensorInfo) -> torch.Tensor:
    """The source tensor's values as stored, through the safetensors library."""
    with safe_open(tensor.file, framework="pt") as file:
        values: torch.Tensor = file.get_tensor(tensor.name)
    return values


ALL_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Every FP8 code's value by torch's own conversion, which is slow on a matrix but not on a table."""


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32(code) * scale, rounded once to BF16: by a table of all codes and a row of scales at a time."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = torch.exp2(scale.view(torch.uint8).double() - 127)
    result = torch.empty(codes.shape, dtype=torch.bfloat16)
    for block_row, scales in enumerate(scale.float()):
        rows = slice(block_row * block[0], (block_row + 1) * block[0])
        indices = codes[rows].view(torch.uint8).int()
        values = ALL_CODES.index_select(0, indices.view(-1)).view(indices.shape)
        result[rows] = values.mul_(scales.repeat_interleave(block[1])[: codes.shape[1]])
    return result


def _difference(where: str, name: str, source: str, expected: torch.Tensor, actual: torch.Tensor) -> list[str]:
    head = f"{where}: tensor {name!r} differs from source {source!r}"
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return [f"{head}: {actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"]
    ours, theirs = _bits(actual), _bits(expected)
    if torch.equal(ours, theirs):
        return []
    wrong = (ours != theirs).flatten()
    first = int(wrong.int().argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), actual.shape)]
    values = (float(expected.flatten()[first]), float(actual.flatten()[first]))
    return [f"{head} in {int(wrong.sum())} elements, first at {place}: expected {values[0]}, found {values[1]}"]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.dtype.itemsize])
