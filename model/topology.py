"""Where a rank stands among its peers, and the few collectives the layers need."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Topology:
    """One rank's place in the model-parallel group. ``Topology()`` is a model on one rank.

    ``group`` carries tensors (NCCL on GPUs, gloo on the CPU). ``control`` is a gloo group for Python objects:
    it may wait for hours (at a keyboard, for a request) without any time limit of the tensor group.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    def share(self, dimension: int, of: str) -> int:
        """The part of ``dimension`` that each rank holds; ``of`` names it should it not divide evenly."""
        assert dimension % self.size == 0, f"{of} = {dimension} does not divide by {self.size} ranks"
        return dimension // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of ``x`` over the ranks, in place; the same shape and dtype on every rank."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate ``x`` (..., n) of every rank along the last dimension: (..., n * size)."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``x`` on every rank, in place."""
        if self.size > 1:
            dist.broadcast(x, src=0, group=self.group)
        return x

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's picklable ``value`` on every rank, through the control group."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, by rank, through the control group."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values
