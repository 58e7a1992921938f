"""The ``shardflow`` command: plan, dequantize, convert, reshard, verify, adopt, generate, evaluate, run.

Results go to standard output, everything else to standard error. Exit status: 0 done, 1 failed while running,
2 refused (input or arguments).
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal

from flows.options import Checkpoint, Downloads, MaxMemory, Mp, Mtp, Out, Revision, Source, Weights, Workers, parse_size
from model.conflicts import say_conflict
from model.errors import ShardflowError

INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Take DeepSeek-V3-family checkpoints from the hub to proven, warmed-up shards.",
)


@app.command()
def plan(
    source: Source,
    mp: Mp,
    weights: Weights = None,
    mtp: Mtp = "drop",
    revision: Revision = None,
    out: Annotated[Path, typer.Option(help="Where the shards would go, for the free space.")] = Path(),
    gpu_memory: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Memory of one GPU, for the verdict.")
    ] = "80GB",  # type: ignore[assignment]
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a source and say what a conversion would write, from headers alone."""
    from model.checkpoint.describe import describe
    from model.checkpoint.plan import plan_shards
    from model.checkpoint.source import open_source
    from tasks.terminal import show_plan

    with _headers(source, revision) as directory:
        planned = plan_shards(open_source(directory, mtp), mp=mp, weights=weights, mtp=mtp)
        summary = describe(planned, gpu_memory)
    free = shutil.disk_usage(next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())).free
    if as_json:
        print(json.dumps(summary.to_json() | {"disk_free": free}, indent=2))
    else:
        show_plan(summary, Console(highlight=False))
        enough = "enough" if free >= summary.output_size else "too little"
        print(f"disk: {decimal(summary.output_size)} needed at {out}, {decimal(free)} free: {enough}")


@app.command()
def dequantize(
    source: Source,
    out: Out,
    revision: Revision = None,
    downloads: Downloads = None,
    max_memory: MaxMemory = "2GiB",  # type: ignore[assignment]
    workers: Workers = None,
) -> None:
    """Write an FP8 checkpoint as BF16, a directory that transformers loads as it stands."""
    from model.checkpoint.dequantize import RECORD
    from model.checkpoint.dequantize import dequantize as run
    from tasks.terminal import TerminalProgress

    directory = _locate(source, revision, downloads)
    finished = (out / RECORD).exists()
    with TerminalProgress() as progress:
        result = run(directory, out, resources=_resources(max_memory, workers), progress=progress)
    _say(f"{out}: {'was already finished' if finished else 'finished'}, {len(result.files)} files")


@app.command()
def convert(
    source: Source,
    out: Out,
    mp: Mp,
    weights: Weights = None,
    mtp: Mtp = "drop",
    revision: Revision = None,
    downloads: Downloads = None,
    max_memory: MaxMemory = "2GiB",  # type: ignore[assignment]
    workers: Workers = None,
) -> None:
    """Write the shards of every rank. Run again after a crash, it resumes."""
    from model.checkpoint.convert import convert as run
    from model.checkpoint.manifest import MANIFEST
    from tasks.terminal import TerminalProgress

    directory = _locate(source, revision, downloads)
    finished = (out / MANIFEST).exists()
    resources = _resources(max_memory, workers)
    with TerminalProgress() as progress:
        manifest = run(directory, out, mp=mp, weights=weights, mtp=mtp, resources=resources, progress=progress)
    _say(f"{out}: {'was already finished' if finished else 'finished'}, mp {manifest.mp}, {manifest.weights} weights")
    for note in manifest.notes:
        _say(f"note: {note}")


@app.command()
def reshard(
    checkpoint: Checkpoint,
    out: Out,
    mp: Mp,
    max_memory: MaxMemory = "2GiB",  # type: ignore[assignment]
    workers: Workers = None,
) -> None:
    """Write a checkpoint's tensors as another number of shards, without its source."""
    from model.checkpoint.reshard import reshard as run
    from tasks.terminal import TerminalProgress

    with TerminalProgress() as progress:
        manifest = run(checkpoint, out, mp=mp, resources=_resources(max_memory, workers), progress=progress)
    _say(f"{out}: finished, mp {manifest.mp}, {manifest.weights} weights")


