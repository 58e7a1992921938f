"""Plots of an evaluation, by matplotlib, as bytes of a picture."""

import io
from typing import TYPE_CHECKING, Any

from model.evaluation.perplexity import Perplexity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, LINE, PAPER = "#8a8f98", "#2f7ed8", "none"
"""Grey ink and a blue line are legible on white and on near-black alike, so the paper stays transparent."""


def loss_plot(perplexity: Perplexity, kind: str = "png") -> bytes:
    """The loss of each window along the text, and its mean, as ``png`` or ``svg``."""
    figure, axes = _figure(8, 2.8)
    starts = [window.first for window in perplexity.windows]
    ends = [window.first + window.tokens for window in perplexity.windows]
    axes.stairs([window.nats_per_token for window in perplexity.windows], [*starts, ends[-1]], color=LINE, linewidth=2)
    axes.axhline(perplexity.nats_per_token, color=INK, linewidth=1, linestyle="--")
    axes.annotate(
        f"mean {perplexity.nats_per_token:.4f}",
        (1, perplexity.nats_per_token),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color=INK,
    )
    axes.set_xlabel("token of the text")
    axes.set_ylabel("nats a token")
    axes.margins(x=0)
    return _bytes(figure, kind)


def _figure(width: float, height: float) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    axes = figure.add_subplot(facecolor=PAPER)
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.8)
    return figure, axes


def _bytes(figure: "Figure", kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=144, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()
