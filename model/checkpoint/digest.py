"""SHA-256 of files, remembered between runs by inode, size and modification time."""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from model.checkpoint.storage import write_atomically

CHUNK = 4 << 20


def sha256_of(path: Path, advance: Callable[[int], None] = lambda size: None) -> str:
    """The file's SHA-256 in hex; ``advance`` is told of the bytes, whether read or remembered."""
    status = path.stat()
    memo = _memo(status)
    known = _recall(memo)
    if known:
        advance(status.st_size)
        return known
    sha256 = hashed(path, advance)
    remember(path, sha256, status)
    return sha256


def hashed(path: Path, advance: Callable[[int], None] = lambda size: None) -> str:
    """The SHA-256 in hex of the bytes that are in the file now, read and counted."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def remember(path: Path, sha256: str, status: os.stat_result | None = None) -> None:
    """Note a digest that is known already. A cache that cannot be written costs time later, nothing else."""
    memo = _memo(status or path.stat())
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(memo, sha256.encode(), durable=False)


def cache_directory() -> Path:
    """Where this project keeps what it can do without: below XDG_CACHE_HOME, or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (without HOME: as it is)
    return Path(home) / "shardflow"


def _memo(status: os.stat_result) -> Path:
    name = f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    return cache_directory() / "sha256" / name


def _recall(memo: Path) -> str | None:
    try:
        text = memo.read_text()
    except OSError:
        return None
    return text if re.fullmatch(r"[0-9a-f]{64}", text) else None
