"""Intermediates that were removed on purpose once their checkpoint was published, and how that is remembered.

Beside a released directory ``D`` lies ``D.released.json``: for which purpose it had been made, and which checkpoint
came of it. As long as that checkpoint is whole, a later run for the same purpose does without ``D``.
"""

import hashlib
import json
import shutil
from pathlib import Path

from model.checkpoint.manifest import MANIFEST, check_files, read_manifest
from model.checkpoint.storage import fsync_directory, json_bytes, storage_errors, write_atomically
from model.errors import InputError

RELEASED_SUFFIX = ".released.json"

REMOVED = ".{name}.shardflow-removed"
"""Beside a directory: what is left of it while it is removed. A name that nobody else gives anything."""


class ReleasedError(InputError):
    """An intermediate is needed that was released."""


def manifest_digest(checkpoint: Path) -> str:
    """The sha256, in hex, of ``checkpoint``'s manifest: which checkpoint it is."""
    return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def is_whole(checkpoint: Path, manifest_sha256: str) -> bool:
    """Whether the checkpoint of that manifest is there, with every file at its size."""
    try:
        if manifest_digest(checkpoint) != manifest_sha256:
            return False
        check_files(checkpoint, read_manifest(checkpoint).files)
    except (OSError, InputError):
        return False
    return True


def release(directory: Path, purpose: str, checkpoint: Path) -> None:
    """Remove ``directory``, of which ``checkpoint`` was made for ``purpose``, and remember it.

    The note is written first: a run that is killed in between leaves a directory that counts as released.
    """
    note = {"purpose": purpose, "checkpoint": str(checkpoint), "manifest_sha256": manifest_digest(checkpoint)}
    with storage_errors(directory):
        write_atomically(_note(directory), json_bytes(note))
        discard(directory)


def is_released(directory: Path, purpose: str) -> bool:
    """Whether ``directory`` was released for ``purpose`` and the checkpoint made of it is still whole."""
    try:
        note = json.loads(_note(directory).read_text())
        same = note["purpose"] == purpose
        checkpoint, manifest_sha256 = Path(note["checkpoint"]), note["manifest_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # an unreadable note vouches for nothing: the intermediate is made again
    return same and is_whole(checkpoint, manifest_sha256)


def require(directory: Path) -> None:
    """Raise ``ReleasedError`` where ``directory`` is not there because it was released."""
    if not directory.exists() and _note(directory).exists():
        raise ReleasedError(f"{directory}: was released when its checkpoint was published, and is needed again")


def forget(directory: Path) -> None:
    """Let ``directory`` count as absent, so that it is made again."""
    _note(directory).unlink(missing_ok=True)


def discard(directory: Path) -> None:
    """Remove a directory and what is left of an earlier removal: renamed first, so that no half ever looks whole.

    Raises ``InputError`` for a symbolic link, whose target is not ours to remove.
    """
    if directory.is_symlink():
        raise InputError(f"{directory}: is a symbolic link; name the directory itself")
    aside = directory.with_name(REMOVED.format(name=directory.name))
    if aside.exists():
        shutil.rmtree(aside)
    if directory.exists():
        directory.rename(aside)
        fsync_directory(directory.parent)
        shutil.rmtree(aside)


def _note(directory: Path) -> Path:
    return directory.with_name(directory.name + RELEASED_SUFFIX)
