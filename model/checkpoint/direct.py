"""A file written past the page cache, by a thread of its own: the copy into the cache is what conversion waited for."""

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

ALIGNMENT = 4096
"""open(2) asks for multiples of the device's logical block, which is at most this."""

BUFFER_BYTES = 4 << 20


class DirectFile:
    """Bytes in order into a new file of a known size: one buffer is filled while the other is on its way to the disk.

    Where the file system knows no ``O_DIRECT`` the same buffers go through the page cache. Raises ``OSError``.
    """

    def __init__(self, path: Path, size: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.size, self._position, self._filled = size, 0, 0
        self._descriptor = _open(path)
        try:
            # The whole length is reserved at once, so that a disk too small is noticed before the first byte.
            os.posix_fallocate(self._descriptor, 0, _aligned(size))
        except BaseException:
            os.close(self._descriptor)
            raise
        self._capacity = max(ALIGNMENT, buffer_bytes // ALIGNMENT * ALIGNMENT)
        # Anonymous maps begin on a page, as O_DIRECT asks of the memory too.
        self._filling, self._leaving = mmap.mmap(-1, self._capacity), mmap.mmap(-1, self._capacity)
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None

    def write(self, data: memoryview) -> None:
        """Add ``data``; an error of an earlier part may be raised here."""
        done = 0
        while done < len(data):
            count = min(len(data) - done, self._capacity - self._filled)
            self._filling[self._filled : self._filled + count] = data[done : done + count]
            self._filled += count
            done += count
            if self._filled == self._capacity:
                self._send(self._capacity)

    def finish(self) -> None:
        """Put the rest on the disk, cut the file to its size and have it outlive a power cut."""
        written = self._position + self._filled
        assert written == self.size, f"{written} bytes written, {self.size} planned"
        if self._filled:
            self._send(_aligned(self._filled))
        self._wait()
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file, whatever became of it; the buffers' memory goes with this object."""
        self._thread.shutdown()
        os.close(self._descriptor)

    def _send(self, count: int) -> None:
        self._wait()
        self._filling, self._leaving = self._leaving, self._filling
        self._under_way = self._thread.submit(self._write_all, count, self._position)
        self._position += count
        self._filled = 0

    def _wait(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def _write_all(self, count: int, position: int) -> None:
        with memoryview(self._leaving) as data:
            done = 0
            while done < count:
                done += os.pwrite(self._descriptor, data[done:count], position + done)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
