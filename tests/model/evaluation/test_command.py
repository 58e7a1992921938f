"""``python -m model.evaluate`` as a person runs it: output, errors, exit status, and what lies in the checkpoint."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from model import evaluate
from model.evaluation.record import EVALUATION, evidence_of
from tests.checkpoints import edit_file

QUICK = ("--device=cpu", "--max-tokens=60", "--window=32")


@pytest.fixture
def checkpoint(shards, tmp_path):
    return shutil.copytree(shards("tiny-v3", 1), tmp_path / "checkpoint")


@pytest.fixture
def command(capsys):
    def run(*arguments):
        status = evaluate.main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def test_the_report_is_printed_and_kept(command, checkpoint):
    status, out, err = command(checkpoint, *QUICK)
    assert status == 0
    assert json.loads(out) == json.loads((checkpoint / EVALUATION).read_text())
    assert "evaluate: 2 of 2 windows" in err
    assert evidence_of(checkpoint).state == "passed"


def test_all_but_the_run_is_the_same_in_every_run(command, checkpoint):
    first, second = (json.loads(command(checkpoint, *QUICK)[1]) for _ in range(2))
    assert first.pop("run").keys() == second.pop("run").keys()
    assert first == second


def test_a_threshold_that_is_not_reached_is_written_down_and_fails(command, checkpoint):
    status, out, err = command(checkpoint, *QUICK, "--max-perplexity=2", "--max-bits-per-byte=30")
    assert status == 1
    assert "error: max_perplexity: " in err
    assert "is above the limit of 2" in err
    thresholds = json.loads(out)["thresholds"]
    assert [(each["name"], each["passed"]) for each in thresholds] == [
        ("max_perplexity", False),
        ("max_bits_per_byte", True),
    ]
    assert evidence_of(checkpoint).state == "failed"
    assert command(checkpoint, *QUICK, "--max-perplexity=2", "--only-report")[0] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--window=513"], "window 513: takes 2 to 512 tokens"),
        (["--window=20", "--stride=20"], "stride 20: takes 1 to 19"),
        (["--text=absent.txt"], "absent.txt: cannot be read"),
        (["--text=latin.txt"], "latin.txt: is not UTF-8 text"),
        (["--text=empty.txt"], "empty.txt: holds no token"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_loading(options, said, command, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    for shard in checkpoint.glob("*.safetensors"):
        shard.write_bytes(b"")
    status, out, err = command(checkpoint, "--device=cpu", *options)
    assert (status, out) == (2, "")
    assert said in err
    assert not (checkpoint / EVALUATION).exists()


def test_weights_that_overflow_leave_no_evidence(command, checkpoint):
    shard = checkpoint / "model0-mp1.safetensors"
    edit_file(shard, {"norm.weight": torch.full_like(load_file(shard)["norm.weight"], torch.nan)}, index=False)
    status, out, err = command(checkpoint, *QUICK)
    assert (status, out) == (1, "")
    assert "tokens 1 to 32: their loss is nan" in err
    assert not (checkpoint / EVALUATION).exists()
