"""Work on the GPU as CUDA graphs, one for each shape: the host launches once what would be hundreds of kernels."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

WARM_UP_RUNS = 2
"""Compilation, tuning and allocation happen before a graph is captured."""

Shape = TypeVar("Shape", bound=Hashable)


class Graphs(Generic[Shape]):
    """Graphs of ``run(shape)``, which reads and writes the same tensors at every call; captured when first needed.

    ``kept`` are those that the runs before a capture must leave as they were.
    """

    def __init__(
        self, run: Callable[[Shape], torch.Tensor], device: torch.device, kept: tuple[torch.Tensor, ...] = ()
    ) -> None:
        self._run, self._device, self._kept = run, device, kept
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def replay(self, shape: Shape) -> torch.Tensor:
        """The result of ``run(shape)``. The next replay of any shape may overwrite it."""
        if shape not in self._captured:
            self.capture(shape)
        graph, result = self._captured[shape]
        graph.replay()
        return result

    @torch.inference_mode()
    def capture(self, shape: Shape) -> None:
        """Capture the graph of ``shape``, so that no request waits for it."""
        before = [tensor.clone() for tensor in self._kept]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                self._run(shape)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = self._run(shape)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for tensor, value in zip(self._kept, before, strict=True):
            tensor.copy_(value)
        self._captured[shape] = graph, result
