"""The loss of a text against transformers', on one rank and on several, from shards of either kind."""

import json
import math

import pytest
import torch
from torch.nn import functional

from model.checkpoint.manifest import read_manifest
from model.errors import RunError
from model.evaluation.perplexity import summarise, window_loss
from model.evaluation.scoring import window_logits
from model.evaluation.text import BUNDLED, read_text
from model.evaluation.windows import Window, plan_windows
from model.launch import start_ranks
from model.load import load_model
from model.topology import Topology
from tests.model.oracle import ASSETS

NATS = 3.47490  # transformers in float32 after exact dequantisation: tests/assets/tiny-v3/README.md


def evaluated(checkpoint, mp, *options) -> dict:
    arguments = [str(checkpoint), "--device=cpu", *map(str, options)]
    done = start_ranks("model.evaluate", arguments, mp, timeout=200, capture=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("case", "mp"), [("tiny-v3", 1), ("tiny-v3", 2), ("tiny-v3", 4), ("tiny-v3-fp8", 2)])
def test_the_value_of_transformers_on_every_number_of_ranks(case, mp, shards):
    evaluation = evaluated(shards(case, mp), mp, "--max-tokens=3072", "--window=512", "--stride=511", "--batch=3")
    loss = evaluation["perplexity"]
    assert loss["nats_per_token"] == pytest.approx(NATS, abs=2e-5)
    assert (loss["tokens"], len(loss["windows"]), loss["windows"][-1]["tokens"]) == (3072, 7, 6)
    assert loss["perplexity"] == pytest.approx(math.exp(loss["nats_per_token"]))
    assert evaluation["compute"] == {
        "device": "cpu", "dtype": "float32", "fp8": False, "attention": "absorbed", "mp": mp, "batch": 3,
    }  # fmt: skip


def test_windows_that_overlap_against_transformers(shards, oracle_checkpoint):
    from transformers import AutoModelForCausalLM

    directory = shards("tiny-v3", 1)
    manifest = read_manifest(directory)
    text = read_text(None, directory, manifest.args, max_tokens=301)
    windows = plan_windows(len(text.ids), 101, 37)
    model = load_model(directory, manifest, Topology(), torch.device("cpu"))
    losses = [window_loss(w, logits, text.ids) for w, logits in window_logits(model, text.ids, windows, 4)]
    actual = summarise(losses, window=101, stride=37, size=text.record.bytes)

    theirs = AutoModelForCausalLM.from_pretrained(oracle_checkpoint, dtype=torch.float32).eval()
    total, before = 0.0, 1
    for start in range(0, 223, 37):
        ids = torch.tensor([text.ids[start : start + 101]])
        with torch.inference_mode():
            logits = theirs(ids).logits[0, :-1]
        token_losses = functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total += float(token_losses[before - start - 1 :].sum())
        before = start + ids.shape[1]
    assert before == 302
    assert actual.nats_per_token == pytest.approx(total / 301, abs=2e-5)
    assert actual.bits_per_byte == pytest.approx(total / math.log(2) / text.record.bytes, abs=2e-5)


def test_the_bytes_are_those_of_the_tokens(shards):
    directory = shards("tiny-v3", 1)
    args = read_manifest(directory).args
    assert BUNDLED.read_bytes() == (ASSETS / "macbeth-slice.txt").read_bytes()
    assert read_text(None, directory, args, max_tokens=None).record.bytes == 12000
    from transformers import AutoTokenizer

    few = read_text(None, directory, args, max_tokens=50)
    tokens = AutoTokenizer.from_pretrained(directory)
    covered = BUNDLED.read_bytes()[: few.record.bytes].decode()
    assert few.ids == [tokens.bos_token_id, *tokens.encode(covered, add_special_tokens=False)]
    assert len(few.ids) == 51


def test_a_loss_that_is_not_finite_names_its_tokens():
    logits = torch.zeros(3, 8)
    logits[1, 2] = torch.nan
    with pytest.raises(RunError, match="tokens 5 to 8: their loss is nan"):
        window_loss(Window(0, 8, 5), logits, [0] * 8)
