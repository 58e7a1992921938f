"""The command ``python -m model.evaluate CKPT``: what a checkpoint makes of a text, as evidence beside it.

It starts its own ranks, or is one of ``torchrun --nproc-per-node N -m model.evaluate CKPT …``. Standard output is the
evaluation as JSON, which is also written to ``evaluation.json`` in the checkpoint, with a page for people beside it.
Progress goes to standard error. A threshold that is not reached is written down, and gives exit status 1.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from model.checkpoint.manifest import Manifest, read_manifest
from model.checkpoint.released import manifest_digest
from model.errors import InputError, RunError
from model.evaluation.agreement import AgreementMeter, check_predictions
from model.evaluation.measure import Measured, measure
from model.evaluation.options import AGAINST_TOKENS, add_text_options, text_as_asked
from model.evaluation.perplexity import summarise
from model.evaluation.predictions import read_predictions
from model.evaluation.record import EVALUATION, Compute, Evaluation, Run, write_evaluation
from model.evaluation.reference import PREDICT, predict_arguments, reference_ranks
from model.evaluation.report import write_report
from model.evaluation.speed import measure_speed
from model.evaluation.text import Text
from model.evaluation.thresholds import LIMITS, check_limits, judge
from model.evaluation.windows import check_windows, plan_windows
from model.launch import run_command, start_ranks, status_of
from model.options import DTYPES, add_model_options, load_as_asked, positive
from model.ranks import agree, is_rank
from model.topology import Topology
from model.transformer import Transformer

MODULE = "model.evaluate"


def main(arguments: Sequence[str] | None = None, program: str = f"python -m {MODULE}") -> int:
    """Run the command and return its exit status: 0 done, 1 failed or below a threshold, 2 refused."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser(program).parse_args(arguments)
    if options.against is not None and not is_rank():
        return status_of(lambda: _against(options, arguments))
    return run_command(MODULE, arguments, options.checkpoint, partial(_work, options), options.device)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Measure a checkpoint on a text.")
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--against", type=Path, metavar="DIR", help="agree with this checkpoint, or HF directory")
    parser.add_argument("--predictions", type=Path, metavar="DIR", help="agree with these predictions (model.predict)")
    parser.add_argument(
        "--against-tokens",
        type=positive,
        default=AGAINST_TOKENS,
        metavar="N",
        help=f"compare the first N tokens (default {AGAINST_TOKENS}); the disk holds N x vocabulary x 4 bytes",
    )
    parser.add_argument("--against-dtype", choices=DTYPES, help="the reference's compute dtype (default: as --dtype)")
    parser.add_argument(
        "--speed", type=_batches, default=(), metavar="B,…", help="measure generation at these batch sizes, too"
    )
    for limit in LIMITS:
        parser.add_argument(limit.option, type=_finite, metavar="X", help=f"threshold: {limit.meaning}")
    parser.add_argument(
        "--only-report", action="store_true", help="end with status 0 where a threshold is not reached, too"
    )
    return parser


def _batches(text: str) -> tuple[int, ...]:
    return tuple(positive(number) for number in text.split(","))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return number


def _against(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """First the reference's ranks, then the checkpoint's, which read what the first have written."""
    manifest = read_manifest(options.checkpoint)
    sizes = check_windows(options.window, options.stride, manifest.args)
    ranks = reference_ranks(options.against)
    with tempfile.TemporaryDirectory(prefix="shardflow-") as scratch:
        status = start_ranks(PREDICT, predict_arguments(vars(options), Path(scratch), sizes), ranks).returncode
        return status or start_ranks(MODULE, [*arguments, f"--predictions={scratch}"], manifest.mp).returncode


@dataclass(frozen=True)
class Asked:
    """What rank 0, which alone handles text and reference, has been asked, and of which checkpoint."""

    manifest_sha256: str
    text: Text
    meter: AgreementMeter | None


def _work(options: argparse.Namespace, manifest: Manifest, topology: Topology, device: torch.device) -> None:
    """What each rank does. Whatever can be refused is found before the weights are loaded."""
    sizes = agree(topology, lambda: _checked(options, manifest))
    asked = agree(topology, lambda: _asked(options, manifest, sizes) if topology.rank == 0 else None)
    ids: list[int] = topology.broadcast_object(None if asked is None else asked.text.ids)
    meter = None if asked is None else asked.meter
    began = time.monotonic()
    model = load_as_asked(options, manifest, topology, device)
    loaded = time.monotonic()
    measured = agree(topology, lambda: measure(model, ids, plan_windows(len(ids), *sizes), options.batch, meter))
    evaluated = time.monotonic()
    speed = measure_speed(model, ids, options.speed)
    run = Run(_device_name(device), round(loaded - began, 3), round(evaluated - loaded, 3), speed)
    evaluation = None if asked is None else _evaluation(options, model, asked, measured, sizes, run)
    agree(topology, lambda: _finish(options, evaluation))


def _checked(options: argparse.Namespace, manifest: Manifest) -> tuple[int, int]:
    """Window and stride. Raises ``InputError`` where the options do not fit each other or the model."""
    if options.against is not None and options.predictions is None:
        raise InputError(
            f"--against {options.against}: ranks that are started together compute one model; "
            f"run {PREDICT} on the reference first, and give --predictions"
        )
    check_limits(_limits(options), options.predictions is not None)
    return check_windows(options.window, options.stride, manifest.args)


def _asked(options: argparse.Namespace, manifest: Manifest, sizes: tuple[int, int]) -> Asked:
    text = text_as_asked(options, manifest.args)
    meter = None
    if options.predictions is not None:
        predictions = read_predictions(options.predictions)
        check_predictions(predictions, text.ids, manifest.args.vocab_size, sizes)
        meter = AgreementMeter(predictions)
    return Asked(manifest_digest(options.checkpoint), text, meter)


def _limits(options: argparse.Namespace) -> dict[str, float]:
    """The thresholds that were given."""
    given = {limit.name: getattr(options, limit.name) for limit in LIMITS}
    return {name: value for name, value in given.items() if value is not None}


def _evaluation(
    options: argparse.Namespace, model: Transformer, asked: Asked, measured: Measured, sizes: tuple[int, int], run: Run
) -> Evaluation:
    perplexity = summarise(measured.losses, window=sizes[0], stride=sizes[1], size=asked.text.record.bytes)
    parts = {"perplexity": asdict(perplexity), "agreement": measured.agreement and asdict(measured.agreement)}
    return Evaluation(
        manifest_sha256=asked.manifest_sha256,
        text=asked.text.record,
        compute=Compute(
            device=model.device.type,
            dtype=str(model.execution.dtype).removeprefix("torch."),
            fp8=model.execution.fp8,
            attention=options.attention,
            mp=model.topology.size,
            batch=options.batch,
        ),
        perplexity=perplexity,
        agreement=measured.agreement,
        expert_load=measured.expert_load,
        thresholds=judge(_limits(options), parts),
        run=run,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, threads: {torch.get_num_threads()}"


def _finish(options: argparse.Namespace, evaluation: Evaluation | None) -> None:
    """Rank 0 alone has one. It is written down before a threshold may end the run."""
    if evaluation is None:
        return
    write_report(options.checkpoint, evaluation)
    write_evaluation(options.checkpoint, evaluation)
    print(json.dumps(evaluation.to_json(), indent=2), flush=True)
    if evaluation.problems and not options.only_report:
        raise RunError([*evaluation.problems, f"written down in {options.checkpoint / EVALUATION}"])


if __name__ == "__main__":
    sys.exit(main())
