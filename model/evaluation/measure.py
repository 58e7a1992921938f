"""One pass of a model over a text, in which everything that hangs on its logits is measured."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from model.evaluation.agreement import Agreement, AgreementMeter
from model.evaluation.expert_load import ExpertLoad, counted_experts, expert_loads
from model.evaluation.perplexity import WindowLoss, window_loss
from model.evaluation.progress import Advance, shown_progress
from model.evaluation.scoring import window_logits
from model.evaluation.windows import Window
from model.transformer import Transformer


@dataclass(frozen=True)
class Measured:
    """What one pass gives: the loss of each window, the load of each MoE layer, agreement where it was asked for."""

    losses: tuple[WindowLoss, ...]
    expert_load: tuple[ExpertLoad, ...]
    agreement: Agreement | None


def measure(
    model: Transformer, ids: Sequence[int], windows: Sequence[Window], batch: int, meter: AgreementMeter | None
) -> Measured:
    """Go through ``windows`` of ``ids``. Every rank calls it; ``meter`` is rank 0's alone.

    Raises ``RunError`` on every rank where a loss is not finite.
    """
    losses: list[WindowLoss] = []
    with counted_experts(model) as counts, _progress(model, len(windows)) as advance:
        for window, logits in window_logits(model, ids, windows, batch):
            losses.append(window_loss(window, logits, ids))
            if meter is not None:
                meter.add(window, logits)
            advance(1, f"{_mean(losses):.4f} nats a token")
    return Measured(tuple(losses), expert_loads(model, counts), None if meter is None else meter.result())


def _progress(model: Transformer, total: int) -> AbstractContextManager[Advance]:
    return shown_progress("evaluate", total, "windows", quiet=model.topology.rank != 0)


def _mean(losses: Sequence[WindowLoss]) -> float:
    return sum(loss.nats_per_token * loss.tokens for loss in losses) / sum(loss.tokens for loss in losses)
