"""Which experts a text uses: how often each expert of each MoE layer is chosen."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from model.moe import Gate
from model.transformer import Transformer


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens chose each expert of one layer; they sum to the tokens times the experts a token."""

    layer: int
    counts: tuple[int, ...]


@contextmanager
def counted_experts(model: Transformer) -> Iterator[list[torch.Tensor]]:
    """Count the choices of ``model``'s gates in the block: int64 (experts) for each MoE layer, in order.

    Every rank's gates choose among all experts, so each rank counts all.
    """
    counts: list[torch.Tensor] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Gate):
                count = torch.zeros(model.args.n_routed_experts, dtype=torch.int64, device=model.device)
                counts.append(count)
                stack.callback(module.register_forward_hook(_Counter(count)).remove)
        yield counts


class _Counter:
    def __init__(self, count: torch.Tensor) -> None:
        self.count = count

    def __call__(self, _gate: torch.nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        _weights, indices = output
        self.count += torch.bincount(indices.flatten(), minlength=len(self.count))


def expert_loads(model: Transformer, counts: list[torch.Tensor]) -> tuple[ExpertLoad, ...]:
    """The record of ``counted_experts``: dense layers come first and have none."""
    first = model.args.n_dense_layers
    return tuple(ExpertLoad(first + i, tuple(count.tolist())) for i, count in enumerate(counts))
