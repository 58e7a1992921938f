"""The hub: a revision's commit, that commit's checkpoint files downloaded and checked, and a record of them.

Every byte comes through huggingface_hub: its login, its retries, its Xet storage, its ``HF_ENDPOINT``. Added here:

- Each file is checked against the hub's listing as soon as it is there: sha256 for LFS and Xet files, the git blob
  id for the rest. (``HfApi.verify_repo_checksums`` would hash everything a second time, one file after the other,
  and gives no sha256 of files that lie in git.)
- The record ``.shardflow-source.json``, written last, so that neither a later run nor the manifest hashes again.
- One line for each failure. No text of huggingface_hub's own errors gets into it: they can hold signed URLs.

A broken connection is resumed inside the file with a Range request as long as huggingface_hub retries. After the end
of the process the finished files stand, and the files that were in flight start again.
"""

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import HfApi, RepoFile, constants, hf_hub_download
from huggingface_hub.utils.tqdm import tqdm

from model.checkpoint.download_record import (
    DownloadedFile,
    DownloadRecord,
    load_record,
    unchanged_files,
    write_record,
)
from model.checkpoint.hub_errors import hub_errors
from model.checkpoint.progress import Progress, Silent
from model.errors import InputError, RunError

# Names of a checkpoint's files, folder by folder: ``*`` does not cross a slash.
CHECKPOINT_FILES = (
    *("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "LICENSE*", "README*"),
    "additional_chat_templates/*.jinja",
)
# Never downloaded, even where a pattern above matches: hidden files, and the same weights in another format.
OTHER_FILES = (".*", "*.bin", "*.bin.*", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")

_COMMIT = re.compile(r"[0-9a-f]{40}")


class DamagedFileError(InputError):
    """A downloaded file whose bytes are not those that the hub lists. The file was removed."""


def resolve(repo: str, revision: str | None = None, *, endpoint: str | None = None) -> str:
    """The commit (40 hex digits) that a branch, tag or commit of ``repo`` stands for; ``None`` is ``main``.

    A full commit is returned as it is, without a request. Raises `InputError` for an unknown repository or revision
    and for one that needs a login, `TransientError` where the hub cannot be reached.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    with hub_errors(repo, revision):
        info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    assert info.sha is not None, "the hub names the commit of every revision"
    return info.sha


def list_files(repo: str, commit: str, *, endpoint: str | None = None) -> tuple[RepoFile, ...]:
    """The checkpoint's files at ``commit`` as the hub lists them, sorted by name; their sizes sum to the download.

    Raises `InputError` for names that would leave the directory and for a repository without safetensors files, and
    what `resolve` raises.
    """
    with hub_errors(repo, commit):
        tree = HfApi(endpoint=endpoint).list_repo_tree(repo, recursive=True, revision=commit)
        listed = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    unsafe = [name for name in listed if _leaves_directory(name)]
    if unsafe:
        raise InputError(
            f"{repo}@{commit}: refused, file name {name!r} is not a plain relative path" for name in unsafe
        )
    files = tuple(listed[name] for name in sorted(listed) if _is_checkpoint_file(name))
    if not any(file.path.endswith(".safetensors") for file in files):
        raise InputError(f"{repo}@{commit}: holds no *.safetensors file; choose a repository or revision that does")
    return files


def download(
    repo: str,
    commit: str,
    directory: Path,
    *,
    workers: int = 8,
    progress: Progress | None = None,
    endpoint: str | None = None,
) -> DownloadRecord:
    """Bring ``directory`` to the checkpoint files of ``repo`` at ``commit``, check every byte, write the record last.

    Files that are already there and right are kept, damaged or outdated ones are fetched anew, and those of an
    earlier commit that the new one lacks are removed. A finished, unchanged directory costs neither a request nor a
    hash. ``progress`` takes the place of huggingface_hub's own bars; its bytes sum to the sizes of `list_files`.
    Files arrive in ``workers`` threads; the first failure, or Ctrl-C, stops them all.

    Raises what `list_files` raises, `InputError` for a directory that holds another repository, `DamagedFileError`
    with one line for each file whose bytes are wrong (all others are kept), and `RunError` for local failures; too
    little space on the disk is one before anything is fetched.
    """
    assert _COMMIT.fullmatch(commit), f"{commit!r} is not a commit: resolve it first"
    earlier = load_record(directory)
    if earlier is not None and earlier.repo != repo:
        raise InputError(f"{directory}: holds {earlier.repo}, not {repo}; choose another directory")
    known = {file.name: file for file in unchanged_files(directory, earlier)}
    if earlier is not None and earlier.commit == commit and len(known) == len(earlier.files):
        return earlier

    files = list_files(repo, commit, endpoint=endpoint)
    with hub_errors(repo, commit):
        _check_space(directory, files)
    progress = progress or Silent()
    progress.phase(f"download {repo}", sum(file.size for file in files))
    run = _Download(repo, commit, directory, endpoint, known, progress)
    entries = _in_threads(run.obtain, files, workers, run.stop)
    with hub_errors(repo, commit):
        for name in known.keys() - {file.path for file in files}:
            (directory / name).unlink()
        record = DownloadRecord(repo, commit, tuple(sorted(entries, key=lambda entry: entry.name)))
        write_record(directory, record)
    return record


@dataclass(frozen=True)
class _Download:
    """One run of `download`: where from, where to, what the record already vouches for, and whom to tell."""

    repo: str
    commit: str
    directory: Path
    endpoint: str | None
    known: dict[str, DownloadedFile]
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)

    def obtain(self, file: RepoFile) -> DownloadedFile:
        """The checked entry of one file: from the record, from the bytes that are there, or downloaded."""
        with hub_errors(self.repo, self.commit, file.path):
            entry = self._present(file)
            if entry is not None:
                self.report(file.size)
                return entry
            return self._fetch(file)

    def report(self, size: int) -> None:
        """Tell of ``size`` more bytes, and end this file's download where another has failed."""
        if self.stop.is_set():
            raise RunError("stopped: another file failed or the run was interrupted")
        self.progress.advance(size)

    def _present(self, file: RepoFile) -> DownloadedFile | None:
        entry, path = self.known.get(file.path), self.directory / file.path
        if entry is not None and file.lfs is not None and entry.sha256 == file.lfs.sha256:
            return entry
        if not path.is_file() or path.stat().st_size != file.size:
            return None
        entry, identity = _hash_file(path, file)
        return entry if identity == _identity(file) else None

    def _fetch(self, file: RepoFile) -> DownloadedFile:
        path = self.directory / file.path
        path.unlink(missing_ok=True)  # huggingface_hub would keep it where its own note names this commit
        hf_hub_download(
            self.repo,
            file.path,
            revision=self.commit,
            local_dir=self.directory,
            endpoint=self.endpoint,
            tqdm_class=_silent_bar(self.report),
        )
        entry, identity = _hash_file(path, file)
        if (entry.size, identity) == (file.size, _identity(file)):
            return entry
        path.unlink()
        raise DamagedFileError(
            f"{path}: expected {file.size} bytes with {_identity(file)}, got {entry.size} bytes with {identity}; "
            "the file was removed, so running again fetches only it"
        )


def _check_space(directory: Path, files: Iterable[RepoFile]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    here = {path: path.stat().st_size for file in files if (path := directory / file.path).is_file()}
    needed = sum(file.size for file in files if here.get(directory / file.path) != file.size)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise RunError(f"{directory}: {needed} bytes are to be downloaded, {free} are free; make room on the disk")


def _in_threads(
    obtain: Callable[[RepoFile], DownloadedFile], files: Iterable[RepoFile], workers: int, stop: threading.Event
) -> list[DownloadedFile]:
    """All entries. Damaged files are collected; any other failure sets ``stop``."""
    entries: list[DownloadedFile] = []
    damaged: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in as_completed([pool.submit(obtain, file) for file in files]):
                try:
                    entries.append(future.result())
                except DamagedFileError as error:
                    damaged.extend(error.problems)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if damaged:
        raise DamagedFileError(sorted(damaged))
    return entries


# Names and hashes


def _leaves_directory(name: str) -> bool:
    parts = name.split("/")
    return "\\" in name or any(part in ("", ".", "..") or PureWindowsPath(part).drive for part in parts)


def _is_checkpoint_file(name: str) -> bool:
    def matches(pattern: str) -> bool:
        return pattern.count("/") == name.count("/") and fnmatchcase(name, pattern)

    return any(map(matches, CHECKPOINT_FILES)) and not any(map(matches, OTHER_FILES))


def _identity(file: RepoFile) -> str:
    return f"git blob id {file.blob_id}" if file.lfs is None else f"sha256 {file.lfs.sha256}"


def _hash_file(path: Path, file: RepoFile) -> tuple[DownloadedFile, str]:
    """The entry of the file as it is on disk, and its identity in the form of `_identity`; read once, and synced."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())  # the record must not outlive a power cut that the bytes do not
        status = os.fstat(stream.fileno())
        sha256 = hashlib.sha256()
        blob = hashlib.sha1(b"blob %d\0" % status.st_size, usedforsecurity=False)
        hashes = [sha256] if file.lfs is not None else [sha256, blob]
        while chunk := stream.read(1 << 20):
            for hasher in hashes:
                hasher.update(chunk)
    entry = DownloadedFile(file.path, status.st_size, sha256.hexdigest(), status.st_mtime_ns)
    identity = f"git blob id {blob.hexdigest()}" if file.lfs is None else f"sha256 {entry.sha256}"
    return entry, identity


def _silent_bar(report: Callable[[int], None]) -> type[tqdm]:
    """A class for huggingface_hub's ``tqdm_class`` that draws nothing and reports one file's bytes to ``report``."""

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            report(int(n or 0))

        # Xet counts bytes from the network apart from bytes of the file; with these two it opens no second bar.
        def update_transfer(self, n: float | None = 1) -> None:
            pass

        def set_transfer_postfix_str(self, *args: Any, **kwargs: Any) -> None:
            pass

    return SilentBar
