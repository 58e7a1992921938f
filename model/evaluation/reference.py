"""How an evaluation gets its reference's predictions: another launch before its own, through a temporary directory.

One after the other, so that the two models are never in memory together.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoint.manifest import MANIFEST, read_manifest
from model.errors import InputError

PREDICT = "model.predict"

PASSED_ON = ("text", "batch", "device", "attention", "trust_remote_code")
"""Options of the evaluation that are the reference's, too. FP8 is not: each model computes its weights as it does."""


def reference_ranks(reference: Path) -> int:
    """How many processes compute ``reference``: one a shard, or one for a Hugging Face directory.

    Raises ``InputError`` where it is neither.
    """
    if (reference / MANIFEST).is_file():
        return read_manifest(reference).mp
    if (reference / "config.json").is_file():
        return 1
    raise InputError(
        f"{reference}: holds neither {MANIFEST} nor config.json; a reference is shards or what they came of"
    )


def predict_arguments(options: Mapping[str, Any], out: Path, sizes: tuple[int, int]) -> list[str]:
    """Those of ``model.predict`` for an evaluation with ``options``, by name, and windows of ``sizes``."""
    tokens = [options[name] for name in ("max_tokens", "against_tokens") if options.get(name) is not None]
    given = {name: options.get(name) for name in PASSED_ON} | {"window": sizes[0], "stride": sizes[1]}
    dtype = options.get("against_dtype") or options.get("dtype")
    return [str(options["against"]), str(out), *as_arguments(given | {"max_tokens": min(tokens), "dtype": dtype})]


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """``options`` by name as they stand on a command line; None, False and an empty tuple leave one out."""
    arguments = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif isinstance(value, tuple):
            arguments += [f"{option}={','.join(map(str, value))}"] if value else []
        elif value is not None and value is not False:
            arguments.append(f"{option}={value}")
    return arguments
