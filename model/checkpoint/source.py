"""A Hugging Face checkpoint directory, opened and checked: config, index, every header, every tensor's place."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from model.args import ModelArgs
from model.checkpoint.headers import FileHeader, TensorInfo, read_header
from model.checkpoint.names import (
    DROPS,
    MTP_DROP,
    SOURCE_SCALE_SUFFIX,
    Binding,
    Drop,
    bindings,
    layer_of,
    scale_shape,
    source_scale,
)
from model.checkpoint.storage import reading
from model.errors import InputError
from model.hf_config import from_hf

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FP8 = "F8_E4M3"
WEIGHT_DTYPES = (FP8, "BF16", "F16", "F32")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
"""U8 is E8M0 by another name, and only where ``scale_fmt`` says ue8m0."""

MOST_PROBLEMS = 20
"""A missing file of a 671B checkpoint misses thousands of tensors: as many lines help nobody."""


@dataclass(frozen=True)
class Source:
    """A checked source. Every tensor in ``bindings`` is there with the right shape and dtype, and none is left over.

    ``tensors`` are in source order: by file, then by position. ``dropped`` lists the tensors of each named rule.
    """

    directory: Path
    config: dict[str, Any]
    args: ModelArgs
    headers: tuple[FileHeader, ...]
    tensors: dict[str, TensorInfo]
    bindings: tuple[Binding, ...]
    dropped: tuple[tuple[Drop, tuple[TensorInfo, ...]], ...]

    @cached_property
    def weight_names(self) -> frozenset[str]:
        """Source names of all bound tensors, scales aside."""
        return frozenset(binding.source for binding in self.bindings)

    @property
    def weights(self) -> str:
        """``fp8`` where any weight is stored so, else ``bf16``."""
        return "fp8" if any(self.is_fp8(binding) for binding in self.bindings) else "bf16"

    def is_fp8(self, binding: Binding) -> bool:
        """Whether the weight of ``binding`` is stored as FP8."""
        return self.tensors[binding.source].dtype == FP8

    def scale(self, weight: str) -> TensorInfo | None:
        """The block scales of an FP8 weight; None for a weight of another dtype."""
        return self.tensors.get(source_scale(weight)) if self.tensors[weight].dtype == FP8 else None


def open_source(directory: Path, mtp: str = "keep") -> Source:
    """Open ``directory`` and check everything that its headers can tell.

    ``mtp`` says what happens to multi-token-prediction layers: ``keep`` demands that they are complete, ``drop``
    lists them under their rule. Raises ``InputError`` with a line for each problem; reads no tensor data.
    """
    if mtp not in ("keep", "drop"):
        raise InputError(f"mtp = {mtp!r} is neither 'keep' nor 'drop'")
    config = read_json(directory / "config.json")
    args = from_hf(config)
    headers = _read_headers(directory)
    tensors = {name: tensor for header in headers for name, tensor in in_file_order(header)}
    _check_counts(args, len(tensors))
    found_mtp = _mtp_layers(args, tensors)
    wanted = tuple(bindings(args, found_mtp if mtp == "keep" else 0))
    rest = set(tensors) - {binding.source for binding in wanted}
    dropped = []
    for drop in (*DROPS, *((MTP_DROP,) if mtp == "drop" else ())):
        names = [name for name in tensors if name in rest and _drops(drop, name, args)]
        rest -= set(names)
        dropped.append((drop, tuple(tensors[name] for name in names)))
    problems = [*_binding_problems(args, wanted, tensors, rest), *_leftovers(args, tensors, rest, found_mtp)]
    if config.get("quantization_config") is None and any(tensor.dtype == FP8 for tensor in tensors.values()):
        problems.append(f"config.json: holds no quantization_config, so the blocks of the {FP8} weights are unknown")
    if problems:
        raise InputError(shortened(problems))
    return Source(directory, config, args.replace(n_mtp_layers=found_mtp), headers, tensors, wanted, tuple(dropped))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ``InputError`` where there is none."""
    try:
        with reading(path):
            value = json.loads(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair could be read, but not written again
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is not valid JSON in UTF-8 ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: is not a JSON object")
    return value


def in_file_order(header: FileHeader) -> list[tuple[str, TensorInfo]]:
    """The tensors of one file in the order of their bytes."""
    return sorted(header.tensors.items(), key=lambda item: (item[1].start, item[0]))


def shortened(problems: list[str]) -> list[str]:
    """At most ``MOST_PROBLEMS`` lines, and how many more there are."""
    if len(problems) <= MOST_PROBLEMS:
        return problems
    return [*problems[:MOST_PROBLEMS], f"… and {len(problems) - MOST_PROBLEMS} more problems like these"]


def _read_headers(directory: Path) -> tuple[FileHeader, ...]:
    """Headers of all files that the index names, checked against it, in natural order of their names."""
    index_path = directory / INDEX
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise InputError(f"{index_path}: weight_map is not an object of tensor and file names")
        names = sorted(set(weight_map.values()), key=_natural)
    else:
        weight_map, names = None, [SINGLE_FILE]
    problems = [f"{index_path}: {problem}" for name in names if (problem := _unsafe(directory, name))]
    if problems:
        raise InputError(problems)
    with reading(directory):
        present = {path.name for path in directory.iterdir() if path.name.endswith(".safetensors")}
    if weight_map is None and SINGLE_FILE not in present:
        raise InputError(f"{directory}: holds neither {INDEX} nor {SINGLE_FILE}; fetch the index again")
    for name in sorted(set(names) - present, key=_natural):
        said = f"is named by {INDEX}" if weight_map is not None else f"is expected where there is no {INDEX}"
        problems.append(f"{directory / name}: {said} but does not exist; fetch it again")
    for name in sorted(present - set(names), key=_natural):
        problems.append(f"{directory / name}: is not named by the index; remove it or fetch the index again")
    headers = []
    for name in names:
        if name in present:
            try:
                headers.append(read_header(directory / name))
            except InputError as error:
                problems.extend(error.problems)
    problems = problems or _index_problems(directory, weight_map, headers)
    if problems:
        raise InputError(shortened(problems))
    return tuple(headers)


def _index_problems(directory: Path, weight_map: dict[str, str] | None, headers: list[FileHeader]) -> list[str]:
    problems = []
    where: dict[str, str] = {}
    for header in headers:
        for name in header.tensors:
            if name in where:
                problems.append(f"{header.path}: tensor {name!r} is also in {where[name]}; keep one of them")
            where[name] = header.path.name
    if weight_map is not None:
        for name, file in weight_map.items():
            if where.get(name) != file:
                actual = f"it is in {where[name]}" if name in where else "no file holds it"
                problems.append(f"{directory / file}: the index places tensor {name!r} here, but {actual}")
        for name in sorted(set(where) - set(weight_map)):
            problems.append(f"{directory / where[name]}: tensor {name!r} is missing from {INDEX}")
    return problems


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which ``model-2-of-61`` comes before ``model-10-of-61``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _unsafe(directory: Path, name: str) -> str | None:
    """Why a file name in the index may not be opened, or None."""
    path = PurePosixPath(name)
    if path.name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        return f"file name {name!r} is not a plain name inside the checkpoint's directory"
    return escaping_link(directory / name)


def escaping_link(path: Path) -> str | None:
    """Why the symbolic link ``path`` leaves its checkpoint, or None.

    The hub's own cache is the one layout of links that is meant: ``snapshots/<commit>/x`` to ``blobs/<hash>``.
    """
    if not path.is_symlink():
        return None
    inside, target = path.parent.resolve(), path.resolve()
    if target.is_relative_to(inside):
        return None
    if inside.parent.name == "snapshots" and target.parent == inside.parent.parent / "blobs":
        return None
    return f"file {path.name!r} is a symbolic link to {target}, outside the checkpoint's directory"


def _check_counts(args: ModelArgs, tensors: int) -> None:
    """A config that calls for more layers or experts than there are tensors is refused before they are listed."""
    layers = args.n_layers + args.n_mtp_layers
    experts = (args.n_layers - args.n_dense_layers) * args.n_routed_experts
    for what, count in (("layers", layers), ("routed experts in all layers", experts)):
        if count > tensors:
            raise InputError(f"config.json: calls for {count} {what}, but the files hold only {tensors} tensors")


def _mtp_layers(args: ModelArgs, tensors: dict[str, TensorInfo]) -> int:
    """How many layers lie at or past ``n_layers``: as many as the config states, or none (left out by who saved it).

    Any other number would have real layers taken for MTP layers, and dropped.
    """
    layers = {layer for name in tensors if (layer := layer_of(name)) is not None and layer >= args.n_layers}
    stated = set(range(args.n_layers, args.n_layers + args.n_mtp_layers))
    if layers and layers != stated:
        raise InputError(
            f"config.json: num_hidden_layers = {args.n_layers} and num_nextn_predict_layers = {args.n_mtp_layers} "
            f"call for layers up to {args.n_layers + args.n_mtp_layers - 1}, the files hold layers "
            f"{', '.join(map(str, sorted(layers)[:8]))}; correct the config or fetch the files again"
        )
    return len(layers)


def _drops(drop: Drop, name: str, args: ModelArgs) -> bool:
    layer = layer_of(name)
    past_the_model = layer is not None and layer >= args.n_layers
    return drop.pattern.fullmatch(name) is not None and (drop is not MTP_DROP or past_the_model)


def _binding_problems(
    args: ModelArgs, wanted: tuple[Binding, ...], tensors: dict[str, TensorInfo], rest: set[str]
) -> list[str]:
    """Missing, mis-shaped and unreadable tensors; scales found in order are taken out of ``rest``."""
    problems = []
    missing: Counter[int | None] = Counter()
    for binding in wanted:
        tensor = tensors.get(binding.source)
        if tensor is None:
            layer = layer_of(binding.source)
            missing[layer] += 1
            if missing[layer] <= 3:
                problems.append(f"tensor {binding.source!r} is missing: the config calls for it, no file holds it")
            continue
        if tensor.shape != binding.shape:
            problems.append(
                f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                f"the config calls for {list(binding.shape)}"
            )
        elif tensor.dtype not in WEIGHT_DTYPES:
            problems.append(
                f"{tensor.file}: tensor {tensor.name!r} is {tensor.dtype}; "
                f"readable are {', '.join(WEIGHT_DTYPES)} (packed or integer weights are not)"
            )
        elif binding.linear:
            problems.extend(_scale_problems(args, tensor, tensors, rest))
        elif tensor.dtype == FP8:
            problems.append(f"{tensor.file}: tensor {tensor.name!r} is {FP8}, which only linear weights may be")
    problems.extend(
        f"layer {layer}: {count} tensors are missing in all" for layer, count in missing.items() if count > 3
    )
    return problems


def _scale_problems(
    args: ModelArgs, weight: TensorInfo, tensors: dict[str, TensorInfo], rest: set[str]
) -> Iterator[str]:
    name = source_scale(weight.name)
    scale = tensors.get(name)
    rest.discard(name)
    if scale is None:
        if weight.dtype == FP8:
            yield (
                f"{weight.file}: tensor {weight.name!r} is {FP8} but its scale {name!r} is missing; "
                "fetch the file that holds it again"
            )
        return
    where = f"{scale.file}: scale {name!r}"
    grid = scale_shape(weight.shape, args.block_size)
    if weight.dtype != FP8:
        yield f"{where} stands beside a weight of {weight.dtype}, which needs none"
    elif scale.shape != grid:
        yield (
            f"{where} has shape {list(scale.shape)}, expected {list(grid)}: "
            f"one for each {args.block_size[0]}x{args.block_size[1]} block of {list(weight.shape)}, edges included"
        )
    elif scale.dtype not in SCALE_DTYPES:
        yield f"{where} is {scale.dtype}; readable are {', '.join(SCALE_DTYPES)}"
    elif scale.dtype == "U8" and args.scale_fmt != "ue8m0":
        yield f"{where} is U8, which only quantization_config.scale_fmt 'ue8m0' explains"


def _leftovers(args: ModelArgs, tensors: dict[str, TensorInfo], rest: set[str], found_mtp: int) -> list[str]:
    """A line for each tensor that no rule takes, saying what it seems to be."""
    last = args.n_layers + found_mtp
    problems = []
    for name in sorted(rest, key=_natural):
        layer = layer_of(name)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if layer is not None and layer >= last:
            why = f"layer {layer} lies past the {last} layers of this checkpoint"
        elif expert and int(expert[1]) >= args.n_routed_experts:
            why = f"expert {expert[1]} lies past n_routed_experts = {args.n_routed_experts}"
        elif name.endswith(SOURCE_SCALE_SUFFIX):
            why = "a scale without its weight"
        else:
            why = "no rule of this family takes it"
        problems.append(f"{tensors[name].file}: tensor {name!r}: {why}")
    return problems
