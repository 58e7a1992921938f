"""The command ``python -m model.warmup CKPT``: load the shards on every rank and generate two tokens.

Standard output is one JSON document with a report of each rank. It proves that the shards load, that the ranks
reach each other and that their logits are finite; it comes after loading, since before it would prove nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from model.args import ModelArgs
from model.checkpoint.manifest import Manifest, shard_name
from model.errors import InputError, RunError
from model.generation import generate
from model.launch import run_command
from model.options import add_model_options, load_as_asked
from model.rank_report import RankReport
from model.ranks import agree
from model.sampling import Sampling
from model.topology import Topology
from model.transformer import Cache, Transformer

MODULE = "model.warmup"
TOKENS = 2


class Watched:
    """A model whose logits are looked at on their way to ``generate``."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.args, self.topology, self.device = model.args, model.topology, model.device
        self.new_cache = model.new_cache
        self.finite = True

    def __call__(self, tokens: torch.Tensor, start: int, cache: Cache) -> torch.Tensor:
        """The model's logits."""
        logits: torch.Tensor = self.model(tokens, start, cache)
        self.finite = self.finite and bool(logits.isfinite().all())
        return logits


def warm_up(model: Transformer, load_s: float) -> RankReport:
    """Generate two tokens from a few first ids of the vocabulary, on every rank at once."""
    began = time.monotonic()
    watched = Watched(model)
    prompt = list(range(min(8, model.args.vocab_size, model.args.max_seq_len - TOKENS)))
    sampling = Sampling()
    [tokens] = generate(
        watched,
        [prompt],
        max_new_tokens=TOKENS,
        eos=(),
        sampling=sampling,
        generator=sampling.generator(model.device),
    )
    return RankReport(
        rank=model.topology.rank,
        device=str(model.device),
        dtype=str(model.execution.dtype).removeprefix("torch."),
        fp8=model.execution.fp8,
        load_s=round(load_s, 3),
        warmup_s=round(time.monotonic() - began, 3),
        tokens=tokens,
        finite=watched.finite,
    )


def check_context(args: ModelArgs) -> None:
    """Raise ``InputError`` where a token and the two after it do not fit into the context."""
    if args.max_seq_len <= TOKENS:
        raise InputError(
            f"the model's context of {args.max_seq_len} is too short for a warm-up, a token and {TOKENS} new ones"
        )


def check_finite(report: RankReport, model: Transformer) -> None:
    """Raise ``RunError`` naming the rank, and its weights that are to blame, where its logits were not finite."""
    if report.finite:
        return
    shard = shard_name(model.topology.rank, model.topology.size)
    culprits = [name for name, weight in model.named_parameters() if not weight.float().isfinite().all()]
    if culprits:
        raise RunError(f"rank {report.rank}: logits are not finite; {shard}: {name!r} is not" for name in culprits)
    raise RunError(f"rank {report.rank}: logits are not finite, though all weights in {shard} are")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 failed, 2 refused."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description="Load a checkpoint on its ranks and generate two tokens."
    )
    add_model_options(parser)
    options = parser.parse_args(arguments)
    return run_command(MODULE, arguments, options.checkpoint, partial(_work, options), options.device)


def _work(options: argparse.Namespace, manifest: Manifest, topology: Topology, device: torch.device) -> None:
    agree(topology, lambda: check_context(manifest.args))
    began = time.monotonic()
    model = load_as_asked(options, manifest, topology, device)
    report = warm_up(model, time.monotonic() - began)
    agree(topology, lambda: check_finite(report, model))
    reports = topology.all_gather_object(asdict(report))
    if topology.rank == 0:
        print(json.dumps({"checkpoint": str(options.checkpoint), "mp": manifest.mp, "ranks": reports}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
