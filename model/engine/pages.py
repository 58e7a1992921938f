"""The latent cache in pages of 64 positions, and which of them belong to which sequence."""

import torch

from kernels.latent_cache import PAGE
from model.args import ModelArgs
from model.layers import Execution

SCRATCH = 0
"""The page that no sequence has: rows of a batch without a sequence write there."""


def pages_for(positions: int) -> int:
    """How many pages hold that many positions."""
    return -(-positions // PAGE)


class Pages:
    """``values`` (layers, pages, PAGE, C + R) on the device; the first page is scratch, the others are lent out."""

    def __init__(self, args: ModelArgs, execution: Execution, count: int) -> None:
        width = args.kv_lora_rank + args.qk_rope_head_dim
        shape = (args.n_layers, count + 1, PAGE, width)
        self.values = torch.zeros(shape, dtype=execution.dtype, device=execution.device)
        self._free = list(range(count, SCRATCH, -1))

    @property
    def free(self) -> int:
        """How many pages nobody has."""
        return len(self._free)

    def lend(self, count: int) -> list[int]:
        """``count`` pages for one sequence. The caller has looked at ``free``."""
        assert count <= self.free, f"{count} pages wanted, {self.free} are free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Pages of a sequence that has ended."""
        self._free.extend(reversed(pages))
