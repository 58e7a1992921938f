"""Forward passes over the windows of a text, a batch at a time.

Shapes: B windows, S positions of the longest, N tokens that a window scores, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from model.evaluation.windows import Window
from model.transformer import Transformer


def batch_logits(model: Transformer, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Next-token logits, float32 (B, S, V), after each token of ``sequences``.

    Shorter sequences are padded at their ends: no token sees what follows it, and what stands there means nothing.
    """
    tokens = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    return model(tokens.to(model.device), 0, model.new_cache(*tokens.shape), all_positions=True)  # type: ignore[no-any-return]


def window_logits(
    model: Transformer, ids: Sequence[int], windows: Sequence[Window], batch: int
) -> Iterator[tuple[Window, torch.Tensor]]:
    """Each window, in order, with the logits (N, V) that predict the tokens it scores.

    Every rank calls it and goes through all of it, and each gets the same. Windows of one length share a batch, so
    that nothing is computed for padding.
    """
    for _length, alike in groupby(windows, key=lambda window: window.end - window.start):
        queue = list(alike)
        for first in range(0, len(queue), batch):
            some = queue[first : first + batch]
            logits = batch_logits(model, [ids[window.start : window.end] for window in some])
            for window, rows in zip(some, logits, strict=True):
                yield window, rows[window.scored - 1 - window.start : window.end - 1 - window.start]
