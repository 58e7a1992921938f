"""What a rank tells of its warm-up: apart from the warm-up itself, so that reading it needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankReport:
    """What one rank saw: its device and dtypes, seconds of loading and of the two tokens, their ids."""

    rank: int
    device: str
    dtype: str
    fp8: bool
    load_s: float
    warmup_s: float
    tokens: list[int]
    finite: bool
