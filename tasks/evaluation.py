"""The evaluation as a stage: the ranks of ``model.evaluate``, their evidence as an artifact, its thresholds as law."""

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact

from model.args import ModelArgs
from model.checkpoint.manifest import read_manifest
from model.errors import RunError
from model.evaluation.plots import load_plot, loss_plot
from model.evaluation.record import EVALUATION, Evaluation, parse_evaluation
from model.evaluation.reference import PREDICT, as_arguments, predict_arguments, reference_ranks
from model.evaluation.report import REPORT
from model.evaluation.tables import Rows, tables
from model.evaluation.windows import check_windows
from tasks.gpu import gpu_slot
from tasks.launches import _output_of

MODULE = "model.evaluate"


@task(persist_result=False)
def evaluate(checkpoint: Path, options: Mapping[str, Any], timeout_s: float, gpu_limit: str | None) -> Evaluation:
    """Evaluate ``checkpoint`` on its own ranks, ended after ``timeout_s`` seconds whatever happens.

    ``options`` are those of ``model.evaluate`` by name; None leaves one out. ``gpu_limit`` names the global concurrency
    limit of which a slot is held while the ranks run. Raises ``RunError`` with a line for each threshold that was not
    reached, once ``evaluation.json`` and the artifact say so.
    """
    manifest = read_manifest(checkpoint)
    arguments = [str(checkpoint), "--only-report", *as_arguments({**options, "against": None})]
    with gpu_slot(gpu_limit), _predictions(options, manifest.args, timeout_s) as predictions:
        printed = _output_of(MODULE, [*arguments, *predictions], manifest.mp, timeout_s)
    evaluation = parse_evaluation(printed, MODULE)
    report_evaluation(checkpoint, evaluation)
    if evaluation.problems:
        raise RunError(f"{checkpoint / EVALUATION}: {problem}" for problem in evaluation.problems)
    return evaluation


@contextmanager
def _predictions(options: Mapping[str, Any], args: ModelArgs, timeout_s: float) -> Iterator[list[str]]:
    """The option with the reference's predictions, where there is a reference; they are removed afterwards."""
    reference = options.get("against")
    if reference is None:
        yield []
        return
    sizes = check_windows(options.get("window"), options.get("stride"), args)
    with TemporaryDirectory(prefix="shardflow-") as scratch:
        arguments = predict_arguments(options, Path(scratch), sizes)
        _output_of(PREDICT, arguments, reference_ranks(reference), timeout_s)
        yield [f"--predictions={scratch}"]


def report_evaluation(checkpoint: Path, evaluation: Evaluation) -> None:
    """The evidence on one page."""
    verdict = "All thresholds reached." if evaluation.passed else "**Failed.** " + "; ".join(evaluation.problems)
    plots = {"Loss of each window": loss_plot(evaluation.perplexity, "png")}
    if evaluation.expert_load:
        plots["Experts that the text used"] = load_plot(evaluation.expert_load, "png")
    parts = [f"## {checkpoint.name}", verdict if evaluation.thresholds else "No threshold was asked for."]
    parts += [f"### {title}\n\n{_markdown(rows)}" for title, rows in tables(evaluation).items()]
    parts += [f"### {title}\n\n![{title}]({_data_uri(picture)})" for title, picture in plots.items()]
    parts.append(f"The same, with every window: `{checkpoint / REPORT}`")
    create_markdown_artifact("\n\n".join(parts), key="evaluation", description=f"Evidence for {checkpoint}")


def _markdown(rows: Rows) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(value.replace('|', chr(92) + '|') for value in line)} |" for line in lines)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
