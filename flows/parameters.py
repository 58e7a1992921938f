"""The pipeline's parameters: a pydantic model, which Prefect checks and the flow UI renders as a form."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from flows.fields import GpuLimit, MaxMemory, Mp, Mtp, RayAddress, TaskRunner, WarmUpTimeout, Workers
from model.checkpoint.build import DEFAULT_MAX_MEMORY, Resources


class PipelineParameters(BaseModel):
    """From which checkpoint to which shards, and what the run may use on the way."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description="A local directory, or a hub repository (owner/name).", min_length=1)
    revision: str | None = Field(None, description="Branch, tag or commit of a hub repository; main where empty.")
    out: Path = Field(description="Directory of the finished checkpoint; it must not exist yet, or be finished.")
    mp: Mp
    weights: Literal["bf16", "fp8"] | None = Field(
        None, description="What the shards hold; empty: what the source holds. BF16 from FP8 is dequantised."
    )
    dequantize: Literal["staged", "fused"] | None = Field(
        None,
        description="How FP8 becomes BF16: staged writes a BF16 Hugging Face directory first (the default), "
        "fused dequantises on the way into the shards. Leave empty for FP8 shards.",
    )
    mtp: Mtp = "drop"
    work: Path | None = Field(
        None, description="Directory for downloads and the BF16 intermediate; empty: beside the output, OUT.work."
    )
    keep_intermediates: Literal["none", "bf16", "all"] = Field(
        "all",
        description="What of the work directory stays once the checkpoint is published: nothing, "
        "the BF16 Hugging Face directory, or that and the download.",
    )
    max_memory: MaxMemory = ByteSize(DEFAULT_MAX_MEMORY)
    workers: Workers = Field(default_factory=lambda: os.cpu_count() or 1)
    task_runner: TaskRunner = "threads"
    ray_address: RayAddress = None
    gpu_limit: GpuLimit = None
    warm_up_timeout_s: WarmUpTimeout = 1800.0
    prompt: str | None = Field(None, description="A prompt to answer once the shards are warmed up.")
    max_new_tokens: int = Field(128, description="Longest reply to the prompt, in tokens.", ge=1)

    @model_validator(mode="after")
    def _dequantize_belongs_to_bf16(self) -> Self:
        if self.weights == "fp8" and self.dequantize is not None:
            raise ValueError("dequantize: FP8 shards are not dequantised; leave it empty, or ask for weights bf16")
        return self

    @model_validator(mode="after")
    def _work_lies_outside_out(self) -> Self:
        if self.work_directory.is_relative_to(self.out.absolute()):
            raise ValueError("work: must lie outside out, which is renamed into its place as a whole")
        return self

    @model_validator(mode="after")
    def _ray_address_belongs_to_ray(self) -> Self:
        if self.ray_address is not None and self.task_runner != "ray":
            raise ValueError("ray_address: belongs to task_runner ray")
        return self

    @property
    def resources(self) -> Resources:
        """What the stages may use."""
        return Resources(max_memory=int(self.max_memory), workers=self.workers)

    @property
    def work_directory(self) -> Path:
        """Where downloads and intermediates go."""
        out = self.out.absolute()
        return (self.work or out.with_name(out.name + ".work")).absolute()