@app.command()
def verify(
    checkpoint: Checkpoint,
    source: Annotated[str | None, typer.Option(help="What the shards were made of: directory or hub id.")] = None,
    revision: Revision = None,
    downloads: Downloads = None,
) -> None:
    """Check a checkpoint against its manifest, and bit for bit against its source where one is given."""
    from model.checkpoint.verify import verify as run
    from tasks.results import ValidationResult
    from tasks.tables import validation_fact
    from tasks.terminal import TerminalProgress

    directory = _locate(source, revision, downloads) if source else None
    with TerminalProgress() as progress:
        proven = run(checkpoint, directory, progress)
    if source:
        print(validation_fact(ValidationResult(directory=checkpoint, **proven.__dict__)))
    else:
        print(f"consistent: {proven.tensors:,} tensors in {proven.files} files as the manifest says; no source given")


@app.command()
def adopt(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A directory of the official converter's shards.")],
    config: Annotated[Path, typer.Option(help="The official config_*.json, or the source's config.json.")],
) -> None:
    """Write the manifest of shards that the official converter made, so that they load here."""
    from model.checkpoint.adopt import adopt as run
    from tasks.terminal import TerminalProgress

    with TerminalProgress() as progress:
        manifest = run(checkpoint, config, progress)
    _say(f"{checkpoint}: adopted, mp {manifest.mp}, {manifest.weights} weights")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def generate(context: typer.Context) -> None:
    """Reply to a prompt, to a file of prompts, or at the terminal; starts its own ranks (see generate --help)."""
    from model.generate import main as run

    raise typer.Exit(run(context.args, program="shardflow generate"))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evaluate(context: typer.Context) -> None:
    """Measure a checkpoint on a text and keep the evidence beside it (see evaluate --help)."""
    from model.evaluate import main as run

    raise typer.Exit(run(context.args, program="shardflow evaluate"))


@app.command()
def run(
    source: Source,
    out: Out,
    mp: Mp,
    weights: Weights = None,
    dequantize: Annotated[
        Literal["staged", "fused"] | None, typer.Option(help="How FP8 becomes BF16: staged (default) or fused.")
    ] = None,
    mtp: Mtp = "drop",
    revision: Revision = None,
    work: Annotated[Path | None, typer.Option(help="Downloads and intermediates; default OUT.work.")] = None,
    max_memory: MaxMemory = "2GiB",  # type: ignore[assignment]
    workers: Workers = None,
    keep_intermediates: Annotated[
        Literal["none", "bf16", "all"], typer.Option(help="What of downloads and intermediates stays at the end.")
    ] = "all",
    task_runner: Annotated[
        Literal["threads", "processes", "ray"], typer.Option(help="Where files are written.")
    ] = "threads",
    ray_address: Annotated[str | None, typer.Option(help="The Ray cluster, for --task-runner ray.")] = None,
    gpu_limit: Annotated[str | None, typer.Option(help="Global concurrency limit that warm-up takes.")] = None,
    prompt: Annotated[str | None, typer.Option(help="A prompt to answer at the end.")] = None,
) -> None:
    """Run the whole Prefect pipeline, on an embedded server or on PREFECT_API_URL."""
    given: dict[str, Any] = {"source": source, "out": out, "mp": mp, "weights": weights, "dequantize": dequantize}
    given |= {"mtp": mtp, "revision": revision, "work": work, "max_memory": max_memory, "prompt": prompt}
    given |= {"keep_intermediates": keep_intermediates, "task_runner": task_runner, "ray_address": ray_address}
    given |= {"gpu_limit": gpu_limit} | ({"workers": workers} if workers else {})
    from flows.run import parameters, run_pipeline

    run_pipeline(parameters(given))


@contextmanager
def _headers(source: str, revision: str | None) -> Iterator[Path]:
    """A directory whose headers are those of ``source``; of a hub id nothing else is fetched."""
    from model.checkpoint.locate import check_revision, is_hub_id, local_directory

    check_revision(source, revision)
    if not is_hub_id(source):
        yield local_directory(source)
        return
    from model.checkpoint.hub_headers import headers_of

    with headers_of(source, revision) as directory:
        yield directory


def _locate(source: str, revision: str | None, downloads: Path | None) -> Path:
    from model.checkpoint.locate import default_downloads, locate
    from tasks.terminal import TerminalProgress

    with TerminalProgress() as progress:
        return locate(source, revision, downloads or default_downloads(), progress)


def _resources(max_memory: int, workers: int | None) -> Any:
    from model.checkpoint.build import Resources

    return Resources(max_memory, workers) if workers else Resources(max_memory)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> None:
    """Entry point: every problem on a line of its own, and the exit status that belongs to it."""
    say_conflict()
    try:
        app(prog_name="shardflow")
    except ShardflowError as error:
        for problem in error.problems:
            _say(f"error: {problem}")
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        _say("interrupted; finished files are kept: run again to go on")
        sys.exit(INTERRUPTED)
    except OSError as error:
        _say(f"error: {error.filename or 'storage'}: {error.strerror or error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
