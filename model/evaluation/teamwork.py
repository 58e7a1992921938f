"""Pieces of work that rank 0 gives out and all ranks of a model do together, for what rank 0 alone can drive.

Each is a small picklable record with a method ``on(model)``, whose result is the same on every rank.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from model.evaluation.perplexity import window_loss
from model.evaluation.scoring import batch_logits, window_logits
from model.evaluation.windows import check_windows, plan_windows
from model.generation import generate
from model.sampling import Sampling
from model.transformer import Transformer


class Work(Protocol):
    """One piece of work."""

    def on(self, model: Transformer) -> Any:
        """Do it, on every rank at once."""


@dataclass(frozen=True)
class Scoring:
    """The log-likelihood of the last ``scored[i]`` tokens of each of ``sequences``."""

    sequences: list[list[int]]
    scored: list[int]

    def on(self, model: Transformer) -> list[tuple[float, bool]]:
        """For each sequence the sum in nats, and whether each of the tokens is the likeliest."""
        logits = batch_logits(model, [sequence[:-1] for sequence in self.sequences])
        results = []
        for sequence, count, rows in zip(self.sequences, self.scored, logits, strict=True):
            end = len(sequence) - 1
            predicted = rows[end - count : end]
            targets = torch.tensor(sequence[-count:], device=rows.device)
            nats = functional.cross_entropy(predicted, targets, reduction="none").double().sum()
            results.append((-float(nats), bool((predicted.argmax(dim=-1) == targets).all())))
        return results


@dataclass(frozen=True)
class Rolling:
    """The log-likelihood of every token of ``ids`` but the first, in windows of full length."""

    ids: list[int]
    batch: int

    def on(self, model: Transformer) -> float:
        """The sum in nats."""
        windows = plan_windows(len(self.ids), *check_windows(None, None, model.args))
        scored = window_logits(model, self.ids, windows, self.batch)
        return -sum(window_loss(window, logits, self.ids).nats_per_token * window.tokens for window, logits in scored)


@dataclass(frozen=True)
class Completing:
    """Completions of ``prompts``."""

    prompts: list[list[int]]
    max_new_tokens: int
    eos: frozenset[int]
    sampling: Sampling

    def on(self, model: Transformer) -> list[list[int]]:
        """The completions' token ids."""
        return generate(
            model,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            eos=self.eos,
            sampling=self.sampling,
            generator=self.sampling.generator(model.device),
        )


def assist(model: Transformer) -> None:
    """Compute along with rank 0 until it is done. Called on every other rank."""
    while (work := model.topology.broadcast_object(None)) is not None:
        work.on(model)
