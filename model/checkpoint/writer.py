"""One safetensors file, written as it streams: header first, then the tensors' bytes, hashed on the way."""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

import torch

from model.checkpoint.direct import BUFFER_BYTES, DirectFile
from model.checkpoint.layout import FilePlan
from model.checkpoint.storage import TEMPORARY_SUFFIX, fsync_directory, storage_errors


class ShardWriter:
    """A context that leaves ``path`` whole, or not at all, through two buffers of ``buffer_bytes``.

    No two writers share a temporary name: what a killed run's worker still writes, on another machine perhaps, never
    comes into place half-way through a later run's. Raises ``RunError`` where the storage fails.
    """

    def __init__(self, path: Path, plan: FilePlan, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.path = path
        self._header = plan.header()
        self.size = len(self._header) + plan.data_size
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        self._digest = hashlib.sha256()
        self._buffer_bytes = buffer_bytes

    def __enter__(self) -> "ShardWriter":
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard)
            with storage_errors(self.path):
                self._file = DirectFile(self._temporary, self.size, self._buffer_bytes)
            undo.callback(self._file.close)
            self._write(memoryview(self._header))
            undo.pop_all()
        return self

    def append(self, band: torch.Tensor) -> None:
        """Write the bytes of ``band``, the next in the file."""
        self._write(band.contiguous().view(-1).view(torch.uint8).numpy().data)

    @property
    def sha256(self) -> str:
        """Digest of all that was written, in hex."""
        return self._digest.hexdigest()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                with storage_errors(self.path):
                    self._file.finish()
                    self._temporary.replace(self.path)
                    fsync_directory(self.path.parent)
        finally:
            self._file.close()
            self._discard()

    def _write(self, data: memoryview) -> None:
        self._digest.update(data)
        with storage_errors(self.path):
            self._file.write(data)

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            self._temporary.unlink()
