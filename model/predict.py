"""The command ``python -m model.predict REFERENCE OUT``: what a reference says of each token of a text, as a file.

``python -m model.evaluate CKPT --predictions OUT`` then holds a checkpoint against it. REFERENCE is a checkpoint
(shards, on its own ranks) or a Hugging Face directory (transformers, in one process). ``model.evaluate --against``
does both after each other; on several hosts they are two launches.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from model.checkpoint.manifest import MANIFEST, Manifest
from model.checkpoint.source import open_source
from model.checkpoint.storage import reading
from model.evaluation.hf_reference import hf_window_logits, load_hf, loadable
from model.evaluation.options import add_text_options, text_as_asked
from model.evaluation.predictions import Reference, check_room, write_predictions
from model.evaluation.progress import shown_progress
from model.evaluation.scoring import window_logits
from model.evaluation.windows import Window, check_windows, plan_windows
from model.launch import run_command, status_of
from model.load import default_dtype
from model.options import DTYPES, add_model_options, load_as_asked
from model.ranks import agree, end_with_parent, is_rank, pick_device
from model.topology import Topology

MODULE = "model.predict"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 failed, 2 refused."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    if (options.checkpoint / MANIFEST).exists():
        return run_command(MODULE, arguments, options.checkpoint, partial(_predict_by_shards, options), options.device)
    return status_of(lambda: _predict_by_transformers(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Write what a reference predicts.")
    add_model_options(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="an existing directory for the predictions")
    add_text_options(parser)
    return parser


def _predict_by_shards(
    options: argparse.Namespace, manifest: Manifest, topology: Topology, device: torch.device
) -> None:
    """What each rank does: all compute, rank 0 writes."""
    sizes = agree(topology, lambda: check_windows(options.window, options.stride, manifest.args))
    text = agree(topology, lambda: text_as_asked(options, manifest.args) if topology.rank == 0 else None)
    ids: list[int] = topology.broadcast_object(text and text.ids)
    windows = plan_windows(len(ids), *sizes)
    agree(topology, lambda: check_room(options.out, len(ids), manifest.args.vocab_size))
    model = load_as_asked(options, manifest, topology, device)
    stream = _shown(window_logits(model, ids, windows, options.batch), len(windows), quiet=topology.rank != 0)
    if topology.rank == 0:
        reference = _reference("shards", options.checkpoint, MANIFEST, model.execution.dtype)
        write_predictions(options.out, reference, ids, sizes, manifest.args.vocab_size, stream)
    else:
        for _ in stream:
            pass


def _predict_by_transformers(options: argparse.Namespace) -> int:
    if is_rank():
        end_with_parent()
    args = open_source(options.checkpoint).args
    sizes = check_windows(options.window, options.stride, args)
    ids = text_as_asked(options, args).ids
    windows = plan_windows(len(ids), *sizes)
    check_room(options.out, len(ids), args.vocab_size)
    device = pick_device(options.device, 1)
    dtype = DTYPES.get(options.dtype, default_dtype(device))
    reference = _reference("transformers", options.checkpoint, "config.json", dtype)
    with loadable(options.checkpoint) as directory:
        model = load_hf(directory, dtype, device)
    stream = _shown(hf_window_logits(model, ids, windows), len(windows))
    write_predictions(options.out, reference, ids, sizes, args.vocab_size, stream)
    return 0


def _shown(
    stream: Iterator[tuple[Window, torch.Tensor]], total: int, *, quiet: bool = False
) -> Iterator[tuple[Window, torch.Tensor]]:
    """``stream`` with its progress on standard error."""
    with shown_progress("reference", total, "windows", quiet=quiet) as advance:
        for window, logits in stream:
            yield window, logits
            advance(1, "")


def _reference(kind: str, directory: Path, described_by: str, dtype: torch.dtype) -> Reference:
    with reading(directory / described_by):
        sha256 = hashlib.sha256((directory / described_by).read_bytes()).hexdigest()
    return Reference(kind, directory.resolve().name, sha256, str(dtype).removeprefix("torch."))


if __name__ == "__main__":
    sys.exit(main())
