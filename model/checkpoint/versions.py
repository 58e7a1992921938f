"""The versions of one hub repository's checkpoint below a root, and the link to the current one::

    ROOT/owner/name/<commit>/mp8-fp8/    a finished checkpoint, whose manifest names the same commit, mp and weights
    ROOT/owner/name/latest               -> <commit>/mp8-fp8
    ROOT/owner/name/.removing/           versions that are being removed; nothing under it is a version any more
    ROOT/owner/name/.work/               downloads and intermediates of runs
    ROOT/owner/name/.lock                held for as long as the link or the set of versions changes

Readers open ``latest/…``; it always names a finished version. To be safe from a swap in mid-load they resolve it once.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.manifest import MANIFEST, Manifest, check_files, read_manifest
from model.checkpoint.storage import fsync_directory, storage_errors
from model.errors import InputError, RunError

LATEST = "latest"
REMOVING = ".removing"
WORK = ".work"
LOCK = ".lock"
VERSION = re.compile(r"(?P<commit>[0-9a-f]{40})/mp(?P<mp>[1-9][0-9]*)-(?P<weights>bf16|fp8)")


@dataclass(frozen=True)
class Versions:
    """All versions of ``repo`` below ``root`` that have this ``mp`` and these ``weights``, made with this ``mtp``."""

    root: Path
    repo: str
    mp: int
    weights: str
    mtp: str = "drop"

    @property
    def home(self) -> Path:
        """The directory that holds the versions and the link."""
        return self.root.absolute() / self.repo

    @property
    def variant(self) -> str:
        """What one commit's directory is called after its mp and weights."""
        return f"mp{self.mp}-{self.weights}"

    @property
    def link(self) -> Path:
        """The symbolic link to the current version."""
        return self.home / LATEST

    @property
    def work(self) -> Path:
        """Where runs put downloads and intermediates; safe to remove while none is at work."""
        return self.home / WORK

    def directory(self, commit: str) -> Path:
        """Where the checkpoint of ``commit`` belongs."""
        return self.home / commit / self.variant

    def check(self) -> None:
        """Raise ``InputError`` where ``latest`` is no link of this kind, or names what this run would not make."""
        if not os.path.lexists(self.link):
            return
        target = str(self.link.readlink()) if self.link.is_symlink() else None
        if target is None or not VERSION.fullmatch(target):
            found = f"points to {target}" if target else "is no symbolic link"
            raise InputError(f"{self.link}: {found}, not to a version <commit>/mp<N>-<weights>; choose another root")
        if Path(target).name != self.variant:
            raise InputError(
                f"{self.link}: names {target}, but this run makes {self.variant}; choose another root, one for each "
                "mp and weights"
            )
        manifest = self._manifest(Path(target).parent.name)
        if manifest and manifest.mtp != self.mtp:
            raise InputError(
                f"{self.link}: names {target}, made with mtp {manifest.mtp}; this run asks for {self.mtp}: "
                "choose another root"
            )

    def current(self) -> Path | None:
        """The version that ``latest`` names, or None where it names none that is finished.

        Raises what ``check`` raises.
        """
        self.check()
        if not self.link.is_symlink():
            return None
        version = self.home / self.link.readlink()
        return version if self.is_finished(version.parent.name) else None

    def is_finished(self, commit: str) -> bool:
        """Whether the checkpoint of ``commit`` is there: its manifest names it, and each file has the right size."""
        directory = self.directory(commit)
        manifest = self._manifest(commit)
        if manifest is None:
            return False
        try:
            check_files(directory, manifest.files)
        except InputError:
            return False
        return True

    def make_current(self, commit: str) -> Path:
        """Let ``latest`` name the version of ``commit``, in one step; returns that version.

        Raises ``RunError`` where it is not finished (another run's ``remove_old`` may have taken it), and what
        ``check`` raises.
        """
        version = self.directory(commit)
        with self._locked():
            self.check()
            if not self.is_finished(commit):
                raise RunError(f"{version}: is not a finished checkpoint of {commit}; {LATEST} stays as it was")
            with storage_errors(self.link):
                _replace_link(self.link, version.relative_to(self.home))
        return version

    def remove_old(self, keep: int) -> list[Path]:
        """Remove all but the ``keep`` newest versions, of which ``latest`` always is one; returns what was removed.

        Newest is by the time at which the manifest was written. A version is first renamed aside, so that a removal
        that is interrupted leaves nothing that looks like one; the next call finishes it. Nothing but whole version
        directories of this variant is touched, and nothing at all where ``latest`` names no version.
        """
        assert keep >= 1, keep
        with self._locked(), storage_errors(self.home):
            removing = self.home / REMOVING
            if removing.exists():
                shutil.rmtree(removing)
            current = self.current()
            if current is None:
                return []
            others = [version for version in self._newest_first() if version != current]
            old = others[keep - 1 :]
            for version in old:
                removing.mkdir(exist_ok=True)
                version.rename(removing / version.parent.name)
                fsync_directory(version.parent)
                with contextlib.suppress(OSError):  # something else of that commit is there, and stays
                    version.parent.rmdir()
            if old:
                shutil.rmtree(removing)
        return old

    def _newest_first(self) -> list[Path]:
        commits = [place.name for place in self.home.iterdir() if place.is_dir() and not place.is_symlink()]
        written = {
            self.directory(commit): (self.directory(commit) / MANIFEST).stat().st_mtime_ns
            for commit in commits
            if self._manifest(commit)
        }
        return sorted(written, key=lambda version: (written[version], version), reverse=True)

    def _manifest(self, commit: str) -> Manifest | None:
        """The manifest in the place of ``commit``, or None where that is not a version directory of it."""
        directory = self.directory(commit)
        if not VERSION.fullmatch(f"{commit}/{self.variant}") or directory.is_symlink():
            return None
        try:
            manifest = read_manifest(directory)
        except InputError:
            return None
        source = manifest.source
        found = (source and source.repo, source and source.commit, manifest.mp, manifest.weights)
        return manifest if found == (self.repo, commit, self.mp, self.weights) else None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time; the system releases the lock of a process that dies."""
        with storage_errors(self.home):
            self.home.mkdir(parents=True, exist_ok=True)
            file = (self.home / LOCK).open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _replace_link(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    fsync_directory(link.parent)
