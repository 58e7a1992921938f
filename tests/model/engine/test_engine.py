"""The engine gives what the simple path gives, whoever else is in the batch; its weights are on the device once."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from model.checkpoint.manifest import read_manifest
from model.engine.engine import Engine, Limits, load_engine
from model.engine.generation import generate
from model.engine.pages import pages_for
from model.engine.weights import MoEWeights
from model.errors import InputError
from model.generation import generate as generate_simply
from model.load import load_model
from model.sampling import Sampling
from model.topology import Topology
from tests.model.oracle import CASES

CPU = torch.device("cpu")
GREEDY = Sampling()
LIMITS = Limits(batch=8, context=256)


def engine_of(directory, limits=LIMITS, **how) -> Engine:
    return load_engine(directory, read_manifest(directory), Topology(), CPU, limits, **how)


def simple_of(directory, **how):
    return load_model(directory, read_manifest(directory), Topology(), CPU, **how)


def some_prompts(vocabulary, lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("case", [*CASES, "tiny-v3"])
def test_greedy_replies_equal_the_simple_path_s(case, shards):
    """Prompts of a token, of a page and one more, and of different lengths in one batch."""
    engine, model = engine_of(shards(case, 1)), simple_of(shards(case, 1))
    prompts = some_prompts(model.args.vocab_size, [1, 63, 64, 65, 7])
    how = {"max_new_tokens": 20, "eos": [1], "sampling": GREEDY}
    expected = generate_simply(model, prompts, generator=GREEDY.generator(CPU), **how)
    assert generate(engine, prompts, generator=GREEDY.generator(CPU), **how) == expected
    assert generate(engine, prompts[::-1], generator=GREEDY.generator(CPU), **how) == expected[::-1]
    assert engine.pages.free == engine.limits.total_pages


@pytest.mark.parametrize("case", CASES)
def test_logits_of_prompts_and_of_steps_are_the_simple_path_s(case, shards):
    engine, model = engine_of(shards(case, 1)), simple_of(shards(case, 1))
    ids = some_prompts(model.args.vocab_size, [90])[0]
    expected = model(torch.tensor([ids]), 0, model.new_cache(1, 90), all_positions=True)[0]
    actual = [engine.join([ids[:60]], [40])[0]]
    for token in ids[60:]:
        engine.choose(torch.tensor([token]))
        actual.append(engine.step()[0])
    difference = (torch.stack(actual) - expected[59:]).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


def test_sampled_replies_are_repeatable_and_end_before_the_end_token(shards):
    engine = engine_of(shards("tiny-v3", 1))
    sampling = Sampling(temperature=1.0, top_k=20, seed=7)
    prompts = some_prompts(1500, [5, 30])
    how = {"max_new_tokens": 30, "sampling": sampling}
    first = generate(engine, prompts, eos=[1], generator=sampling.generator(CPU), **how)
    assert generate(engine, prompts, eos=[1], generator=sampling.generator(CPU), **how) == first
    ended = generate(engine, prompts, eos=[first[0][3]], generator=sampling.generator(CPU), **how)
    assert ended[0] == first[0][: first[0].index(first[0][3])]


def test_sequences_join_and_leave_at_any_step(shards):
    """Each gets the tokens that it gets alone; the last row takes the place of one that leaves."""
    engine = engine_of(shards("tiny-v3", 1))
    prompts = some_prompts(1500, [40, 3, 64])
    how = {"max_new_tokens": 12, "eos": [], "sampling": GREEDY, "generator": GREEDY.generator(CPU)}
    alone = [generate(engine, [prompt], **how)[0] for prompt in prompts]

    rows, texts = [], {}

    def join(number):
        logits = engine.join([prompts[number]], [12])
        rows.append(number)
        texts[number] = [int(logits.argmax())]

    def step():
        engine.choose(torch.tensor([texts[number][-1] for number in rows]))
        for number, token in zip(rows, engine.step().argmax(dim=-1).tolist(), strict=True):
            texts[number].append(token)

    def leave(number):
        row = rows.index(number)
        engine.leave(row)
        rows[row] = rows[-1]
        rows.pop()

    join(0)
    step()
    join(1)
    step()
    step()
    join(2)
    step()
    leave(0)
    step()
    step()
    leave(2)
    step()
    join(0)
    assert texts[1] == alone[1][: len(texts[1])]
    assert texts[2] == alone[2][: len(texts[2])]
    assert texts[0] == alone[0][:1]
    assert len(texts[1]) == 7


def test_one_sequence_ends_at_the_context_while_another_goes_on(shards):
    """Its row is stepped with the others until it leaves, and must not run past its pages."""
    model, engine = simple_of(shards("tiny-v3", 1)), engine_of(shards("tiny-v3", 1), Limits(batch=2, context=200))
    prompts = some_prompts(1500, [10, 195])
    how = {"eos": [], "sampling": GREEDY, "generator": GREEDY.generator(CPU)}
    replies = generate(engine, prompts, max_new_tokens=100, **how)
    assert [len(reply) for reply in replies] == [100, 5]
    assert replies[0] == generate_simply(model, prompts[:1], max_new_tokens=100, **how)[0]
    assert replies[1] == generate_simply(model, prompts[1:], max_new_tokens=5, **how)[0]


def test_rows_without_a_sequence_stay_where_they_are(shards):
    """A graph steps more rows than there are sequences."""
    engine = engine_of(shards("tiny-v3", 1), Limits(batch=4, context=64))
    engine.join([[5, 6, 7]], [60])
    for _ in range(70):
        engine._step(4)
    assert engine.rows.positions.tolist() == [63, 0, 0, 0]


def test_memory_follows_use_and_is_asked_first(shards):
    engine = engine_of(shards("tiny-v3", 1), Limits(batch=2, context=256, pages=3))
    assert engine.fits(100, 28)
    assert not engine.fits(100, 93)  # 193 positions are four pages
    assert not engine.fits(200, 57)  # longer than the context
    engine.join([list(range(2, 102))], [28])
    assert engine.pages.free == 1
    assert engine.fits(60, 4)
    assert not engine.fits(60, 5)
    engine.join([[5]], [1])
    assert not engine.fits(1, 1)  # no row, and no page
    engine.leave(0)
    assert engine.pages.free == 2


def test_a_prompt_that_cannot_be_completed_is_refused(shards):
    engine = engine_of(shards("tiny-v3", 1))
    with pytest.raises(InputError, match="prompt 2: is empty"):
        generate(engine, [[5], []], max_new_tokens=1, eos=[], sampling=GREEDY, generator=GREEDY.generator(CPU))


@pytest.mark.parametrize(("case", "fp8"), [("tiny-v3", None), ("tiny-v3-fp8", True), ("v2-lite", None)])
def test_every_weight_is_there_once(case, fp8, shards):
    """Stacks and parameters are the same memory, and FP8 stays FP8."""
    engine = engine_of(shards(case, 1), fp8=fp8)
    parameters = dict(engine.model.named_parameters())
    pieces = sorted((p.data_ptr(), p.numel() * p.element_size()) for p in parameters.values())
    assert all(first + size <= second for (first, size), (second, _) in pairwise(pieces))
    layer = engine.forward.layers[-1]
    assert isinstance(layer.ffn, MoEWeights)
    assert layer.attention.first[0].weight.data_ptr() in dict(pieces)
    stacks = [layer.ffn.experts.gate_up, layer.ffn.experts.down]
    for stack in stacks:
        begin, end = stack.data_ptr(), stack.data_ptr() + stack.numel() * stack.element_size()
        assert sum(size for place, size in pieces if begin <= place < end) == end - begin
        assert (stack.dtype == torch.float8_e4m3fn) == bool(fp8)


def test_limits_count_pages():
    assert [pages_for(positions) for positions in (1, 63, 64, 65, 192, 576)] == [1, 1, 1, 2, 3, 9]
    assert Limits(batch=3, context=100).total_pages == 6
    assert replace(Limits(), pages=5).total_pages == 5
