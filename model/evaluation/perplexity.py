"""Perplexity of a text: how many nats each of its tokens comes as a surprise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from model.errors import RunError
from model.evaluation.windows import Window


@dataclass(frozen=True)
class WindowLoss:
    """Mean loss of the ``tokens`` that one window scores, of which the first is token ``first`` of the text."""

    first: int
    tokens: int
    nats_per_token: float


@dataclass(frozen=True)
class Perplexity:
    """The loss of a text: a mean over all predicted tokens, whatever their window; bits a byte of their text."""

    tokens: int
    window: int
    stride: int
    nats_per_token: float
    perplexity: float
    bits_per_byte: float
    windows: tuple[WindowLoss, ...]


def window_loss(window: Window, logits: torch.Tensor, ids: Sequence[int]) -> WindowLoss:
    """The loss of ``window`` from the logits (N, V) that predict ``ids[window.scored : window.end]``.

    Raises ``RunError`` where it is not finite.
    """
    nats = float(token_losses(logits, ids[window.scored : window.end]).mean())
    if not math.isfinite(nats):
        raise RunError(
            f"tokens {window.scored} to {window.end}: their loss is {nats}; the weights overflow in this dtype, or are "
            "damaged: run `shardflow verify`"
        )
    return WindowLoss(window.scored, window.tokens, nats)


def token_losses(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """Nats of each of N ``targets`` under the logits (N, V), in float64 on the CPU."""
    following = torch.tensor(targets, device=logits.device)
    return functional.cross_entropy(logits, following, reduction="none").cpu().double()


def summarise(losses: Sequence[WindowLoss], *, window: int, stride: int, size: int) -> Perplexity:
    """The perplexity of a text of ``size`` bytes from its windows' losses."""
    tokens = sum(loss.tokens for loss in losses)
    total = math.fsum(loss.nats_per_token * loss.tokens for loss in losses)
    return Perplexity(
        tokens=tokens,
        window=window,
        stride=stride,
        nats_per_token=total / tokens,
        perplexity=math.exp(total / tokens),
        bits_per_byte=total / math.log(2) / size,
        windows=tuple(losses),
    )
