"""``evaluation.json``: the evidence beside a checkpoint, bound to the checkpoint by the sha256 of its manifest.

Everything but ``run`` is the same for the same shards, text and options on the same kind of device; ``run`` holds
what differs from run to run: the device's name and the time it took.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.checkpoint.manifest import MANIFEST, tool_version
from model.checkpoint.released import manifest_digest
from model.checkpoint.source import read_json
from model.checkpoint.storage import json_bytes, reading, storage_errors, write_atomically
from model.errors import InputError
from model.evaluation.agreement import Agreement
from model.evaluation.expert_load import ExpertLoad
from model.evaluation.perplexity import Perplexity, WindowLoss
from model.evaluation.predictions import Reference
from model.evaluation.speed import Speed
from model.evaluation.text import TextRecord
from model.evaluation.thresholds import Threshold

EVALUATION = "evaluation.json"
SCHEMA = 1


@dataclass(frozen=True)
class Compute:
    """How the model was computed, which decides the last digits of every figure."""

    device: str
    dtype: str
    fp8: bool
    attention: str
    mp: int
    batch: int


@dataclass(frozen=True)
class Run:
    """What differs from run to run: the device's name, seconds of loading and of the text, speed where it was asked."""

    device_name: str
    load_s: float
    evaluate_s: float
    speed: tuple[Speed, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """The contents of ``evaluation.json``."""

    manifest_sha256: str
    text: TextRecord
    compute: Compute
    perplexity: Perplexity
    agreement: Agreement | None
    expert_load: tuple[ExpertLoad, ...]
    thresholds: tuple[Threshold, ...]
    run: Run
    tool: str = dataclasses.field(default_factory=tool_version)
    schema: int = SCHEMA

    @property
    def passed(self) -> bool:
        """Whether every threshold that was asked for was reached."""
        return all(threshold.passed for threshold in self.thresholds)

    @property
    def problems(self) -> list[str]:
        """A line for each threshold that was not reached."""
        return [threshold.problem() for threshold in self.thresholds if not threshold.passed]

    def to_json(self) -> dict[str, Any]:
        """JSON values, in the order in which a person wants to read them."""
        fields = dataclasses.asdict(self)
        first = {"schema": self.schema, "tool": self.tool, "manifest_sha256": self.manifest_sha256}
        return first | {"passed": self.passed} | {name: fields[name] for name in fields if name not in first}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Evaluation":
        """The evaluation of parsed JSON. Raises ``KeyError`` or ``TypeError`` where it holds anything else."""
        loss, agreement = fields["perplexity"], fields["agreement"]
        return cls(
            manifest_sha256=fields["manifest_sha256"],
            text=TextRecord(**fields["text"]),
            compute=Compute(**fields["compute"]),
            perplexity=Perplexity(**loss | {"windows": tuple(WindowLoss(**window) for window in loss["windows"])}),
            agreement=agreement and _agreement(agreement),
            expert_load=tuple(ExpertLoad(load["layer"], tuple(load["counts"])) for load in fields["expert_load"]),
            thresholds=tuple(Threshold(**threshold) for threshold in fields["thresholds"]),
            run=_run(fields["run"]),
            tool=fields["tool"],
        )


def _agreement(fields: dict[str, Any]) -> Agreement:
    return Agreement(
        **fields | {"reference": Reference(**fields["reference"]), "windows": tuple(fields["windows"])},
    )


def _run(fields: dict[str, Any]) -> Run:
    return Run(**fields | {"speed": tuple(Speed(**speed) for speed in fields["speed"])})


def write_evaluation(checkpoint: Path, evaluation: Evaluation) -> None:
    """Write ``evaluation`` beside the manifest, whole or not at all."""
    path = checkpoint / EVALUATION
    with storage_errors(path):
        write_atomically(path, json_bytes(evaluation.to_json()))


@dataclass(frozen=True)
class Evidence:
    """What is known of a checkpoint: ``reason`` says it in one line; ``evaluation`` is None where there is none.

    ``missing``: it was never evaluated. ``foreign``: the evaluation is of other shards. ``failed``: it did not reach a
    threshold that was asked for. ``passed``: it reached all of them, which may be none.
    """

    state: Literal["missing", "foreign", "failed", "passed"]
    reason: str
    evaluation: Evaluation | None = None


def evidence_of(checkpoint: Path) -> Evidence:
    """What evidence the checkpoint in ``checkpoint`` has.

    Raises ``InputError`` where it has no manifest, or an ``evaluation.json`` that this version cannot read.
    """
    path = checkpoint / EVALUATION
    with reading(checkpoint / MANIFEST):
        digest = manifest_digest(checkpoint)
    if not path.exists():
        return Evidence("missing", f"{checkpoint}: holds no {EVALUATION}; run `shardflow evaluate {checkpoint}`")
    evaluation = read_evaluation(path)
    if evaluation.manifest_sha256 != digest:
        reason = f"{path}: is of the manifest {evaluation.manifest_sha256[:12]}…, not of this one ({digest[:12]}…)"
        return Evidence("foreign", f"{reason}; run `shardflow evaluate {checkpoint}`", evaluation)
    if not evaluation.passed:
        return Evidence("failed", f"{path}: {'; '.join(evaluation.problems)}", evaluation)
    reached = f"{len(evaluation.thresholds)} thresholds reached" if evaluation.thresholds else "no threshold was asked"
    return Evidence("passed", f"{path}: {evaluation.perplexity.nats_per_token:.4f} nats a token, {reached}", evaluation)


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation in the file ``path``. Raises ``InputError`` where this version cannot read it."""
    fields = read_json(path)
    if fields.get("schema") != SCHEMA:
        raise InputError(f"{path}: schema {fields.get('schema')!r} is unknown to this version, which reads {SCHEMA}")
    return _parsed(fields, str(path))


def parse_evaluation(text: str, origin: str) -> Evaluation:
    """The evaluation that a command, ``origin``, printed."""
    return _parsed(json.loads(text), origin)


def _parsed(fields: dict[str, Any], origin: str) -> Evaluation:
    try:
        return Evaluation.from_json(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{origin}: is damaged ({type(error).__name__}: {error}); evaluate again") from error
