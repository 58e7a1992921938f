"""Ranged reads of tensors through at most two open files."""

import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch

from model.checkpoint.dtypes import TORCH_DTYPES
from model.checkpoint.headers import FileStamp, TensorInfo
from model.errors import RunError

MAX_OPEN_FILES = 2
"""A weight and, in another file, its scale: with tensors taken in source order nothing needs a third."""


class TensorReader:
    """Reads row bands and column ranges. One reader belongs to one worker: it is not thread-safe.

    A file is checked against its stamp whenever it is opened, so that a source which changes during a run is noticed.
    """

    def __init__(self, stamps: Iterable[FileStamp]) -> None:
        self._stamps = {stamp.path: stamp for stamp in stamps}
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(
        self,
        tensor: TensorInfo,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        buffer: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows ``[first, last)`` and columns ``[first, last)`` of ``tensor`` (all of it by default).

        Returns (rows, columns) in the tensor's own dtype; a one-dimensional tensor has one column. The result lies in
        ``buffer`` (one-dimensional uint8) where that is given and long enough.
        Raises ``RunError`` where the file ends early, has changed or cannot be read.
        """
        first_row, last_row = rows or (0, tensor.rows)
        first_column, last_column = columns or (0, tensor.columns)
        width = (last_column - first_column) * tensor.itemsize
        stride = tensor.columns * tensor.itemsize
        size = (last_row - first_row) * width
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8)
        buffer = buffer[:size]
        if buffer.numel():
            view = buffer.numpy().data
            begin = tensor.start + first_row * stride
            if width == stride:
                self._fill(tensor, view, begin)
            else:
                offset = begin + first_column * tensor.itemsize
                for row in range(last_row - first_row):
                    self._fill(tensor, view[row * width : (row + 1) * width], offset + row * stride)
        return buffer.view(TORCH_DTYPES[tensor.dtype]).view(last_row - first_row, last_column - first_column)

    def _fill(self, tensor: TensorInfo, view: memoryview, offset: int) -> None:
        descriptor = self._descriptor(tensor.file)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise RunError(f"{tensor.file}: reading tensor {tensor.name!r} failed: {error.strerror}") from error
            if count == 0:
                raise RunError(f"{tensor.file}: ended inside tensor {tensor.name!r}: it changed during the run")
            done += count

    def _descriptor(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) == MAX_OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise RunError(f"{path}: cannot be opened any more: {error.strerror}") from error
        self._open[path] = descriptor
        check_unchanged(self._stamps[path], os.fstat(descriptor))
        return descriptor


def check_unchanged(stamp: FileStamp, status: os.stat_result | None = None) -> None:
    """Raise ``RunError`` if the file no longer has the size and time it had when its header was read."""
    status = status or stamp.path.stat()
    if (status.st_size, status.st_mtime_ns) != (stamp.size, stamp.mtime_ns):
        raise RunError(
            f"{stamp.path}: changed during the run ({stamp.size} bytes before, {status.st_size} now); run again"
        )
