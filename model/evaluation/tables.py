"""Rows about an evaluation, for its report and for artifacts alike."""

from model.evaluation.record import Evaluation

Rows = list[dict[str, str]]


def tables(evaluation: Evaluation) -> dict[str, Rows]:
    """All tables that ``evaluation`` has, by their titles, in the order in which a person wants to read them."""
    made = {
        "Thresholds": threshold_rows(evaluation),
        "Perplexity": perplexity_rows(evaluation),
        "Agreement with the reference": agreement_rows(evaluation),
        "Generation": speed_rows(evaluation),
        "How it was computed": compute_rows(evaluation),
    }
    return {title: rows for title, rows in made.items() if rows}


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


def perplexity_rows(evaluation: Evaluation) -> Rows:
    """What the text comes to, and how it was cut."""
    text, loss = evaluation.text, evaluation.perplexity
    return _pairs(
        {
            "nats a token": f"{loss.nats_per_token:.5f}",
            "perplexity": f"{loss.perplexity:.3f}",
            "bits a byte": f"{loss.bits_per_byte:.4f}",
            "text": f"{text.name}, {text.bytes:,} bytes in {loss.tokens:,} tokens",
            "windows": f"{len(loss.windows):,} of {loss.window:,} tokens, stride {loss.stride:,}",
        }
    )


def agreement_rows(evaluation: Evaluation) -> Rows:
    """How the model agrees with its reference; none where it has none."""
    agreement = evaluation.agreement
    if agreement is None:
        return []
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


def speed_rows(evaluation: Evaluation) -> Rows:
    """One row a batch size."""
    return [
        {
            "batch": f"{speed.batch:,}",
            "prompt": f"{speed.prompt_tokens:,}",
            "new": f"{speed.new_tokens:,}",
            "prefill, tokens/s": f"{speed.prefill_tokens_per_s:,.1f}",
            "decode, tokens/s": f"{speed.decode_tokens_per_s:,.1f}",
        }
        for speed in evaluation.run.speed
    ]


def compute_rows(evaluation: Evaluation) -> Rows:
    """On what, and in which arithmetic."""
    compute, run = evaluation.compute, evaluation.run
    return _pairs(
        {
            "arithmetic": f"{compute.dtype}{' and FP8' if compute.fp8 else ''}, {compute.attention} attention",
            "ranks": f"{compute.mp}",
            "device": run.device_name,
            "seconds": f"{run.load_s:.1f} loading, {run.evaluate_s:.1f} evaluating",
            "manifest": f"{evaluation.manifest_sha256[:16]}…",
            "tool": evaluation.tool,
        }
    )


def window_rows(evaluation: Evaluation) -> Rows:
    """One row a window: its loss, and its divergence where there is a reference."""
    divergences = evaluation.agreement.windows if evaluation.agreement else ()
    rows = []
    for number, window in enumerate(evaluation.perplexity.windows):
        row = {"first token": f"{window.first:,}", "tokens": f"{window.tokens:,}"}
        row["nats a token"] = f"{window.nats_per_token:.5f}"
        if divergences:
            row["mean KL"] = f"{divergences[number]:.3e}" if number < len(divergences) else ""
        rows.append(row)
    return rows


def _pairs(facts: dict[str, str]) -> Rows:
    return [{"what": name, "value": value} for name, value in facts.items()]
