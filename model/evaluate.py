"""The command ``python -m model.evaluate CKPT``: what a checkpoint makes of a text, as evidence beside it.

It starts its own ranks, or is one of ``torchrun --nproc-per-node N -m model.evaluate CKPT …``. Standard output is the
evaluation as JSON, which is also written to ``evaluation.json`` in the checkpoint; progress goes to standard error.
A threshold that is not reached is written down there, and gives exit status 1.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from model.args import ModelArgs
from model.checkpoint.manifest import Manifest
from model.errors import RunError
from model.evaluation.expert_load import counted_experts, expert_loads
from model.evaluation.perplexity import WindowLoss, summarise, window_loss
from model.evaluation.progress import shown_progress
from model.evaluation.record import EVALUATION, Compute, Evaluation, Run, manifest_digest, write_evaluation
from model.evaluation.scoring import window_logits
from model.evaluation.text import Text, read_text
from model.evaluation.thresholds import LIMITS, judge
from model.evaluation.windows import Window, check_windows, plan_windows
from model.launch import run_command
from model.options import add_model_options, load_as_asked, positive
from model.ranks import agree
from model.topology import Topology
from model.transformer import Transformer

MODULE = "model.evaluate"


def main(arguments: Sequence[str] | None = None, program: str = f"python -m {MODULE}") -> int:
    """Run the command and return its exit status: 0 done, 1 failed or below a threshold, 2 refused."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser(program).parse_args(arguments)
    return run_command(MODULE, arguments, options.checkpoint, partial(_work, options), options.device)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Measure a checkpoint on a text.")
    add_model_options(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: a bundled passage of a play)")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="evaluate the text's first N tokens alone")
    parser.add_argument(
        "--window", type=positive, metavar="N", help="tokens seen at once (default: context, ≤2048)"
    )
    parser.add_argument(
        "--stride", type=positive, metavar="N", help="tokens between windows (default: window - 1)"
    )
    parser.add_argument("--batch", type=positive, default=4, metavar="N", help="windows computed at once (default 4)")
    for limit in LIMITS:
        parser.add_argument(limit.option, type=_finite, metavar="X", help=f"threshold: {limit.meaning}")
    parser.add_argument(
        "--only-report", action="store_true", help="end with status 0 where a threshold is not reached, too"
    )
    return parser


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return number


def _work(options: argparse.Namespace, manifest: Manifest, topology: Topology, device: torch.device) -> None:
    """What each rank does. Whatever can be refused is found before the weights are loaded."""
    window, stride = agree(topology, lambda: check_windows(options.window, options.stride, manifest.args))
    text = agree(topology, lambda: _text(options, manifest.args) if topology.rank == 0 else None)
    ids: list[int] = topology.broadcast_object(text and text.ids)
    began = time.monotonic()
    model = load_as_asked(options, manifest, topology, device)
    loaded = time.monotonic()
    windows = plan_windows(len(ids), window, stride)
    with counted_experts(model) as counts:
        losses = agree(topology, lambda: _losses(model, ids, windows, options.batch))
    run = Run(_device_name(device), round(loaded - began, 3), round(time.monotonic() - loaded, 3))
    evaluation = None
    if text is not None:
        perplexity = summarise(losses, window=window, stride=stride, size=text.record.bytes)
        evaluation = Evaluation(
            manifest_sha256=manifest_digest(options.checkpoint),
            text=text.record,
            compute=_compute(options, model),
            perplexity=perplexity,
            expert_load=expert_loads(model, counts),
            thresholds=judge(_asked(options), {"perplexity": asdict(perplexity)}),
            run=run,
        )
    agree(topology, lambda: _finish(options, evaluation))


def _text(options: argparse.Namespace, args: ModelArgs) -> Text:
    return read_text(
        options.text,
        options.checkpoint,
        args,
        max_tokens=options.max_tokens,
        trust_remote_code=options.trust_remote_code,
    )


def _losses(model: Transformer, ids: list[int], windows: Sequence[Window], batch: int) -> list[WindowLoss]:
    """Each window's loss, the same on every rank."""
    losses = []
    with shown_progress("evaluate", len(windows), "windows", quiet=model.topology.rank != 0) as advance:
        for window, logits in window_logits(model, ids, windows, batch):
            losses.append(window_loss(window, logits, ids))
            mean = sum(loss.nats_per_token * loss.tokens for loss in losses) / sum(loss.tokens for loss in losses)
            advance(1, f"{mean:.4f} nats a token")
    return losses


def _asked(options: argparse.Namespace) -> dict[str, float]:
    """The thresholds that were given."""
    given = {limit.name: getattr(options, limit.name) for limit in LIMITS}
    return {name: value for name, value in given.items() if value is not None}


def _compute(options: argparse.Namespace, model: Transformer) -> Compute:
    return Compute(
        device=model.device.type,
        dtype=str(model.execution.dtype).removeprefix("torch."),
        fp8=model.execution.fp8,
        attention=options.attention,
        mp=model.topology.size,
        batch=options.batch,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _finish(options: argparse.Namespace, evaluation: Evaluation | None) -> None:
    """Rank 0 alone has one. It is written down before a threshold may end the run."""
    if evaluation is None:
        return
    write_evaluation(options.checkpoint, evaluation)
    print(json.dumps(evaluation.to_json(), indent=2), flush=True)
    if evaluation.problems and not options.only_report:
        raise RunError([*evaluation.problems, f"written down in {options.checkpoint / EVALUATION}"])


if __name__ == "__main__":
    sys.exit(main())
