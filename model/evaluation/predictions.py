"""A reference's predictions on disk, so that it need not be in memory together with the model it is held against.

A directory of two files: ``logits.npy``, float32 (N, V), what the reference says of each of N tokens but the first,
written and read window by window; and, once that is whole, ``predictions.json``: of which tokens, by whom.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.checkpoint.source import read_json
from model.checkpoint.storage import reading, storage_errors, write_atomically
from model.errors import InputError
from model.evaluation.windows import Window

LOGITS, RECORD = "logits.npy", "predictions.json"
FLOAT32 = 4


@dataclass(frozen=True)
class Reference:
    """Who predicted: ``shards`` or ``transformers``, its directory's name, the sha256 of its manifest or config."""

    kind: str
    name: str
    sha256: str
    dtype: str


@dataclass(frozen=True)
class Predictions:
    """What ``reference`` says of ``ids``, computed in windows of ``window`` tokens and ``stride``."""

    reference: Reference
    ids: list[int]
    window: int
    stride: int
    logits: Any

    def of(self, window: Window) -> torch.Tensor:
        """Its logits, float32 (n, V), on the tokens that ``window`` scores, as far as they go."""
        return torch.from_numpy(np.array(self.logits[window.scored - 1 : window.end - 1]))


def check_room(directory: Path, tokens: int, vocabulary: int) -> None:
    """Raise ``InputError`` where ``directory`` has no room for the predictions of a text of ``tokens`` tokens."""
    needed = (tokens - 1) * vocabulary * FLOAT32
    with reading(directory):
        free = shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(
            f"{directory}: predictions of {tokens - 1:,} tokens take {needed:,} bytes, and {free:,} are free; "
            "compare fewer tokens with --against-tokens, or set TMPDIR"
        )


def write_predictions(
    directory: Path,
    reference: Reference,
    ids: Sequence[int],
    sizes: tuple[int, int],
    vocabulary: int,
    stream: Iterable[tuple[Window, torch.Tensor]],
) -> None:
    """Write what ``stream`` gives, each window with its logits (n, V), into the existing ``directory``.

    ``sizes`` are window and stride.
    """
    with storage_errors(directory):
        shape = (len(ids) - 1, vocabulary)
        logits = np.lib.format.open_memmap(directory / LOGITS, mode="w+", dtype=np.float32, shape=shape)
        for window, rows in stream:
            logits[window.scored - 1 : window.end - 1] = rows.cpu().numpy()
        logits.flush()
        record = {"reference": dataclasses.asdict(reference), "window": sizes[0], "stride": sizes[1], "ids": list(ids)}
        write_atomically(directory / RECORD, json.dumps(record).encode())


def read_predictions(directory: Path) -> Predictions:
    """The predictions in ``directory``; their logits stay on the disk until they are asked for.

    Raises ``InputError`` where they are not whole.
    """
    record = read_json(directory / RECORD)
    try:
        reference = Reference(**record["reference"])
        logits = np.load(directory / LOGITS, mmap_mode="r")
        predictions = Predictions(reference, record["ids"], record["window"], record["stride"], logits)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{directory}: holds no predictions of model.predict ({error})") from error
    if logits.ndim != 2 or len(logits) != len(predictions.ids) - 1:
        raise InputError(f"{directory / LOGITS}: has shape {logits.shape} for {len(predictions.ids)} tokens")
    return predictions
