"""Argmax, the distribution of draws, and exactly which tokens top-k and top-p leave."""

import pytest
import torch

from model.errors import InputError
from model.sampling import Sampling, choose, limited

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def drawn(draws: int, logits: torch.Tensor = LOGITS, **how) -> torch.Tensor:
    """Frequencies of the tokens over many draws at once."""
    sampling = Sampling(seed=11, **how)
    tokens = choose(logits.expand(draws, -1), sampling, sampling.generator(torch.device("cpu")))
    return torch.bincount(tokens, minlength=len(logits)) / draws


def test_temperature_zero_is_argmax():
    sampling = Sampling(temperature=0, top_k=1, top_p=0.1, seed=1)
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    assert choose(logits, sampling, sampling.generator(torch.device("cpu"))).tolist() == [1, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_the_scaled_logits(temperature):
    draws = 40_000
    expected = (LOGITS / temperature).softmax(-1)
    error = (drawn(draws, temperature=temperature) - expected).abs()
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert (error <= 4 * deviation).all(), f"{error / deviation} standard deviations"


@pytest.mark.parametrize(
    ("how", "support"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 2}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.7}, {1, 3}),
        ({"top_p": 0.93}, {1, 3, 2}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 2, "top_p": 0.99}, {1, 3}),
        ({"top_k": 2, "top_p": 0.7}, {1}),
    ],
)
def test_draws_have_exactly_this_support(how, support):
    """Probabilities are 0.03, 0.64, 0.09, 0.23, 0.01; top-p counts what top-k left: 0.73 and 0.27 of two."""
    frequencies = drawn(20_000, temperature=1.0, **how)
    assert set(frequencies.nonzero().flatten().tolist()) == support


def test_temperature_comes_before_top_p():
    assert set(drawn(20_000, temperature=3.0, top_p=0.5).nonzero().flatten().tolist()) == {1, 3}


def test_top_k_keeps_exactly_k_of_equal_tokens():
    kept = limited(torch.zeros(2, 7), top_k=3, top_p=1.0)
    assert kept.isfinite().sum(-1).tolist() == [3, 3]


def test_what_is_kept_keeps_its_logit():
    kept = limited(LOGITS[None], top_k=2, top_p=1.0)[0]
    assert kept.tolist() == [-torch.inf, 3.0, -torch.inf, 2.0, -torch.inf]


def test_a_seed_makes_draws_repeatable_and_none_does_not():
    logits = torch.zeros(1, 10_000).expand(16, -1)

    def draw(seed: int | None) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        return choose(logits, sampling, sampling.generator(torch.device("cpu"))).tolist()

    assert draw(3) == draw(3) != draw(4)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-38, 1e-45, 5e-324])
def test_the_tiniest_temperature_is_argmax(temperature, limits):
    logits = 100 * LOGITS
    assert drawn(1000, logits, temperature=temperature, **limits).tolist() == [0, 1, 0, 0, 0]
    assert drawn(1000, -logits, temperature=temperature, **limits).tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_every_seed_that_is_accepted_works(seed):
    assert Sampling(seed=seed).generator(torch.device("cpu")).initial_seed() == seed % 2**64


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"temperature": float("nan")}, "temperature nan is not a finite number"),
        ({"temperature": float("inf")}, "temperature inf is not a finite number"),
        ({"temperature": float("-inf")}, "temperature -inf is not a finite number"),
        ({"top_p": float("nan")}, "top_p nan is not above 0 and at most 1; 1 keeps every token"),
        ({"seed": 2**64}, f"seed {2**64} is not within torch's range, -2**63 to 2**64 - 1"),
        ({"seed": -(2**63) - 1}, f"seed {-(2**63) - 1} is not within torch's range, -2**63 to 2**64 - 1"),
    ],
)
def test_values_that_torch_cannot_take_are_named(how, problem):
    with pytest.raises(InputError) as caught:
        Sampling(**how)
    assert caught.value.problems == (problem,)


def test_impossible_values_are_named():
    with pytest.raises(InputError) as caught:
        Sampling(temperature=-1, top_k=-2, top_p=0)
    assert [problem.split()[0] for problem in caught.value.problems] == ["temperature", "top_k", "top_p"]
