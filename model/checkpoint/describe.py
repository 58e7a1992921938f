"""What a plan means for the person who will run it: files, bytes, legal mp, what is left out, memory, disk."""

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from model.args import ModelArgs
from model.checkpoint.headers import ITEMSIZE
from model.checkpoint.plan import DroppedRule, Plan

BF16_BYTES = 2
USABLE_SHARE = 0.9
"""Of a GPU's memory: the rest is for activations, the runtime and fragmentation."""


@dataclass(frozen=True)
class PlannedFile:
    """One output file: tensors and bytes, header included."""

    name: str
    tensors: int
    size: int


@dataclass(frozen=True)
class Footprint:
    """Bytes that one rank needs on a GPU of ``gpu_memory`` bytes.

    ``weights`` is the largest rank's. ``cache_per_1000_tokens`` is the absorbed attention's latent cache in BF16,
    which every rank holds whole. ``cache_tokens`` fit beside the weights. ``smallest_mp`` is the smallest legal mp
    that fits, None if none does.
    """

    gpu_memory: int
    weights: int
    cache_per_1000_tokens: int
    cache_tokens: int
    smallest_mp: int | None

    @property
    def fits(self) -> bool:
        """Whether the weights and a cache of at least 1,000 tokens fit."""
        return self.cache_tokens >= 1000


@dataclass(frozen=True)
class PlanSummary:
    """``source_weights`` and ``weights`` are ``bf16`` or ``fp8``; sizes are bytes."""

    model_type: str
    source_weights: str
    source_size: int
    weights: str
    mtp: str
    mp: int
    legal_mp: tuple[int, ...]
    files: tuple[PlannedFile, ...]
    dropped: tuple[DroppedRule, ...]
    output_size: int
    footprint: Footprint

    def to_json(self) -> dict[str, Any]:
        """JSON values, as ``shardflow plan --json`` prints them."""
        fields = asdict(self)
        fields["footprint"]["fits"] = self.footprint.fits
        return fields


def describe(plan: Plan, gpu_memory: int = 80 * 10**9) -> PlanSummary:
    """Summarise ``plan``, with a verdict for GPUs of ``gpu_memory`` bytes."""
    files = tuple(PlannedFile(file.name, len(file.targets), len(file.header()) + file.data_size) for file in plan.files)
    return PlanSummary(
        model_type=str(plan.source.config["model_type"]),
        source_weights=plan.source.weights,
        source_size=sum(header.size for header in plan.source.headers),
        weights=plan.weights,
        mtp=plan.mtp,
        mp=plan.mp,
        legal_mp=plan.legal_mp,
        files=files,
        dropped=plan.dropped,
        output_size=sum(file.size for file in files),
        footprint=_footprint(plan, files, gpu_memory),
    )


def _footprint(plan: Plan, files: tuple[PlannedFile, ...], gpu_memory: int) -> Footprint:
    args = plan.args
    cache_per_token = args.n_layers * (args.kv_lora_rank + args.qk_rope_head_dim) * BF16_BYTES
    weights = max(file.size for file in files[: plan.mp]) + _absorbed(args, plan.mp)
    sizes = {mp: _rank_size(plan, mp) + _absorbed(args, mp) for mp in plan.legal_mp}
    room = int(USABLE_SHARE * gpu_memory) - 1000 * cache_per_token
    return Footprint(
        gpu_memory=gpu_memory,
        weights=weights,
        cache_per_1000_tokens=1000 * cache_per_token,
        cache_tokens=max(0, int(USABLE_SHARE * gpu_memory) - weights) // cache_per_token,
        smallest_mp=next((mp for mp, size in sizes.items() if size <= room), None),
    )


def _absorbed(args: ModelArgs, mp: int) -> int:
    """What the absorbed attention adds to FP8 shards: it holds ``wkv_b`` in BF16, a byte more for each weight."""
    expanded = args.n_heads // mp * (args.qk_nope_head_dim + args.v_head_dim) * args.kv_lora_rank
    return args.n_layers * expanded if args.dtype == "fp8" else 0


def _rank_size(plan: Plan, mp: int) -> int:
    """Bytes of tensor data that one of ``mp`` ranks holds of the main model."""
    total = 0
    for binding in plan.source.bindings:
        if not binding.mtp:
            weight, scale = plan.source.tensors[binding.source], plan.source.scale(binding.source)
            kept = weight.size + (scale.size if scale else 0)
            size = prod(weight.shape) * ITEMSIZE["BF16"] if scale and plan.weights == "bf16" else kept
            total += size // mp if binding.axis is not None or binding.expert is not None else size
    return total
