"""transformers in float32 is the oracle: equal logits and equal greedy text, on 1, 2 and 4 ranks, in both forms."""

import pytest
import torch

from model.args import ModelArgs
from model.attention import ATTENTION
from model.checkpoint.manifest import read_manifest
from model.load import load_model
from model.topology import Topology
from tests.model.conftest import WEIGHTS
from tests.model.parity_ranks import FEW

TOLERANCE = 1e-5  # of the largest logit

each_case = pytest.mark.parametrize("case", WEIGHTS)
each_mp = pytest.mark.parametrize("mp", [1, 2, 4])
each_form = pytest.mark.parametrize("form", ATTENTION)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@each_form
@each_mp
@each_case
@pytest.mark.parametrize("how", ["at-once", "by-step"])
def test_logits_equal_transformers(case, mp, form, how, oracle, computed):
    actual = computed(mp).logits[f"{case}/{form}/{how}"]
    assert relative_error(actual, oracle[case].logits) <= TOLERANCE


@each_form
@each_mp
@each_case
def test_greedy_continuations_equal_transformers(case, mp, form, oracle, computed):
    """Prompts of 1, 4 and 7 tokens in one batch, each compared with transformers on that prompt alone."""
    assert computed(mp).completions[f"{case}/{form}/together"] == oracle[case].continuations


@each_form
@each_case
def test_each_prompt_alone_equals_the_batch(case, form, computed):
    completions = computed(1).completions
    together = [tokens[:FEW] for tokens in completions[f"{case}/{form}/together"]]
    assert completions[f"{case}/{form}/alone"] == together


@each_form
@pytest.mark.parametrize("mp", [2, 4])
def test_draws_are_the_same_on_any_number_of_ranks(mp, form, computed):
    key = f"tiny-v3/{form}/drawn"
    one_rank = computed(1).completions
    assert computed(mp).completions[key] == one_rank[key]
    assert one_rank[key] != [tokens[:FEW] for tokens in one_rank[f"tiny-v3/{form}/together"]]


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("v3", {"yarn": False}),
        ("v3", {"mscale": 0.9}),
        ("v3", {"rope_factor": 9.0}),
        ("v3", {"norm_topk_prob": False}),
        ("v3", {"n_limited_groups": 3}),
        ("v3", {"n_expert_groups": 1, "n_limited_groups": 1}),
        ("v3", {"route_scale": 2.4}),
        ("v3", {"norm_eps": 1e-5}),
        ("v3-eps-1e-5", {"norm_eps": 1e-6}),
        ("v3-no-yarn", {"rope_theta": 10000.0}),
        ("v2-groups", {"score_func": "sigmoid"}),
        ("v2-groups", {"n_limited_groups": 3}),
        ("v2-lite", {"mscale": 1.0}),
    ],
)
def test_the_oracle_would_see_a_wrong_rule(case, wrong, oracle, shards):
    """Each rule of the config matters on these checkpoints by far more than the tolerance."""
    assert relative_error(logits_with(case, wrong, oracle, shards), oracle[case].logits) > 3 * TOLERANCE


def test_the_oracle_would_see_another_eps_in_the_latent_norms(oracle, shards, monkeypatch):
    monkeypatch.setattr("model.attention.LATENT_NORM_EPS", 1e-5)
    actual = logits_with("v3-eps-1e-5", {}, oracle, shards)
    assert relative_error(actual, oracle["v3-eps-1e-5"].logits) > 3 * TOLERANCE


def logits_with(case: str, changes: dict, oracle, shards) -> torch.Tensor:
    directory = shards(case, 1)
    manifest = read_manifest(directory)
    model = load_model(directory, manifest, Topology(), torch.device("cpu"))
    args: ModelArgs = manifest.args.replace(**changes)
    changed = type(model)(args, model.execution)
    changed.load_state_dict(model.state_dict())
    tokens = torch.tensor(oracle[case].tokens)
    return changed(tokens, 0, changed.new_cache(*tokens.shape), all_positions=True)
