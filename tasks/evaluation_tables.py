"""Rows about an evaluation, for the terminal and for artifacts alike."""

from typing import Any

from rich.filesize import decimal

from model.evaluation.agreement import Agreement
from model.evaluation.record import Evaluation

Rows = list[dict[str, Any]]


def result_rows(evaluation: Evaluation) -> Rows:
    """What was measured, and how."""
    text, loss, compute, run = evaluation.text, evaluation.perplexity, evaluation.compute, evaluation.run
    return _pairs(
        {
            "nats a token": f"{loss.nats_per_token:.5f}",
            "perplexity": f"{loss.perplexity:.3f}",
            "bits a byte": f"{loss.bits_per_byte:.4f}",
            "text": f"{text.name}, {decimal(text.bytes)} in {loss.tokens:,} tokens",
            "windows": f"{len(loss.windows):,} of {loss.window:,} tokens, stride {loss.stride:,}",
            "computed": f"{compute.dtype}{' and FP8' if compute.fp8 else ''}, {compute.attention}, mp {compute.mp}",
            "device": run.device_name,
            "seconds": f"{run.load_s:.1f} loading, {run.evaluate_s:.1f} evaluating",
        }
    )


def agreement_rows(agreement: Agreement) -> Rows:
    """How the model agrees with its reference."""
    reference = agreement.reference
    return _pairs(
        {
            "reference": f"{reference.name} ({reference.kind}, {reference.dtype})",
            "mean KL, nats": f"{agreement.mean_kl:.3e}",
            "99th percentile": f"{agreement.p99_kl:.3e}",
            "same first choice": f"{agreement.top1:.2%}",
            "tokens": f"{agreement.tokens:,}",
        }
    )


def threshold_rows(evaluation: Evaluation) -> Rows:
    """One row a threshold."""
    return [
        {
            "threshold": threshold.name,
            "limit": f"{threshold.limit:.6g}",
            "measured": f"{threshold.actual:.6g}",
            "reached": "yes" if threshold.passed else "no",
        }
        for threshold in evaluation.thresholds
    ]


def markdown_table(rows: Rows) -> str:
    """``rows`` under their keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(str(value).replace('|', chr(92) + '|') for value in line)} |" for line in lines)


def _pairs(facts: dict[str, str]) -> Rows:
    return [{"what": name, "value": value} for name, value in facts.items()]
