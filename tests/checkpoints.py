"""Checkpoints to break: a copy of the tiny one, whose files can be rewritten tensor by tensor."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def copy_checkpoint(source: Path, to: Path) -> Path:
    """A writable copy of ``source``."""
    shutil.copytree(source, to)
    return to


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, through the safetensors library."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def file_of(directory: Path, tensor: str) -> Path:
    """The file that holds ``tensor``."""
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][tensor]


def edit_file(path: Path, changes: dict[str, torch.Tensor | None], *, index: bool = True) -> None:
    """Replace, add or (None) remove tensors of one file, and keep the index true if ``index``."""
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    if index:
        index_path = path.parent / INDEX
        fields = json.loads(index_path.read_text())
        for name, tensor in changes.items():
            if tensor is None:
                fields["weight_map"].pop(name)
            else:
                fields["weight_map"][name] = path.name
        index_path.write_text(json.dumps(fields))


def edit_tensor(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace or (None) remove one tensor where it lies."""
    edit_file(file_of(directory, name), {name: tensor})


def edit_json(path: Path, **changes: object) -> None:
    """Set fields of a JSON file; ``...`` removes one."""
    fields = json.loads(path.read_text())
    for name, value in changes.items():
        if value is ...:
            fields.pop(name, None)
        else:
            fields[name] = value
    path.write_text(json.dumps(fields))


def tensor_bytes(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a file as (dtype, shape, bytes)."""
    with safe_open(path, framework="pt") as file:
        found = {}
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            tensor = file.get_tensor(name)
            found[name] = (
                str(tensor.dtype),
                list(tensor.shape),
                tensor.contiguous().view(torch.uint8).numpy().tobytes(),
            )
        return found


def tree_bytes(directory: Path) -> dict[str, bytes]:
    """Every file below ``directory`` by its relative name."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
