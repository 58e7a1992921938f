"""Facts and table rows about plans, shards, proofs and ranks, for the terminal and for artifacts alike."""

from typing import Any

from rich.filesize import decimal

from model.checkpoint.describe import PlanSummary
from model.checkpoint.manifest import Manifest
from tasks.results import ValidationResult, WarmUpResult

Rows = list[dict[str, Any]]


def plan_rows(summary: PlanSummary) -> Rows:
    """One row a planned file."""
    return [{"file": file.name, "tensors": file.tensors, "bytes": file.size} for file in summary.files]


def plan_facts(summary: PlanSummary) -> list[str]:
    """The plan in a few sentences."""
    footprint = summary.footprint
    return [
        f"{summary.model_type}: {decimal(summary.source_size)} of {summary.source_weights} weights become "
        f"{decimal(summary.output_size)} of {summary.weights} shards at mp {summary.mp}",
        f"legal mp: {', '.join(map(str, summary.legal_mp))}",
        *(f"left out by rule {r.rule}: {r.tensors:,} tensors, {r.reason}" for r in summary.dropped),
        f"each GPU: {decimal(footprint.weights)} of weights, "
        f"{decimal(footprint.cache_per_1000_tokens)} of cache for 1,000 tokens",
        f"GPU of {decimal(footprint.gpu_memory)}: {_verdict(summary)}",
    ]


def _verdict(summary: PlanSummary) -> str:
    footprint = summary.footprint
    if footprint.fits:
        return f"fits, with room for {footprint.cache_tokens:,} tokens of cache"
    if footprint.smallest_mp is None:
        return f"does not fit at any legal mp; {'FP8 shards or ' if summary.weights == 'bf16' else ''}a larger GPU may"
    return f"does not fit; the smallest legal mp that does is {footprint.smallest_mp}"


def shard_rows(manifest: Manifest) -> Rows:
    """One row a file of a checkpoint."""
    return [
        {"file": f.name, "tensors": "" if f.tensors is None else f.tensors, "bytes": f.size, "sha256": f.sha256}
        for f in manifest.files
    ]


def warm_up_rows(result: WarmUpResult) -> Rows:
    """One row a rank."""
    return [
        {
            "rank": rank.rank,
            "device": rank.device,
            "compute": rank.dtype,
            "load s": f"{rank.load_s:.2f}",
            "two tokens s": f"{rank.warmup_s:.2f}",
            "tokens": " ".join(map(str, rank.tokens)),
        }
        for rank in result.ranks
    ]


def validation_fact(result: ValidationResult) -> str:
    """What was proven, in one sentence."""
    return (
        f"verified: {result.source_tensors:,} source tensors ({decimal(result.source_size)}) equal the shards "
        f"bit for bit; {result.files} files have the digests of the manifest"
    )
