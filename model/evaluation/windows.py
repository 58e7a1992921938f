"""Which part of a text each forward pass sees, and which of its tokens it scores."""

from dataclasses import dataclass

from model.args import ModelArgs
from model.errors import InputError

LONGEST_DEFAULT = 2048
"""Tokens of a window where none are asked for and the context is longer."""


@dataclass(frozen=True)
class Window:
    """Tokens ``start`` to ``end`` of a text are seen, and those from ``scored`` on are predicted."""

    start: int
    end: int
    scored: int

    @property
    def tokens(self) -> int:
        """How many tokens it predicts."""
        return self.end - self.scored


def plan_windows(length: int, window: int, stride: int) -> list[Window]:
    """Windows of ``window`` tokens, each ``stride`` after the last, that predict every token but the first once.

    A token that two windows see is scored by the first of them. ``stride = window - 1`` has none scored with more
    context than need be and each window computed once; a smaller one gives tokens more context. The last window
    ends with the text.
    """
    windows: list[Window] = []
    scored = 1
    while scored < length:
        start = len(windows) * stride
        end = min(start + window, length)
        windows.append(Window(start, end, scored))
        scored = end
    return windows


def check_windows(window: int | None, stride: int | None, args: ModelArgs) -> tuple[int, int]:
    """Window and stride with their defaults: the context, at most 2,048 tokens, and a stride of one less.

    Raises ``InputError`` where the window does not fit the context, or a stride would leave tokens out.
    """
    window = min(args.max_seq_len, LONGEST_DEFAULT) if window is None else window
    if not 2 <= window <= args.max_seq_len:
        raise InputError(f"window {window}: takes 2 to {args.max_seq_len} tokens, the model's context")
    stride = window - 1 if stride is None else stride
    if not 1 <= stride < window:
        raise InputError(f"stride {stride}: takes 1 to {window - 1}, one less than the window, or tokens are left out")
    return window, stride
