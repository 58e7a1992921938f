"""A checkpoint against a reference: good ones agree to the last digits, and what perplexity overlooks is caught."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model import evaluate, predict
from model.errors import InputError
from model.evaluation.agreement import AgreementMeter, check_predictions, divergence
from model.evaluation.predictions import (
    Predictions,
    Reference,
    check_room,
    read_predictions,
    write_predictions,
)
from model.evaluation.record import evidence_of
from model.evaluation.reference import as_arguments
from model.evaluation.windows import Window, plan_windows
from model.launch import start_ranks
from tests.checkpoints import edit_file, edit_json, edit_tensor
from tests.model.oracle import TINY_V3

TEXT = ("--device=cpu", "--max-tokens=1022", "--window=512", "--stride=511")
LIMIT = "--max-kl=1e-6"
GOOD = 1e-9
"""Far below the limit, and a hundred times what was seen: float32 sums in another order."""


@pytest.fixture(scope="module")
def predictions(oracle_checkpoint, tmp_path_factory):
    """What transformers says of the text, from weights that were dequantised by the tests' own formula."""
    directory = tmp_path_factory.mktemp("predictions")
    assert predict.main([str(oracle_checkpoint), str(directory), *TEXT]) == 0
    return directory


@pytest.fixture
def command(capsys):
    def run(*arguments):
        status = evaluate.main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return status, json.loads(told.out) if told.out else None, told.err

    return run


@pytest.mark.parametrize(("case", "mp"), [("tiny-v3", 2), ("tiny-v3-fp8", 1)])
def test_good_shards_agree_with_transformers(case, mp, shards, predictions):
    arguments = [str(shards(case, mp)), *TEXT, f"--predictions={predictions}", LIMIT, "--min-agreement=1"]
    done = start_ranks("model.evaluate", arguments, mp, timeout=200, capture=True)
    assert done.returncode == 0, done.stderr
    evaluation = json.loads(done.stdout)
    agreement = evaluation["agreement"]
    assert agreement["reference"]["kind"] == "transformers"
    assert 0 <= agreement["mean_kl"] < agreement["p99_kl"] < GOOD
    assert (agreement["tokens"], len(agreement["windows"]), agreement["top1"]) == (1022, 2, 1.0)
    assert [threshold["passed"] for threshold in evaluation["thresholds"]] == [True, True]


@pytest.fixture(scope="module")
def good_nats(shards, tmp_path_factory):
    directory = shutil.copytree(shards("tiny-v3", 1), tmp_path_factory.mktemp("good") / "checkpoint")
    assert evaluate.main([str(directory), *TEXT]) == 0
    return evidence_of(directory).evaluation.perplexity.nats_per_token


def swapped_experts(directory):
    """Experts 10 and 11 of layer 2 have changed places."""
    shard = directory / "model0-mp1.safetensors"
    tensors = load_file(shard)
    pairs = [(f"layers.2.ffn.experts.{a}.{w}.weight", f"layers.2.ffn.experts.{b}.{w}.weight")
             for a, b in ((10, 11), (11, 10)) for w in ("w1", "w2", "w3")]  # fmt: skip
    edit_file(shard, {to: tensors[source] for source, to in pairs}, index=False)


def no_yarn(directory):
    """RoPE as it is without YaRN."""
    manifest = directory / "manifest.json"
    edit_json(manifest, args=json.loads(manifest.read_text())["args"] | {"yarn": False})


def doubled_scale(directory):
    """One block of one FP8 weight is twice as large."""
    shard = directory / "model0-mp1.safetensors"
    scale = load_file(shard)["layers.2.ffn.experts.7.w2.scale"].clone()
    scale[1, 0] *= 2
    edit_file(shard, {"layers.2.ffn.experts.7.w2.scale": scale}, index=False)


@pytest.mark.parametrize(
    ("case", "break_it", "least_kl", "most_nats"),
    [
        ("tiny-v3", swapped_experts, 1e-2, 5e-3),
        ("tiny-v3", no_yarn, 1, 2),
        ("tiny-v3-fp8", doubled_scale, 1e-3, 5e-4),
    ],
)
def test_broken_shards_are_caught(
    case, break_it, least_kl, most_nats, shards, predictions, good_nats, command, tmp_path
):
    """Perplexity alone overlooks two of them: ``most_nats`` is how little it moves."""
    directory = shutil.copytree(shards(case, 1), tmp_path / "checkpoint")
    break_it(directory)
    status, evaluation, err = command(directory, *TEXT, f"--predictions={predictions}", LIMIT)
    assert status == 1
    assert "error: max_kl: " in err
    assert evidence_of(directory).state == "failed"
    assert evaluation["agreement"]["mean_kl"] > least_kl
    assert abs(evaluation["perplexity"]["nats_per_token"] - good_nats) < most_nats
    assert evaluation["agreement"]["top1"] < 1


