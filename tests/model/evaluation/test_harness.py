"""lm-evaluation-harness on a checkpoint: by its own entry points on local tasks, against transformers."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from model import evaluate, harness
from model.checkpoint.manifest import read_manifest
from model.errors import InputError
from model.evaluation.harness import ShardflowLM, _Wish
from model.evaluation.record import evidence_of
from model.evaluation.teamwork import Completing
from model.launch import start_ranks
from model.load import load_model
from model.prompts import eos_ids, load_tokens
from model.sampling import Sampling
from model.topology import Topology
from tests.model.oracle import ASSETS

TASKS = ASSETS / "harness"


@pytest.fixture(scope="module", autouse=True)
def _at_the_tasks(tmp_path_factory):
    """The tasks name their files by relative paths; nothing is asked of a hub, nor left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(TASKS)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture(scope="module")
def lm(shards) -> ShardflowLM:
    directory = shards("tiny-v3", 1)
    model = load_model(directory, read_manifest(directory), Topology(), torch.device("cpu"))
    return ShardflowLM(model, load_tokens(directory), eos_ids(directory))


@pytest.fixture(scope="module")
def evaluated(lm) -> dict:
    """The three tasks through the harness's own ``simple_evaluate``."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS))
    names = ["macbeth_choice", "macbeth_reply", "macbeth_text"]
    return simple_evaluate(model=lm, tasks=names, task_manager=manager, log_samples=True)


@pytest.fixture(scope="module")
def theirs(oracle_checkpoint) -> SimpleNamespace:
    """The oracle's tokenizer and model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(oracle_checkpoint, dtype=torch.float32).eval()
    return SimpleNamespace(model=model, tokens=AutoTokenizer.from_pretrained(oracle_checkpoint))


def continued(theirs, context: str, continuation: str) -> float:
    """Log-likelihood of ``continuation`` by the oracle, alone in its batch."""
    bos = theirs.tokens.bos_token_id
    before = [bos, *theirs.tokens.encode(context.rstrip(), add_special_tokens=False)]
    whole = [bos, *theirs.tokens.encode(context + continuation, add_special_tokens=False)]
    with torch.inference_mode():
        likely = theirs.model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(likely[i - 1, whole[i]]) for i in range(len(before), len(whole)))


def test_multiple_choice_against_transformers(evaluated, theirs):
    samples = sorted(evaluated["samples"]["macbeth_choice"], key=lambda sample: sample["doc_id"])
    assert len(samples) == 24
    right = []
    for sample in samples:
        doc = sample["doc"]
        expected = [continued(theirs, f"{doc['line']}\n\n", choice) for choice in doc["choices"]]
        actual = [response[0][0] for response in sample["resps"]]
        assert actual == pytest.approx(expected, abs=1e-3), doc["line"]
        right.append(expected.index(max(expected)) == doc["answer"])
    assert evaluated["results"]["macbeth_choice"]["acc,none"] == pytest.approx(sum(right) / 24)


def test_generation_against_transformers(evaluated, theirs):
    samples = evaluated["samples"]["macbeth_reply"]
    assert len(samples) == 7
    for sample in samples:
        ids = [theirs.tokens.bos_token_id, *theirs.tokens.encode(sample["doc"]["line"], add_special_tokens=False)]
        output = theirs.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        text = theirs.tokens.decode(output[0, len(ids) :], skip_special_tokens=True)
        assert sample["resps"] == [[text.split(".")[0]]], sample["doc"]["line"]
    assert any(sample["resps"][0][0].strip() for sample in samples)


def test_the_harness_s_perplexity_is_the_project_s(evaluated, shards, tmp_path):
    directory = shutil.copytree(shards("tiny-v3", 1), tmp_path / "checkpoint")
    nats = size = 0.0
    for number, line in enumerate((TASKS / "text.jsonl").read_text(encoding="utf-8").splitlines()):
        text = tmp_path / f"{number}.txt"
        text.write_text(json.loads(line)["text"], encoding="utf-8")
        assert evaluate.main([str(directory), f"--text={text}", "--device=cpu"]) == 0
        loss = evidence_of(directory).evaluation.perplexity
        nats, size = nats + loss.nats_per_token * loss.tokens, size + text.stat().st_size
        [sample] = [s for s in evaluated["samples"]["macbeth_text"] if s["doc_id"] == number]
        assert sample["resps"][0][0] == pytest.approx(-loss.nats_per_token * loss.tokens, rel=1e-9)
    results = evaluated["results"]["macbeth_text"]
    assert results["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / size, rel=1e-9)
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(nats / size), rel=1e-9)


