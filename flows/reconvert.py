"""The scheduled flow: where a branch has moved to a new commit, its checkpoint becomes the latest version."""

import os
from pathlib import Path
from typing import Literal, Self

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from flows.fields import GpuLimit, MaxMemory, Mp, Mtp, RayAddress, TaskRunner, WarmUpTimeout, Workers
from flows.parameters import PipelineParameters
from flows.pipeline import checkpoint_pipeline
from model.checkpoint.build import DEFAULT_MAX_MEMORY
from model.checkpoint.locate import HUB_ID
from model.checkpoint.versions import Versions
from tasks.results import Result
from tasks.source import resolve_revision
from tasks.versions import make_current, remove_old


class ReconvertParameters(BaseModel):
    """Which branch to follow, what to make of it, and how many versions to keep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repo: str = Field(description="A hub repository (owner/name).", pattern=f"^{HUB_ID.pattern}$")
    revision: str = Field("main", description="The branch to follow (or a tag or commit).", min_length=1)
    root: Path = Field(
        description="Directory of all versions: ROOT/owner/name/<commit>/mp<N>-<weights>, and the link latest. "
        "One root for each mp and weights."
    )
    mp: Mp
    weights: Literal["bf16", "fp8"] = Field(description="What the shards hold. BF16 from FP8 is dequantised.")
    mtp: Mtp = "drop"
    keep: int = Field(2, description="How many versions stay, the latest among them.", ge=1, le=100)
    max_memory: MaxMemory = ByteSize(DEFAULT_MAX_MEMORY)
    workers: Workers = Field(default_factory=lambda: os.cpu_count() or 1)
    task_runner: TaskRunner = "threads"
    ray_address: RayAddress = None
    gpu_limit: GpuLimit = None
    warm_up_timeout_s: WarmUpTimeout = 1800.0

    @model_validator(mode="after")
    def _the_pipeline_takes_them(self) -> Self:
        try:
            self.pipeline("0" * 40)
        except ValidationError as error:
            raise ValueError("; ".join(problem["msg"] for problem in error.errors())) from error
        return self

    @property
    def versions(self) -> Versions:
        """All versions that runs with these parameters make."""
        return Versions(self.root, self.repo, self.mp, self.weights, self.mtp)

    def pipeline(self, commit: str) -> PipelineParameters:
        """The parameters that make the version of ``commit``; nothing but the checkpoint is left of the work."""
        shared = {name: getattr(self, name) for name in PipelineParameters.model_fields if hasattr(self, name)}
        return PipelineParameters(
            **shared
            | {
                "source": self.repo,
                "revision": commit,
                "out": self.versions.directory(commit),
                "work": self.versions.work,
                "dequantize": "fused" if self.weights == "bf16" else None,
                "keep_intermediates": "none",
            }
        )


class ReconvertResult(Result):
    """Where ``latest`` is now, whether this run made that version, and what it removed."""

    repo: str
    commit: str
    checkpoint: Path
    converted: bool
    removed: tuple[Path, ...] = ()


@flow(name="reconvert", flow_run_name="{params.repo} at {params.revision} to mp{params.mp}", persist_result=False)
def reconvert(params: ReconvertParameters) -> ReconvertResult:
    """Convert the commit that a branch stands for now, unless that has been done, and let ``latest`` name it.

    Until the new version is validated, published and warmed up, ``latest`` stays as it was. Raises ``InputError``
    where ``latest`` belongs to another mp or other weights.
    """
    versions = params.versions
    versions.check()
    commit = resolve_revision(params.repo, params.revision)
    current = versions.current()
    if current == versions.directory(commit):
        get_run_logger().info("nothing to do: %s stands for %s, which %s names", params.revision, commit, versions.link)
        removed = remove_old(versions, params.keep)  # what an interrupted run left, or a lower ``keep`` asks for
        return ReconvertResult(repo=params.repo, commit=commit, checkpoint=current, converted=False, removed=removed)
    checkpoint_pipeline(params.pipeline(commit))
    checkpoint = make_current(versions, commit)
    removed = remove_old(versions, params.keep)
    return ReconvertResult(repo=params.repo, commit=commit, checkpoint=checkpoint, converted=True, removed=removed)
