"""The command-line options that every command with a model has, and the model they ask for."""

import argparse
from pathlib import Path

import torch

from model.attention import ATTENTION
from model.checkpoint.manifest import Manifest
from model.engine.engine import Engine, Limits, load_engine
from model.load import load_model
from model.ranks import agree
from model.topology import Topology
from model.transformer import Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FP8_CHOICES = {"auto": None, "on": True, "off": False}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and how to compute with it."""
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="directory with shards and manifest.json")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs if there are")
    parser.add_argument("--dtype", choices=DTYPES, help="compute dtype (default: float32 on the CPU, else bfloat16)")
    parser.add_argument(
        "--attention", choices=ATTENTION, default="absorbed", help="form of MLA (default absorbed, which is fast)"
    )
    parser.add_argument(
        "--fp8",
        choices=FP8_CHOICES,
        default="auto",
        help="run FP8 shards through the FP8 product: where the device has one (auto), always, or never",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run a tokenizer that is shipped as code")


def positive(text: str) -> int:
    """A whole number of at least 1, for ``type=`` of an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def load_as_asked(
    options: argparse.Namespace, manifest: Manifest, topology: Topology, device: torch.device
) -> Transformer:
    """This rank's model by the options; all ranks end where a shard of any of them cannot be used."""
    return agree(
        topology,
        lambda: load_model(
            options.checkpoint,
            manifest,
            topology,
            device,
            dtype=DTYPES.get(options.dtype),
            fp8=FP8_CHOICES[options.fp8],
            attention=options.attention,
        ),
    )


def engine_as_asked(
    options: argparse.Namespace, manifest: Manifest, topology: Topology, device: torch.device, limits: Limits
) -> Engine:
    """This rank's engine by the options; all ranks end where a shard of any of them cannot be used."""
    return agree(
        topology,
        lambda: load_engine(
            options.checkpoint,
            manifest,
            topology,
            device,
            limits,
            dtype=DTYPES.get(options.dtype),
            fp8=FP8_CHOICES[options.fp8],
        ),
    )