def test_its_own_command_line_on_two_ranks(evaluated, shards, tmp_path):
    """The harness's arguments stand after ``--``; only rank 0 speaks."""
    own = ["--tasks", "macbeth_choice,macbeth_reply,macbeth_text", "--include_path", ".", "--output_path", tmp_path]
    arguments = [str(shards("tiny-v3", 2)), "--device=cpu", "--batch=5", "--", *map(str, own)]
    done = start_ranks("model.harness", arguments, 2, timeout=200, capture=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("|macbeth_choice|") == 1
    [path] = tmp_path.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    for task, figures in evaluated["results"].items():
        for name, value in figures.items():
            if isinstance(value, float) and name.endswith(",none"):
                assert results[task][name] == pytest.approx(value, rel=1e-5), (task, name)


def test_the_harness_s_own_refusal_ends_all_ranks(shards):
    arguments = [str(shards("tiny-v3", 2)), "--device=cpu", "--", "--tasks", "no_such_task"]
    done = start_ranks("model.harness", arguments, 2, timeout=100, capture=True)
    assert done.returncode != 0
    assert "no_such_task" in done.stderr


def request(*args):
    return SimpleNamespace(args=args)


def test_a_greedy_continuation_is_known_as_one(lm):
    [ids] = Completing([lm.tok_encode("When shall")], 6, frozenset(), Sampling()).on(lm.model)
    prompt = lm.tok_encode("When shall")
    greedy = (("", ""), prompt, ids)
    other = (("", ""), prompt, [*ids[:-1], (ids[-1] + 1) % 1536])
    (likely, yes), (unlikely, no) = lm._loglikelihood_tokens([greedy, other])
    assert (yes, no) == (True, False)
    assert likely > unlikely


def test_a_context_that_is_too_long_loses_its_beginning(lm):
    prompt = lm.tok_encode("a b c d " * 400)
    [(long, _)] = lm._loglikelihood_tokens([(("", ""), prompt, [7, 8])])
    [(cut, _)] = lm._loglikelihood_tokens([(("", ""), prompt[-511:], [7, 8])])
    assert long == pytest.approx(cut, rel=1e-6)
    [text] = lm.generate_until([request("a b c d " * 400, {"until": ["x"], "max_gen_toks": 3})])
    [same] = lm.generate_until([request("a b c d " * 900, {"until": ["x"], "max_gen_toks": 3})])
    assert text == same


def test_every_text_begins_with_one_bos(lm):
    assert lm.tok_encode("Who's there?")[0] == lm.prefix_token_id
    assert lm.prefix_token_id not in lm.tok_encode("Who's there?", add_special_tokens=False)
    chat = lm.apply_chat_template([{"role": "user", "content": "Who's there?"}])
    assert lm.tok_encode(chat).count(lm.prefix_token_id) == 1
    assert lm.tok_encode(chat) == lm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who's there?"}], add_generation_prompt=True, return_dict=False
    )


def test_requests_are_answered_in_their_own_order(lm):
    wishes = [{"until": [","], "max_gen_toks": 9}, {"until": ["\n"], "max_gen_toks": 5}]
    requests = [
        request(text, wishes[i % 2]) for i, text in enumerate(("Enter", "Who", "What bloody man", "Hail", "So"))
    ]
    together = lm.generate_until(requests)
    assert together == [lm.generate_until([one])[0] for one in requests]


@pytest.mark.parametrize(
    ("given", "wish"),
    [
        ({"until": "x", "max_gen_toks": 5}, _Wish(5, Sampling(), ("x",))),
        ({"until": ["", "b"]}, _Wish(256, Sampling(), ("b",))),
        (
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "seed": 3, "max_new_tokens": 7},
            _Wish(7, Sampling(temperature=0.5, top_p=0.9, seed=3), ()),
        ),
    ],
)
def test_what_a_task_asks_of_a_completion(given, wish):
    assert _Wish.of(given) == wish


def test_an_argument_that_would_be_passed_over_is_refused():
    with pytest.raises(InputError, match="not implemented: num_beams"):
        _Wish.of({"until": [], "num_beams": 4})


def test_without_the_extra_it_is_named(shards, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert harness.main([str(shards("tiny-v3", 1)), "--device=cpu"]) == 2
    assert "pip install 'shardflow[eval]'" in capsys.readouterr().err
