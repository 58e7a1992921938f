"""A distribution that must not be installed beside this project, and a clear word where it is."""

import functools
import importlib.metadata
import sys

DISTRIBUTION = "kernels"
"""Hugging Face's; transformers imports it where it finds it, and would get this project's package instead."""


def conflict() -> str | None:
    """What to tell a person where the other ``kernels`` is installed, or None."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"the distribution 'kernels' {version} is installed beside this project, whose package of the same name hides "
        "it; transformers may fail on that: `pip uninstall kernels`"
    )


@functools.cache
def say_conflict() -> None:
    """Tell it on standard error, once: ``shardflow generate`` comes here, and so does ``model.generate``."""
    if problem := conflict():
        print(f"warning: {problem}", file=sys.stderr)
