"""``evaluation.json`` and what can be said of a checkpoint that has one, or none."""

import dataclasses
import json

import pytest

from model.checkpoint.released import manifest_digest
from model.errors import InputError
from model.evaluation.agreement import Agreement
from model.evaluation.expert_load import ExpertLoad
from model.evaluation.perplexity import Perplexity, WindowLoss
from model.evaluation.predictions import Reference
from model.evaluation.record import (
    EVALUATION,
    Compute,
    Evaluation,
    Run,
    evidence_of,
    read_evaluation,
    write_evaluation,
)
from model.evaluation.text import TextRecord
from model.evaluation.thresholds import judge


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "manifest.json").write_text('{"schema": 1}')
    return tmp_path


def evaluation(checkpoint, **asked) -> Evaluation:
    loss = Perplexity(30, 16, 15, 3.5, 33.1, 2.9, (WindowLoss(1, 15, 3.0), WindowLoss(16, 15, 4.0)))
    return Evaluation(
        manifest_sha256=manifest_digest(checkpoint),
        text=TextRecord("a.txt", "0" * 64, 88),
        compute=Compute("cpu", "float32", False, "absorbed", 1, 4),
        perplexity=loss,
        agreement=Agreement(Reference("shards", "a", "1" * 64, "float32"), 30, 1e-3, 0.1, 0.97, (1e-3, 2e-3)),
        expert_load=(ExpertLoad(1, (3, 0, 57)),),
        thresholds=judge(asked, {"perplexity": dataclasses.asdict(loss)}),
        run=Run("CPU", 0.1, 0.2),
    )


def test_what_is_written_is_what_is_read(checkpoint):
    written = evaluation(checkpoint, max_perplexity=40.0)
    write_evaluation(checkpoint, written)
    assert read_evaluation(checkpoint / EVALUATION) == written
    assert [path.name for path in checkpoint.iterdir() if path.suffix == ".tmp"] == []


def test_the_four_answers(checkpoint):
    assert evidence_of(checkpoint).state == "missing"
    write_evaluation(checkpoint, evaluation(checkpoint, max_perplexity=40.0))
    assert evidence_of(checkpoint).state == "passed"
    assert "1 thresholds reached" in evidence_of(checkpoint).reason
    write_evaluation(checkpoint, evaluation(checkpoint, max_perplexity=33.0, max_bits_per_byte=4.0))
    failed = evidence_of(checkpoint)
    assert failed.state == "failed"
    assert failed.reason.endswith("max_perplexity: 33.1 is above the limit of 33")
    (checkpoint / "manifest.json").write_text('{"schema": 1, "mp": 2}')
    foreign = evidence_of(checkpoint)
    assert foreign.state == "foreign"
    assert foreign.evaluation is not None
    assert foreign.evaluation.manifest_sha256[:12] in foreign.reason


def test_no_threshold_is_said_to_be_reached_where_none_was_asked(checkpoint):
    write_evaluation(checkpoint, evaluation(checkpoint))
    assert evidence_of(checkpoint).reason.endswith("3.5000 nats a token, no threshold was asked")


def test_a_limit_is_reached_where_it_is_met(checkpoint):
    [threshold] = evaluation(checkpoint, max_perplexity=33.1).thresholds
    assert threshold.passed


@pytest.mark.parametrize(
    ("change", "said"),
    [({"schema": 2}, "schema 2 is unknown"), ({"perplexity": None}, "is damaged"), ({"text": {}}, "is damaged")],
)
def test_a_record_that_cannot_be_read_is_an_error(checkpoint, change, said):
    fields = evaluation(checkpoint).to_json() | change
    (checkpoint / EVALUATION).write_text(json.dumps(fields))
    with pytest.raises(InputError, match=said):
        evidence_of(checkpoint)


def test_a_directory_without_a_manifest_has_no_evidence(tmp_path):
    with pytest.raises(InputError, match="manifest.json: cannot be read"):
        evidence_of(tmp_path)
