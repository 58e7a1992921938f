"""What a plan means for the person who will run it: files, bytes, legal mp, what is left out, disk needed."""

from dataclasses import asdict, dataclass
from typing import Any

from model.checkpoint.plan import DroppedRule, Plan


@dataclass(frozen=True)
class PlannedFile:
    """One output file: tensors and bytes, header included."""

    name: str
    tensors: int
    size: int


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

    def to_json(self) -> dict[str, Any]:
        """JSON values, as ``shardflow plan --json`` prints them."""
        return asdict(self)


def describe(plan: Plan) -> PlanSummary:
    """Summarise ``plan``."""
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
    )