def test_against_makes_its_reference_itself(shards, tmp_path, capfd):
    """From the FP8 source, and from other shards in another dtype; the temporary predictions are gone."""
    directory = shutil.copytree(shards("tiny-v3", 2), tmp_path / "checkpoint")
    (tmp_path / "scratch").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
        few = ("--device=cpu", "--max-tokens=90", "--window=40", "--against-tokens=50", LIMIT)
        assert evaluate.main([str(directory), *few, f"--against={TINY_V3}"]) == 0
        by_source = json.loads(capfd.readouterr().out)["agreement"]
        rounded = [*few[:-1], "--dtype=bfloat16", "--against-dtype=float32", f"--against={shards('tiny-v3', 1)}"]
        assert evaluate.main([str(directory), *rounded]) == 0
        by_shards = json.loads(capfd.readouterr().out)
    assert by_source["reference"]["kind"] == "transformers"
    assert (by_source["tokens"], len(by_source["windows"])) == (50, 2)
    assert by_source["mean_kl"] < GOOD
    assert (by_shards["compute"]["dtype"], by_shards["agreement"]["reference"]["dtype"]) == ("bfloat16", "float32")
    assert 1e-6 < by_shards["agreement"]["mean_kl"] < 1e-2
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_bad_reference_is_refused_before_the_checkpoint_loads(shards, tmp_path, capfd):
    broken = shutil.copytree(TINY_V3, tmp_path / "broken")
    edit_tensor(broken, "model.layers.1.self_attn.o_proj.weight", None)
    assert evaluate.main([str(shards("tiny-v3", 2)), *TEXT, f"--against={broken}"]) == 2
    assert "model.layers.1.self_attn.o_proj.weight" in capfd.readouterr().err
    assert evaluate.main([str(shards("tiny-v3", 2)), *TEXT, f"--against={tmp_path}"]) == 2
    assert "holds neither manifest.json nor config.json" in capfd.readouterr().err


def test_a_limit_on_agreement_needs_a_reference(shards, command):
    status, _, err = command(shards("tiny-v3", 1), *TEXT, "--min-agreement=0.9")
    assert status == 2
    assert "--min-agreement: needs a reference to agree with; give --against" in err


@pytest.mark.parametrize("shape", [(1, 7), (255, 5), (700, 33)])
def test_divergence_against_torch_distributions(shape):
    generator = torch.Generator().manual_seed(11)
    p, q = (9 * torch.randn(shape, generator=generator) for _ in range(2))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p.double()), torch.distributions.Categorical(logits=q.double())
    )
    assert torch.allclose(divergence(p, q), expected, rtol=1e-9, atol=1e-13)
    assert divergence(p, p + 3.0).abs().max() < 1e-9


def test_a_meter_over_windows_of_unequal_length(tmp_path):
    generator = torch.Generator().manual_seed(2)
    ids, vocabulary = list(range(24)), 24
    theirs, ours = (torch.randn(23, vocabulary, generator=generator) for _ in range(2))
    windows = plan_windows(len(ids), 9, 4)

    def stream(logits, some):
        return [(window, logits[window.scored - 1 : window.end - 1]) for window in some]

    some = plan_windows(19, 9, 4)
    write_predictions(tmp_path, Reference("shards", "r", "0", "float32"), ids[:19], (9, 4), 24, stream(theirs, some))
    predictions = read_predictions(tmp_path)
    check_predictions(predictions, ids, vocabulary, (9, 4))
    meter = AgreementMeter(predictions)
    for window, logits in stream(ours, windows):
        meter.add(window, logits)
    result, expected = meter.result(), divergence(theirs[:18], ours[:18]).numpy()
    assert result.tokens == 18
    assert result.mean_kl == pytest.approx(expected.mean(), rel=1e-12)
    assert result.p99_kl == pytest.approx(np.quantile(expected, 0.99), rel=1e-12)
    assert result.top1 == pytest.approx(float((theirs[:18].argmax(1) == ours[:18].argmax(1)).float().mean()))
    assert len(result.windows) == len(some)


@pytest.mark.parametrize(
    ("ids", "vocabulary", "sizes", "said"),
    [
        ([0, 1, 5, 3], 6, (4, 3), "its tokens differ from token 2 of the text on"),
        ([0, 1], 6, (4, 3), "its tokens differ from token 2 of the text on"),
        ([0, 1, 2, 3], 7, (4, 3), "has a vocabulary of 6, not of 7"),
        ([0, 1, 2, 3], 6, (4, 2), "window 4 and stride 3, not with 4 and 2"),
    ],
)
def test_predictions_of_something_else_are_refused(ids, vocabulary, sizes, said):
    predictions = Predictions(Reference("shards", "r", "0", "float32"), [0, 1, 2], 4, 3, np.zeros((2, 6)))
    with pytest.raises(InputError, match=said):
        check_predictions(predictions, ids, vocabulary, sizes)


def test_predictions_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(InputError, match="predictions.json"):
        read_predictions(tmp_path)
    logits = [(Window(0, 3, 1), torch.zeros(2, 4))]
    write_predictions(tmp_path, Reference("shards", "r", "0", "float32"), [0, 1, 2], (3, 2), 4, logits)
    (tmp_path / "logits.npy").write_bytes((tmp_path / "logits.npy").read_bytes()[:-4])
    with pytest.raises(InputError, match="holds no predictions of model.predict"):
        read_predictions(tmp_path)


def test_options_as_they_stand_on_a_command_line():
    given = {"max_kl": 0.0, "text": None, "speed": (1, 3), "none": (), "trust_remote_code": True, "only_report": False}
    assert as_arguments(given) == ["--max-kl=0.0", "--speed=1,3", "--trust-remote-code"]


def test_a_disk_without_room_is_refused_by_numbers(tmp_path):
    with pytest.raises(InputError, match=r"predictions of 999,999,999 tokens take 3,999,999,996,000,000 bytes"):
        check_room(tmp_path, 10**9, 10**6)
