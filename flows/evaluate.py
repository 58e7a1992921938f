"""The flow ``evaluate``: evidence for one checkpoint, by hand or for every new one that a trigger names."""

from pathlib import Path
from typing import Annotated, Literal, Self

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.evaluation.options import AGAINST_TOKENS
from model.evaluation.record import Evaluation
from model.evaluation.thresholds import LIMITS, check_limits
from tasks.evaluation import evaluate as evaluate_stage

Dtype = Literal["float32", "bfloat16"]


class EvaluateParameters(BaseModel):
    """Which checkpoint to evaluate, on which text, and what it must reach. All but the checkpoint has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint: Path = Field(description="Directory with shards and manifest.json.")
    text: Path | None = Field(None, description="UTF-8 text to evaluate on; empty: a bundled passage of a play.")
    max_tokens: int | None = Field(None, description="Evaluate the first tokens of the text alone; empty: all.", ge=1)
    window: int | None = Field(
        None, description="Tokens that a forward pass sees; empty: the model's context, at most 2,048.", ge=2
    )
    stride: int | None = Field(None, description="Tokens from window to window; empty: one less than the window.", ge=1)
    batch: int = Field(4, description="Windows computed at once.", ge=1, le=4096)
    against: Path | None = Field(
        None,
        description="A reference to agree with: other shards, or the Hugging Face directory that they came of. "
        "Empty: none.",
    )
    against_tokens: int = Field(
        AGAINST_TOKENS,
        description="Compare the first tokens alone: as many, times the vocabulary, times 4 bytes lie on the disk "
        "meanwhile.",
        ge=1,
    )
    dtype: Dtype | None = Field(None, description="Compute dtype; empty: float32 on the CPU, bfloat16 on a GPU.")
    against_dtype: Dtype | None = Field(None, description="The reference's compute dtype; empty: the same.")
    max_perplexity: float | None = Field(
        None, description="Threshold: the run fails where perplexity is higher.", gt=1, allow_inf_nan=False
    )
    max_bits_per_byte: float | None = Field(
        None, description="Threshold: the run fails where a byte takes more bits.", gt=0, allow_inf_nan=False
    )
    max_kl: float | None = Field(
        None,
        description="Threshold: the run fails where the mean KL divergence from the reference is higher, in nats.",
        ge=0,
        allow_inf_nan=False,
    )
    max_kl_p99: float | None = Field(
        None, description="Threshold: the same for its 99th percentile.", ge=0, allow_inf_nan=False
    )
    min_agreement: float | None = Field(
        None,
        description="Threshold: the run fails where fewer tokens have the reference's first choice, as a share.",
        ge=0,
        le=1,
    )
    speed: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        (), description="Batch sizes at which generation is measured, too; empty: it is not."
    )
    gpu_limit: str | None = Field(
        None,
        description="Name of the global concurrency limit that the evaluation takes, such as gpu; it must exist. "
        "Empty: none is taken.",
    )
    timeout_s: float = Field(
        3600.0, description="Hard limit on the evaluation, and as much again on its reference, in seconds.", gt=0
    )

    @model_validator(mode="after")
    def _agreement_needs_a_reference(self) -> Self:
        asked = self.model_dump(include={limit.name for limit in LIMITS}, exclude_none=True)
        check_limits(asked, with_reference=self.against is not None)
        return self

    @property
    def options(self) -> dict[str, object]:
        """Those of the command ``model.evaluate``."""
        return self.model_dump(exclude={"checkpoint", "gpu_limit", "timeout_s"})


@flow(name="evaluate", flow_run_name="evaluate {params.checkpoint.name}", persist_result=False)
def evaluate(params: EvaluateParameters) -> Evaluation:
    """Measure one checkpoint and keep the evidence beside it, as ``evaluation.json``.

    Raises ``RunError`` where a threshold is not reached: the file and the artifact say so, too.
    """
    return evaluate_stage(params.checkpoint.absolute(), params.options, params.timeout_s, params.gpu_limit)
