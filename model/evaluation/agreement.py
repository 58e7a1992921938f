"""Agreement of a model with a reference: how far its next-token distributions lie from the reference's.

Shapes: N tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from model.errors import InputError
from model.evaluation.predictions import Predictions, Reference
from model.evaluation.windows import Window

ROWS = 256
"""Tokens compared at a time: float64 copies of a large vocabulary's logits are large."""


@dataclass(frozen=True)
class Agreement:
    """KL(reference ‖ model) in nats over ``tokens``, its mean and 99th percentile, and the mean of each window.

    ``top1`` is the share of tokens on which both have the same first choice.
    """

    reference: Reference
    tokens: int
    mean_kl: float
    p99_kl: float
    top1: float
    windows: tuple[float, ...]


@dataclass
class AgreementMeter:
    """Compares window by window with ``predictions``."""

    predictions: Predictions
    divergences: list[torch.Tensor] = field(default_factory=list)
    agreeing: int = 0

    def add(self, window: Window, logits: torch.Tensor) -> None:
        """Compare the logits (N, V) of one window, as far as the reference goes."""
        theirs = self.predictions.of(window)
        if not len(theirs):
            return
        ours = logits[: len(theirs)]
        theirs = theirs.to(ours.device)
        self.divergences.append(divergence(theirs, ours))
        self.agreeing += int((theirs.argmax(dim=-1) == ours.argmax(dim=-1)).sum())

    def result(self) -> Agreement:
        """Over all windows so far."""
        every = torch.cat(self.divergences)
        return Agreement(
            reference=self.predictions.reference,
            tokens=len(every),
            mean_kl=float(every.mean()),
            p99_kl=float(np.quantile(every.numpy(), 0.99)),
            top1=self.agreeing / len(every),
            windows=tuple(float(window.mean()) for window in self.divergences),
        )


def divergence(reference: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """KL(reference ‖ actual) in nats of each row of two sets of logits (N, V), float64 (N) on the CPU.

    In float64 from the float32 logits, so that equal models give 0 and not the rounding of a softmax.
    """
    rows = []
    for first in range(0, len(reference), ROWS):
        p = reference[first : first + ROWS].double().log_softmax(dim=-1)
        q = actual[first : first + ROWS].double().log_softmax(dim=-1)
        rows.append((p.exp() * (p - q)).sum(dim=-1).cpu())
    return torch.cat(rows)


def check_predictions(predictions: Predictions, ids: Sequence[int], vocabulary: int, sizes: tuple[int, int]) -> None:
    """Raise ``InputError`` where ``predictions`` are not of ``ids``, in windows of ``sizes`` (window and stride)."""
    name = predictions.reference.name
    theirs = predictions.logits.shape[1]
    if theirs != vocabulary:
        raise InputError(f"{name}: has a vocabulary of {theirs}, not of {vocabulary}; it is another model")
    different = [i for i, (their, own) in enumerate(zip(predictions.ids, ids, strict=False)) if their != own]
    if different or len(predictions.ids) > len(ids):
        place = different[0] if different else len(ids)
        raise InputError(f"{name}: its tokens differ from token {place} of the text on; its tokenizer is another")
    if (predictions.window, predictions.stride) != sizes:
        raise InputError(
            f"{name}: was computed with window {predictions.window} and stride {predictions.stride}, "
            f"not with {sizes[0]} and {sizes[1]}"
        )
