"""The next token from logits: argmax, or a draw limited to the likeliest tokens.

Shapes: B sequences, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch

from model.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose. ``temperature`` 0 is argmax; ``top_k`` 0 and ``top_p`` 1 keep every token.

    ``seed`` None draws a new seed each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = (
            (math.isfinite(self.temperature), f"temperature {self.temperature} is not a finite number"),
            (not -math.inf < self.temperature < 0, f"temperature {self.temperature} is below 0"),
            (self.top_k >= 0, f"top_k {self.top_k} is below 0; 0 keeps every token"),
            (0 < self.top_p <= 1, f"top_p {self.top_p} is not above 0 and at most 1; 1 keeps every token"),
            (
                self.seed is None or -(2**63) <= self.seed < 2**64,
                f"seed {self.seed} is not within torch's range, -2**63 to 2**64 - 1",
            ),
        )
        if problems := [problem for holds, problem in rules if not holds]:
            raise InputError(problems)

    def generator(self, device: torch.device) -> torch.Generator:
        """The source of randomness of one run, on the device of the logits."""
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """Token ids (B,) int64 from float32 logits (B, V).

    A draw is the argmax of the probabilities divided by exponential noise, which picks each token with its
    probability and needs no cumulative sum on the host. The temperature is applied first, then top-k, then top-p.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    # Below the likeliest all are negative, so that the tiniest temperature makes them -inf and never NaN. It must
    # not be 0 as a float32, though.
    below = logits - logits.amax(dim=-1, keepdim=True)
    scaled = below / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    probabilities = limited(scaled, sampling.top_k, sampling.top_p).softmax(dim=-1)
    noise = torch.empty_like(probabilities).exponential_(1, generator=generator)
    return (probabilities / noise).argmax(dim=-1)


def limited(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The logits (B, V) with -inf outside the ``top_k`` likeliest tokens and the nucleus of ``top_p``.

    The nucleus is the smallest set of likeliest tokens whose probability reaches ``top_p``
    (arXiv 1904.09751); it always holds the likeliest one.
    """
    vocabulary = logits.shape[-1]
    if 0 < top_k < vocabulary or top_p < 1:
        kept = logits.topk(min(top_k, vocabulary) or vocabulary, dim=-1)
        probabilities = kept.values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        values = kept.values.masked_fill(before >= top_p, -torch.inf) if top_p < 1 else kept.values
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, values)
    return logits
