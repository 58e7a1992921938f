"""What an evaluation must reach: a table of limits, and how each fared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import InputError


@dataclass(frozen=True)
class Limit:
    """One threshold that can be asked for: its name, where in the results its value stands, and which way it goes."""

    name: str
    part: str
    field: str
    at_most: bool
    meaning: str

    @property
    def option(self) -> str:
        """Its option on a command line."""
        return f"--{self.name.replace('_', '-')}"


LIMITS = (
    Limit("max_perplexity", "perplexity", "perplexity", True, "highest perplexity of the text"),
    Limit("max_bits_per_byte", "perplexity", "bits_per_byte", True, "most bits a byte of the text"),
    Limit("max_kl", "agreement", "mean_kl", True, "highest mean KL divergence from the reference, in nats"),
    Limit("max_kl_p99", "agreement", "p99_kl", True, "highest 99th percentile of the KL divergence"),
    Limit("min_agreement", "agreement", "top1", False, "least share of tokens with the reference's first choice"),
)


@dataclass(frozen=True)
class Threshold:
    """A limit that was asked for, and the value that was measured."""

    name: str
    limit: float
    actual: float
    passed: bool

    def problem(self) -> str:
        """One line about one that was not passed."""
        side = "above" if self.actual > self.limit else "below"
        return f"{self.name}: {self.actual:.6g} is {side} the limit of {self.limit:.6g}"


def check_limits(asked: Mapping[str, float], with_reference: bool) -> None:
    """Raise ``InputError`` for each limit in ``asked`` whose value would not be measured."""
    lost = [limit.option for limit in LIMITS if limit.name in asked and limit.part == "agreement"]
    if lost and not with_reference:
        raise InputError(f"{option}: needs a reference to agree with; give --against" for option in lost)


def judge(asked: Mapping[str, float], results: Mapping[str, Any]) -> tuple[Threshold, ...]:
    """How the limits in ``asked``, by name, fare against ``results``, the parts of an evaluation as JSON values."""
    judged = []
    for limit in LIMITS:
        if limit.name in asked:
            bound, actual = asked[limit.name], results[limit.part][limit.field]
            judged.append(Threshold(limit.name, bound, actual, actual <= bound if limit.at_most else actual >= bound))
    return tuple(judged)
