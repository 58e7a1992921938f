"""The speed's own arithmetic; how fast anything is, is not asserted."""

import pytest
import torch

from model.checkpoint.manifest import read_manifest
from model.errors import InputError
from model.evaluation.speed import measure_speed, prompt_and_new, prompts
from model.load import load_model
from model.topology import Topology


def test_each_batch_size_has_its_row(shards, monkeypatch):
    directory = shards("tiny-v3", 1)
    model = load_model(directory, read_manifest(directory), Topology(), torch.device("cpu"))
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    speeds = measure_speed(model, [0, 5, 7, 11, 13], (1, 3))
    assert [(s.batch, s.prompt_tokens, s.new_tokens) for s in speeds] == [(1, 128, 32), (3, 128, 32)]
    assert [(s.prefill_tokens_per_s, s.decode_tokens_per_s) for s in speeds] == [(128, 32), (384, 96)]


def test_prompts_go_on_where_the_last_one_ended():
    assert prompts([1, 2, 3, 4, 5], 2, 4).tolist() == [[1, 2, 3, 4], [5, 1, 2, 3]]
    assert prompts(range(100), 2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("context", [2, 3, 7, 130, 512, 10**6])
def test_prompt_and_new_tokens_fit_the_context(context):
    prompt, new = prompt_and_new(context)
    assert min(prompt, new) >= 1
    assert prompt + new <= context
    assert (prompt, new) == (128, 32) or context < 160


def test_a_context_of_one_is_refused():
    with pytest.raises(InputError, match="context of 1 is too short"):
        prompt_and_new(1)
