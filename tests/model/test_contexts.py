"""tiny-v3 on real text at the edges: the end of its context, and prompts of very unequal length in one batch."""

import pytest
import torch

from model.checkpoint.manifest import read_manifest
from model.errors import InputError
from model.generation import generate
from model.load import load_model
from model.sampling import Sampling
from model.topology import Topology
from tests.model.oracle import ASSETS

CONTEXT = 512


@pytest.fixture(scope="module")
def transformers_model(oracle_checkpoint):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(oracle_checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def text(oracle_checkpoint) -> list[int]:
    """The ids of a passage, as long as the context."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(oracle_checkpoint)
    passage = (ASSETS / "macbeth-slice.txt").read_text(encoding="utf-8")[:4000]
    return [tokenizer.bos_token_id, *tokenizer.encode(passage, add_special_tokens=False)][:CONTEXT]


@pytest.fixture(scope="module", params=["naive", "absorbed"])
def complete(request, shards):
    """``complete(prompts, max_new_tokens)``: the greedy completions, with no EOS."""
    checkpoint = shards("tiny-v3", 1)
    manifest = read_manifest(checkpoint)
    model = load_model(checkpoint, manifest, Topology(), torch.device("cpu"), attention=request.param)
    sampling = Sampling()

    def run(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        generator = sampling.generator(model.device)
        return generate(model, prompts, max_new_tokens=max_new_tokens, eos=(), sampling=sampling, generator=generator)

    return run


def greedy(model, prompt: list[int], new_tokens: int) -> list[int]:
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    return ids[0, len(prompt) :].tolist()


def test_the_last_positions_of_the_context(complete, text, transformers_model):
    assert len(text) == CONTEXT
    for length in (CONTEXT - 1, CONTEXT - 3):
        prompt = text[:length]
        assert complete([prompt], 8) == [greedy(transformers_model, prompt, CONTEXT - length)]


def test_a_prompt_that_fills_the_context_is_refused(complete, text):
    with pytest.raises(InputError, match="prompt 2: its 512 tokens leave no room in the model's context of 512"):
        complete([text[:-1], text], 8)


def test_a_token_beside_a_long_prompt(complete, text, transformers_model):
    prompts = [text[:1], text[100:300]]
    assert [len(prompt) for prompt in prompts] == [1, 200]
    expected = [greedy(transformers_model, prompt, 16) for prompt in prompts]
    assert complete(prompts, 16) == expected
    assert complete(prompts[::-1], 16) == expected[::-1]
