"""One rank's model from its shard: every tensor exactly once, FP8 dequantised once where the model is not FP8."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from kernels.device import has_fp8_product
from kernels.weight_dequant import weight_dequant
from model.args import ModelArgs
from model.attention import AttentionForm
from model.checkpoint.dtypes import TORCH_DTYPES, decode_scale
from model.checkpoint.headers import TensorInfo, read_header
from model.checkpoint.manifest import Manifest, shard_name
from model.checkpoint.names import TARGET_SCALE_SUFFIX, target_scale
from model.checkpoint.source import SCALE_DTYPES, WEIGHT_DTYPES
from model.errors import InputError
from model.layers import FP8, Execution
from model.topology import Topology
from model.transformer import Transformer

FP8_PRODUCT_BLOCK = (128, 128)
"""The only block size of ``kernels.fp8_gemm``; other FP8 weights are dequantised when loading."""


def default_dtype(device: torch.device) -> torch.dtype:
    """The compute dtype where none is asked for: float32 on the CPU, bfloat16 on a GPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load_model(
    directory: Path,
    manifest: Manifest,
    topology: Topology,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    fp8: bool | None = None,
    attention: AttentionForm = "absorbed",
) -> Transformer:
    """This rank's part of the checkpoint in ``directory``, ready to compute on ``device``.

    ``fp8`` None runs FP8 shards through the FP8 product where the device has it; True does so on any device;
    False dequantises: ``float32(w) * scale``, rounded once to BF16, then cast to ``dtype``.
    Raises ``InputError`` with a line for each tensor that is missing, left over, or of another shape or dtype.
    """
    execution = execution_for(directory, manifest, topology, device, dtype=dtype, fp8=fp8)
    model = Transformer(manifest.args, execution, attention)
    fill(model, directory / shard_name(topology.rank, topology.size), manifest.args.block_size)
    return model


def execution_for(
    directory: Path,
    manifest: Manifest,
    topology: Topology,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    fp8: bool | None = None,
) -> Execution:
    """How the checkpoint's model computes on ``device``; see ``load_model``."""
    args = manifest.args
    possible = args.dtype == "fp8" and args.block_size == FP8_PRODUCT_BLOCK
    if fp8 and not possible:
        raise InputError(f"{directory}: holds {described(args)} weights; the FP8 product takes FP8 in 128x128 blocks")
    if fp8 is None:
        fp8 = possible and has_fp8_product(device)
    return Execution(topology, device, dtype or default_dtype(device), fp8)


def described(args: ModelArgs) -> str:
    """How the shards hold their linear weights, for people."""
    return "BF16" if args.dtype == "bf16" else f"FP8 ({args.block_size[0]}x{args.block_size[1]} blocks)"


def fill(model: torch.nn.Module, shard: Path, block_size: tuple[int, int]) -> None:
    """Copy the tensors of ``shard`` into the parameters of the same names.

    One rule: where the shard's tensor is FP8 and the parameter is not, it is dequantised by its ``scale``.
    The header is checked against the parameters both ways before any data is read.
    """
    parameters = dict(model.named_parameters())
    tensors = read_header(shard).tensors
    if problems := list(_mismatches(parameters, tensors, block_size)):
        raise InputError([f"{shard}: {problem}" for problem in problems])
    with safe_open(shard, framework="pt") as file, torch.no_grad():
        for name, parameter in parameters.items():
            tensor = file.get_tensor(name).to(parameter.device)
            if _is_scale(name):
                tensor = decode_scale(tensor)
            if _to_dequantise(parameter, tensors[name]):
                scale = decode_scale(file.get_tensor(target_scale(name))).to(parameter.device)
                tensor = weight_dequant(tensor, scale, block_size=block_size)
            parameter.copy_(tensor)


def _to_dequantise(parameter: torch.Tensor, tensor: TensorInfo) -> bool:
    return TORCH_DTYPES[tensor.dtype] == FP8 and parameter.dtype != FP8


def _mismatches(
    parameters: dict[str, torch.nn.Parameter], tensors: dict[str, TensorInfo], block_size: tuple[int, int]
) -> Iterator[str]:
    """What hinders ``fill``, a line each, without the file's name."""
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if name in tensors and _to_dequantise(parameter, tensors[name]):
            rows, columns = parameter.shape
            expected[target_scale(name)] = (-(-rows // block_size[0]), -(-columns // block_size[1]))
    for name, shape in expected.items():
        if name not in tensors:
            yield f"tensor {name!r} {list(shape)} is missing; convert again for this config"
        elif tensors[name].shape != shape:
            yield (
                f"tensor {name!r} has shape {list(tensors[name].shape)}, expected {list(shape)}; "
                "convert again for this config"
            )
        elif not _fits(name, parameters.get(name), tensors[name].dtype):
            wanted = "F8_E4M3" if name in parameters and parameters[name].dtype == FP8 else "a float or F8_E4M3"
            yield f"tensor {name!r} has dtype {tensors[name].dtype}, expected {wanted}; convert again"
    for name in tensors:
        if name not in expected:
            yield f"tensor {name!r} is not part of this model; convert again for this config"


def _is_scale(name: str) -> bool:
    return name.endswith(f".{TARGET_SCALE_SUFFIX}")


def _fits(name: str, parameter: torch.nn.Parameter | None, dtype: str) -> bool:
    """Whether a tensor stored as ``dtype`` may fill ``parameter`` (None: it is a scale used for dequantising)."""
    if _is_scale(name):
        return dtype in SCALE_DTYPES
    if parameter is not None and parameter.dtype == FP8:
        return TORCH_DTYPES[dtype] == FP8
    return dtype in WEIGHT_DTYPES
