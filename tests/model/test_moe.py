"""The gate's rules on scores chosen by hand, and the sum over the experts of several ranks."""

import pytest
import torch

from model.args import ModelArgs
from model.layers import Execution
from model.moe import Gate, MoE, local_experts
from model.topology import Topology

SIZES = {"dim": 8, "n_routed_experts": 8, "n_activated_experts": 2, "moe_inter_dim": 4, "n_shared_experts": 1}
EXECUTION = Execution(Topology(), torch.device("cpu"), torch.float32)


def routed(logits: list[float], bias: list[float] | None = None, **rules) -> dict[int, float]:
    """Expert and weight that one token gets whose router logits are ``logits``."""
    args = ModelArgs(**SIZES, gate_bias=bias is not None, **rules)
    gate = Gate(args, EXECUTION)
    with torch.no_grad():
        gate.weight.copy_(torch.diag(torch.tensor(logits)))
        if bias is not None:
            gate.bias.copy_(torch.tensor(bias))
        weights, indices = gate(torch.ones(1, 8))
    assert weights.dtype == torch.float32
    return dict(zip(indices[0].tolist(), weights[0].tolist(), strict=True))


LOGITS = [0.9, 0.1, 0.6, 0.6, 0.8, -3.0, 0.5, 0.5]


def test_softmax_takes_the_best_and_does_not_normalise():
    probabilities = torch.tensor(LOGITS).softmax(-1)
    assert routed(LOGITS, score_func="softmax", route_scale=1.5) == pytest.approx(
        {0: 1.5 * float(probabilities[0]), 4: 1.5 * float(probabilities[4])}
    )


def test_groups_without_bias_are_judged_by_their_best_expert():
    """Groups (0,1) (2,3) (4,5) (6,7): the best single experts stand in groups 0 and 2, the best pairs in 1 and 3."""
    rules = {"score_func": "softmax", "n_expert_groups": 4, "n_limited_groups": 1}
    assert set(routed(LOGITS, **rules)) == {0, 1}


def test_groups_with_bias_are_judged_by_their_best_two():
    rules = {"score_func": "sigmoid", "n_expert_groups": 4, "n_limited_groups": 1}
    assert set(routed(LOGITS, [0.0] * 8, **rules)) == {2, 3}


def test_the_bias_chooses_but_does_not_weigh():
    bias = [0.0, 5.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0]
    scores = torch.tensor(LOGITS).sigmoid()
    plain = routed(LOGITS, bias, score_func="sigmoid", route_scale=2.0)
    assert plain == pytest.approx({1: 2 * float(scores[1]), 5: 2 * float(scores[5])})
    total = float(scores[1] + scores[5])
    normalised = routed(LOGITS, bias, score_func="sigmoid", route_scale=2.0, norm_topk_prob=True)
    assert normalised == pytest.approx({1: 2 * float(scores[1]) / total, 5: 2 * float(scores[5]) / total})


def test_experts_of_a_dropped_group_are_never_taken_even_with_negative_scores():
    """A biased score may be negative: masking by zero would let a dropped group in."""
    rules = {"score_func": "sigmoid", "n_expert_groups": 4, "n_limited_groups": 1}
    assert set(routed(LOGITS, [-2.0] * 8, **rules)) == {2, 3}


def test_scores_are_float32_whatever_the_compute_dtype():
    gate = Gate(ModelArgs(**SIZES), Execution(Topology(), torch.device("cpu"), torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        gate.weight.copy_(torch.randn(8, 8, generator=generator))
    x = torch.randn(5, 8, generator=generator).bfloat16()
    weights, indices = gate(x)
    expected = (x.double() @ gate.weight.double().T).softmax(-1).gather(-1, indices)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1]), (1, [2, 3]), (3, [6, 7])])
def test_expert_i_lies_whole_on_one_rank(rank, expected):
    topology = Topology(rank, 4)
    assert list(local_experts(ModelArgs(**SIZES), topology)) == expected
    moe = MoE(ModelArgs(**SIZES), Execution(topology, torch.device("cpu"), torch.float32))
    assert sorted(moe.experts) == [str(expert) for expert in expected]


def test_all_experts_and_the_shared_ones_are_summed():
    args = ModelArgs(**SIZES, score_func="sigmoid", norm_topk_prob=True)
    moe = MoE(args, EXECUTION)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(2, 5, 8, generator=generator)
    actual = moe(x)
    for b, s in [(b, s) for b in range(2) for s in range(5)]:
        token = x[b, s]
        scores = (moe.gate.weight @ token).sigmoid()
        best = scores.topk(2).indices
        expected = mlp(moe.shared_experts, token)
        for expert in best.tolist():
            expected = expected + mlp(moe.experts[str(expert)], token) * scores[expert] / scores[best].sum()
        torch.testing.assert_close(actual[b, s], expected, rtol=1e-4, atol=1e-4)


def mlp(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate = module.w1.weight @ x
    return module.w2.weight @ (gate * gate.sigmoid() * (module.w3.weight @ x))
