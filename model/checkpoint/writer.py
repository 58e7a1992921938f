"""One safetensors file, written as it streams: header first, then the tensors' bytes, hashed on the way."""

import contextlib
import hashlib
import os
from pathlib import Path

import torch

from model.checkpoint.layout import FilePlan
from model.checkpoint.storage import TEMPORARY_SUFFIX, fsync_directory, storage_errors


class ShardWriter:
    """A context that leaves ``path`` whole, or not at all.

    The whole length is reserved at once, so that a disk too small is noticed before the first byte. Raises
    ``RunError`` where the storage fails.
    """

    def __init__(self, path: Path, plan: FilePlan) -> None:
        self.path = path
        self.size = 0
        self._plan = plan
        self._temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        self._digest = hashlib.sha256()
        self._descriptor = -1

    def __enter__(self) -> "ShardWriter":
        header = self._plan.header()
        with storage_errors(self.path):
            self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(self._descriptor, 0, len(header) + self._plan.data_size)
                self._write(memoryview(header))
            except BaseException:
                self._abandon()
                raise
        return self

    def append(self, band: torch.Tensor) -> None:
        """Write the bytes of ``band``, the next in the file."""
        data = band.contiguous().view(-1).view(torch.uint8)
        with storage_errors(self.path):
            self._write(data.numpy().data)

    @property
    def sha256(self) -> str:
        """Digest of all that was written, in hex."""
        return self._digest.hexdigest()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._abandon()
            return
        with storage_errors(self.path):
            try:
                os.fsync(self._descriptor)
                assert self.size == os.fstat(self._descriptor).st_size, (
                    f"{self.path}: written past or short of its plan"
                )
            except BaseException:
                self._abandon()
                raise
            os.close(self._descriptor)
            self._temporary.replace(self.path)
            fsync_directory(self.path.parent)

    def _write(self, data: memoryview) -> None:
        self._digest.update(data)
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], self.size + done)
        self.size += len(data)

    def _abandon(self) -> None:
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self._temporary.unlink()
