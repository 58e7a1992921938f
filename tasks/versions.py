"""What follows a scheduled conversion: ``latest`` names the new version, and old ones go."""

from pathlib import Path

from prefect import task
from prefect.logging import get_run_logger

from model.checkpoint.versions import Versions


@task(persist_result=False)
def make_current(versions: Versions, commit: str) -> Path:
    """Let ``latest`` name the finished version of ``commit``, in one step; returns that version."""
    version = versions.make_current(commit)
    get_run_logger().info("%s now names %s", versions.link, version)
    return version


@task(persist_result=False)
def remove_old(versions: Versions, keep: int) -> tuple[Path, ...]:
    """Remove all but the ``keep`` newest versions, never the one that ``latest`` names; returns what was removed."""
    removed = versions.remove_old(keep)
    for version in removed:
        get_run_logger().info("%s removed: the %d newest versions are kept", version, keep)
    return tuple(removed)
