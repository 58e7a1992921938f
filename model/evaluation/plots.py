"""Plots of an evaluation, by matplotlib: PNG for artifacts, SVG for the report, legible on white and on black."""

import io
from typing import TYPE_CHECKING, Any, Literal

from model.evaluation.agreement import Agreement
from model.evaluation.expert_load import ExpertLoad
from model.evaluation.perplexity import Perplexity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["png", "svg"]

INK = "#787e89"
"""Grey text with a contrast of 4 to white and to black alike. In SVG it becomes the colour of the page's text."""

LINE = "#2f7ed8"
WIDTH = 8.0


def loss_plot(perplexity: Perplexity, kind: Kind) -> bytes:
    """The loss of each window along the text, and its mean."""
    figure, axes = _figure(2.8)
    _steps(axes, perplexity, [window.nats_per_token for window in perplexity.windows])
    axes.axhline(perplexity.nats_per_token, color=INK, linewidth=1, linestyle="--")
    axes.set_title(f"mean {perplexity.nats_per_token:.4f}", loc="right", fontsize=10, color=INK)
    axes.set_ylabel("nats a token")
    return _picture(figure, kind)


def divergence_plot(perplexity: Perplexity, agreement: Agreement, kind: Kind) -> bytes:
    """The mean KL divergence of each window along the text, on a logarithmic scale unless all are 0."""
    figure, axes = _figure(2.8)
    _steps(axes, perplexity, agreement.windows)
    if any(agreement.windows):
        axes.set_yscale("log", nonpositive="clip")
    axes.set_ylabel("mean KL, nats")
    return _picture(figure, kind)


def load_plot(loads: tuple[ExpertLoad, ...], kind: Kind) -> bytes:
    """How often each expert of each MoE layer is chosen, in multiples of an even share."""
    figure, axes = _figure(min(9.0, 1.8 + 0.25 * len(loads)))
    even = [[count * len(load.counts) / max(1, sum(load.counts)) for count in load.counts] for load in loads]
    most = max(2.0, *(max(row) for row in even))
    image = axes.imshow(even, aspect="auto", cmap="viridis", vmin=0, vmax=most, interpolation="nearest")
    axes.grid(visible=False)
    axes.set_yticks(*_some([str(load.layer) for load in loads]))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    bar = figure.colorbar(image, ax=axes, label="× even share")
    bar.ax.tick_params(colors=INK)
    bar.ax.yaxis.label.set_color(INK)
    bar.outline.set_visible(False)
    return _picture(figure, kind)


def _some(labels: list[str], most: int = 12) -> tuple[list[int], list[str]]:
    """Places and labels of at most ``most`` evenly spread rows."""
    places = range(0, len(labels), -(-len(labels) // most))
    return list(places), [labels[place] for place in places]


def _steps(axes: Any, perplexity: Perplexity, values: Any) -> None:
    windows = perplexity.windows[: len(values)]
    edges = [window.first for window in windows] + [windows[-1].first + windows[-1].tokens]
    axes.stairs(values, edges, baseline=None, color=LINE, linewidth=2)
    axes.set_xlabel("token of the text")
    axes.margins(x=0, y=0.2)


def _figure(height: float) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), facecolor="none", layout="constrained")
    axes = figure.add_subplot(facecolor="none")
    axes.tick_params(colors=INK, which="both")
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.8)
    return figure, axes


def _picture(figure: "Figure", kind: Kind) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "shardflow"}):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=144, metadata=metadata)
    return buffer.getvalue().replace(INK.encode(), b"currentColor") if kind == "svg" else buffer.getvalue()
