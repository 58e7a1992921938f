"""``evaluation.html``: an evaluation on one page that needs nothing but itself, in light and in dark."""

from html import escape
from pathlib import Path
from string import Template

from model.checkpoint.storage import storage_errors, write_atomically
from model.evaluation.plots import divergence_plot, load_plot, loss_plot
from model.evaluation.record import Evaluation
from model.evaluation.tables import Rows, tables, window_rows

REPORT = "evaluation.html"
TEMPLATE = Path(__file__).with_name("report.html")


def write_report(checkpoint: Path, evaluation: Evaluation) -> None:
    """Write the page beside the record, whole or not at all."""
    path = checkpoint / REPORT
    with storage_errors(path):
        write_atomically(path, page(checkpoint.resolve().name, evaluation).encode())


def page(name: str, evaluation: Evaluation) -> str:
    """The HTML of the checkpoint ``name``'s evaluation."""
    parts = [_section(title, _table(rows)) for title, rows in tables(evaluation).items()]
    parts += [_section(title, _figure(picture)) for title, picture in _plots(evaluation).items()]
    parts.append(f"<details><summary>Every window</summary>{_table(window_rows(evaluation))}</details>")
    return Template(TEMPLATE.read_text()).substitute(
        name=escape(name), verdict=_verdict(evaluation), body="\n".join(parts)
    )


def _plots(evaluation: Evaluation) -> dict[str, bytes]:
    """SVG pictures by their titles."""
    plots = {"Loss of each window": loss_plot(evaluation.perplexity, "svg")}
    if evaluation.agreement is not None:
        plots["Divergence of each window"] = divergence_plot(evaluation.perplexity, evaluation.agreement, "svg")
    if evaluation.expert_load:
        plots["Experts that the text used"] = load_plot(evaluation.expert_load, "svg")
    return plots


def _verdict(evaluation: Evaluation) -> str:
    if not evaluation.passed:
        return f'<p class="failed">Failed: {escape("; ".join(evaluation.problems))}</p>'
    if evaluation.thresholds:
        return '<p class="passed">All thresholds reached.</p>'
    return "<p>No threshold was asked for.</p>"


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}"


def _figure(svg: bytes) -> str:
    """The picture without what comes before its element."""
    text = svg.decode()
    return f"<figure>{text[text.index('<svg') :]}</figure>"


def _table(rows: Rows) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row.values()) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
