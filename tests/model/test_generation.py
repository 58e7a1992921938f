"""The loop's rules, on a scripted model: who is finished when, what is cut, what overrides what."""

import pytest
import torch

from model.args import ModelArgs
from model.errors import InputError
from model.generation import generate
from model.sampling import Sampling
from model.topology import Topology

EOS, END = 1, 9


class Scripted:
    """Wants to say ``script[row][position]`` at each position, and notes the calls it gets."""

    def __init__(self, script: list[list[int]], **sizes) -> None:
        self.args = ModelArgs(vocab_size=10, **sizes)
        self.topology = Topology()
        self.device = torch.device("cpu")
        self.script = torch.tensor(script)
        self.calls: list[tuple[int, list[list[int]]]] = []
        self.caches: list[tuple[int, int]] = []

    def new_cache(self, batch: int, capacity: int) -> tuple[int, int]:
        self.caches.append((batch, capacity))
        return batch, capacity

    def __call__(self, tokens: torch.Tensor, start: int, cache: tuple[int, int]) -> torch.Tensor:
        assert cache == self.caches[-1]
        assert (tokens >= 0).all(), "padding reached the model"
        self.calls.append((start, tokens.tolist()))
        wanted = self.script[:, start + tokens.shape[1]]
        return torch.nn.functional.one_hot(wanted, 10).float()


def complete(model: Scripted, prompts: list[list[int]], eos=(EOS,), **options) -> list[list[int]]:
    sampling = Sampling()
    options = {"max_new_tokens": 8} | options
    return generate(model, prompts, eos=eos, sampling=sampling, generator=sampling.generator(model.device), **options)


def test_completion_is_cut_at_its_first_eos():
    model = Scripted([[0, 0, 0, 5, 6, EOS, 7, 7, 7, 7, 7, 7]])
    assert complete(model, [[2, 3, 4]]) == [[5, 6]]
    assert [start for start, _ in model.calls] == [0, 3, 4]


def test_any_of_several_eos_ends_it():
    model = Scripted([[0, 5, END, 7, 7, 7, 7, 7, 7, 7]])
    assert complete(model, [[2]], eos=(EOS, END)) == [[5]]


def test_completion_may_be_empty():
    assert complete(Scripted([[0, EOS, 7, 7, 7, 7, 7, 7, 7, 7]]), [[2]]) == [[]]


def test_at_most_max_new_tokens_for_each_prompt():
    model = Scripted([[7] * 12, [8] * 12])
    assert complete(model, [[2], [2, 3, 4]], max_new_tokens=4) == [[7] * 4, [8] * 4]
    assert model.caches == [(2, 7)]


def test_prompt_positions_override_what_was_sampled():
    """While the shorter prompt is completed, the longer one is still being read."""
    model = Scripted([[7, 7, 5, 6, 5, EOS, 7], [7, 7, 7, 7, 8, 8, EOS]])
    assert complete(model, [[2, 3], [2, 3, 4, 2]]) == [[5, 6, 5], [8, 8]]
    assert model.calls[:3] == [(0, [[2, 3], [2, 3]]), (2, [[5], [4]]), (3, [[6], [2]])]


def test_eos_inside_a_prompt_finishes_nothing():
    """Neither one that the prompt holds, nor one that the model wants where the prompt goes on."""
    model = Scripted([[7, 7, 5, 5, EOS, 7, 7], [EOS, EOS, EOS, EOS, 8, EOS, 7]])
    assert complete(model, [[2, 3], [2, EOS, EOS, 4]]) == [[5, 5], [8]]


def test_stops_early_only_when_all_are_finished():
    model = Scripted([[7, EOS, 7, 7, 7, 7, 7], [7, 8, 8, 8, EOS, 7, 7]])
    assert complete(model, [[2], [3]]) == [[], [8, 8, 8]]
    assert len(model.calls) == 4


def test_completion_ends_where_the_context_does():
    model = Scripted([[7] * 9], max_seq_len=6)
    assert complete(model, [[2, 3, 4, 2]]) == [[7, 7]]
    assert model.caches == [(1, 6)]


def test_on_token_sees_exactly_the_completions_as_they_come():
    seen: list[tuple[int, int]] = []
    model = Scripted([[7, 5, EOS, 7, 7], [7, 7, 8, 6, EOS]])
    complete(model, [[2], [3, 4]], on_token=lambda prompt, token: seen.append((prompt, token)))
    assert seen == [(0, 5), (1, 8), (1, 6)]


def test_prompts_that_cannot_be_completed_are_named():
    model = Scripted([[7] * 9] * 5, max_seq_len=4)
    with pytest.raises(InputError) as caught:
        complete(model, [[2], [], [2, 10], [2] * 4, [-1]], max_new_tokens=0)
    assert caught.value.problems == (
        "max_new_tokens 0 is below 1",
        "prompt 2: is empty",
        "prompt 3: token id 10 is outside the model's vocabulary of 10; the tokenizer belongs to another model",
        "prompt 4: its 4 tokens leave no room in the model's context of 4; shorten it",
        "prompt 5: token id -1 is outside the model's vocabulary of 10; the tokenizer belongs to another model",
    )
    with pytest.raises(InputError, match="no prompt was given"):
        complete(model, [])
