"""A SOURCE as people give it, a local directory or a hub id with a revision, as a directory on disk."""

import re
from pathlib import Path

from model.checkpoint import hub
from model.checkpoint.digest import cache_directory
from model.checkpoint.progress import Progress, Silent
from model.errors import InputError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_id(source: str) -> bool:
    """Whether ``source`` names a hub repository: ``owner/name``, and no directory of that name exists."""
    return HUB_ID.fullmatch(source) is not None and not Path(source).exists()


def local_directory(source: str) -> Path:
    """``source`` as an existing directory. Raises ``InputError`` where it is none."""
    path = Path(source)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "is neither a directory nor a hub id (owner/name)"
        raise InputError(f"{source}: {what}")
    return path


def default_downloads() -> Path:
    """Where downloads go unless a command is told otherwise."""
    return cache_directory() / "hub"


def download_directory(downloads: Path, repo: str, commit: str) -> Path:
    """The place of one commit's files below ``downloads``."""
    return downloads / repo.replace("/", "--") / commit


def check_revision(source: str, revision: str | None) -> None:
    """Raise ``InputError`` for a revision of something that has none."""
    if revision is not None and not is_hub_id(source):
        raise InputError(f"--revision {revision}: {source} is a local directory, which has no revisions")


def locate(source: str, revision: str | None, downloads: Path, progress: Progress | None = None) -> Path:
    """The directory of ``source``, downloaded first (or completed) where it is a hub id.

    Raises ``InputError`` for a source that does not exist, and what ``hub.download`` raises.
    """
    check_revision(source, revision)
    if not is_hub_id(source):
        return local_directory(source)
    commit = hub.resolve(source, revision)
    directory = download_directory(downloads, source, commit)
    hub.download(source, commit, directory, progress=progress or Silent())
    return directory
