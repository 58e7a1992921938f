"""The choice of experts, against ``model.moe.Gate`` and against sorting in float64."""

import dataclasses

import pytest
import torch

from kernels.moe_gate import PARTS, Routing, _logits, choose_reference, choose_triton, route, route_reference
from model.args import ModelArgs
from model.layers import Execution
from model.moe import Gate
from model.topology import Topology
from tests.kernels.operands import frobenius_error, poisoned_outputs

V2_LITE = Routing(64, 6, 1, 1, softmax=True, normalise=False, scale=1.0, first=0, last=64, shared=2)
V2 = Routing(160, 6, 8, 3, softmax=True, normalise=False, scale=16.0, first=0, last=160, shared=2)
V3 = Routing(256, 8, 8, 4, softmax=False, normalise=True, scale=2.5, first=0, last=256, shared=1)
TINY = Routing(6, 3, 3, 2, softmax=False, normalise=True, scale=2.5, first=2, last=4, shared=3)
ONE_GROUP = Routing(16, 3, 4, 1, softmax=False, normalise=True, scale=2.5, first=4, last=12, shared=2)
ALONE = Routing(1, 1, 1, 1, softmax=False, normalise=True, scale=0.5, first=0, last=1)
RANK_OF_V3 = dataclasses.replace(V3, first=64, last=128, shared=0)
ROUTINGS = {
    "V2-Lite": (V2_LITE, False),
    "V2": (V2, False),
    "V3": (V3, True),
    "one rank's part of V3": (RANK_OF_V3, True),
    "V3 without a bias": (V3, False),
    "few experts": (TINY, True),
    "one group of four, judged by two": (ONE_GROUP, True),
    "one group of four, judged by one": (ONE_GROUP, False),
    "one expert": (ALONE, True),
}
ON_TRITON = [name for name, (routing, _) in ROUTINGS.items() if routing.groups == 1 or routing.experts in (16, 256)]
"""Groups want a power of two of experts there."""


def router(
    routing: Routing, dim: int, bias: bool, tokens: int = 9
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(routing.experts + dim)
    x = torch.randn(tokens, dim)
    return x, torch.randn(routing.experts, dim) * 2 * dim**-0.5, torch.randn(routing.experts) * 0.2 if bias else None


def grid_logits(routing: Routing, tokens: int, parts: int = PARTS) -> torch.Tensor:
    """Partial logits (parts, tokens, E) whose sums are exact in any order, and different for every expert."""
    torch.manual_seed(routing.experts + tokens)
    ranks = torch.stack([torch.randperm(routing.experts) for _ in range(tokens)])
    wanted = (ranks - routing.experts // 2) * 2.0 ** -(routing.experts.bit_length() - 2)  # from -2 to 2
    logits = torch.randint(-64, 64, (parts, tokens, routing.experts)) / 32
    logits[0] += wanted - logits.sum(0)
    assert torch.equal(logits.sum(0), wanted)
    return logits


def chosen_in_float64(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[list[list[int]], torch.Tensor]:
    """By sorting, token by token. Of equal scores the lower expert comes first."""
    all_indices, all_weights = [], []
    width = routing.experts // routing.groups
    for of_token in logits.double():
        scores = of_token.exp() / of_token.exp().sum() if routing.softmax else 1 / (1 + (-of_token).exp())
        judged = scores if bias is None else scores + bias.double()
        values = judged.tolist()
        groups = [values[start : start + width] for start in range(0, routing.experts, width)]
        merit = [sum(sorted(group)[-1 if bias is None else -2 :]) for group in groups]
        best = sorted(range(routing.groups), key=lambda group: -merit[group])
        kept = best[: routing.limited_groups] if routing.groups > 1 else best
        allowed = [expert for expert in range(routing.experts) if expert // width in kept]
        chosen = sorted(allowed, key=lambda expert: -values[expert])[: routing.activated]
        weights = scores[chosen]
        if routing.normalise:
            weights = weights / weights.sum()
        mine = [routing.first <= expert < routing.last for expert in chosen]
        shared = range(routing.last - routing.first, routing.last - routing.first + routing.shared)
        indices = [expert - routing.first if local else -1 for expert, local in zip(chosen, mine, strict=True)]
        all_indices.append([*indices, *shared])
        all_weights.append(torch.cat([weights * routing.scale * torch.tensor(mine), torch.ones(routing.shared)]))
    return all_indices, torch.stack(all_weights)


def assert_chosen(actual, expected, rtol=3e-6) -> None:
    indices, weights = actual
    assert (indices.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert indices.tolist() == expected[0]
    torch.testing.assert_close(weights.cpu().double(), expected[1].double(), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dim", [1, 63, 192, 576])
def test_reference_against_sorting_in_float64(name, dim):
    routing, bias = ROUTINGS[name]
    x, weight, bias = router(routing, dim, bias)
    logits = x.double() @ weight.double().T
    assert_chosen(route_reference(x, weight, bias, routing), chosen_in_float64(logits, bias, routing), 2e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_choice_is_exact_where_the_logits_are(name):
    routing, bias = ROUTINGS[name]
    bias = router(routing, 1, bias)[2]
    logits = grid_logits(routing, 65)
    assert_chosen(choose_reference(logits, bias, routing), chosen_in_float64(logits.sum(0), bias, routing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_reference_is_the_model_s_gate(name, dtype):
    routing, bias = ROUTINGS[name]
    x, weight, bias = router(routing, 192, bias, tokens=65)
    args = ModelArgs(
        dim=192,
        n_routed_experts=routing.experts,
        n_activated_experts=routing.activated,
        n_expert_groups=routing.groups,
        n_limited_groups=routing.limited_groups,
        score_func="softmax" if routing.softmax else "sigmoid",
        norm_topk_prob=routing.normalise,
        route_scale=routing.scale,
        gate_bias=bias is not None,
    )
    gate = Gate(args, Execution(Topology(), torch.device("cpu"), dtype))
    gate.weight.copy_(weight)
    if bias is not None:
        gate.bias.copy_(bias)
    x = x.to(dtype)
    weights, indices = gate(x)
    all_experts = dataclasses.replace(routing, first=0, last=routing.experts, shared=0)
    actual_indices, actual_weights = route(x, weight, bias, all_experts)
    assert torch.equal(actual_indices, indices.int())
    assert torch.equal(actual_weights, weights)


def test_a_bf16_router_is_one_of_float32():
    x, weight, bias = router(V3, 192, bias=True)
    weight = weight.bfloat16()
    narrow, wide = (route(x.bfloat16(), of, bias, V3) for of in (weight, weight.float()))
    assert torch.equal(narrow[0], wide[0])
    assert torch.equal(narrow[1], wide[1])


def test_ranks_share_the_experts_out():
    """Every choice is local on one rank alone, with the weight that it has on a single rank."""
    x, weight, bias = router(V3, 192, bias=True)
    whole_indices, whole_weights = route(x, weight, bias, V3)
    found = torch.zeros(9, 8)
    for first in range(0, 256, 64):
        rank = dataclasses.replace(V3, first=first, last=first + 64, shared=0)
        indices, weights = route(x, weight, bias, rank)
        local = indices >= 0
        assert torch.equal(indices[local] + first, whole_indices[:, :8][local])
        assert not weights[~local].any()
        found += weights
    assert torch.equal(found, whole_weights[:, :8])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 63, 300])
@pytest.mark.parametrize("name", ON_TRITON)
def test_gpu_choice_equals_sorting(name, T):
    routing, bias = ROUTINGS[name]
    bias = router(routing, 1, bias)[2]
    logits = grid_logits(routing, T)
    with poisoned_outputs():
        actual = choose_triton(logits.cuda(), None if bias is None else bias.cuda(), routing)
    assert_chosen(actual, chosen_in_float64(logits.sum(0), bias, routing))


@pytest.mark.gpu
def test_gpu_takes_the_lower_of_equal_experts():
    indices, _ = choose_triton(torch.zeros(1, 3, 256, device="cuda"), None, V3)
    assert indices.tolist() == [[*range(8), 256]] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize(("E", "D"), [(64, 2048), (160, 5120), (256, 7168), (5, 63), (1, 7168)])
def test_gpu_logits_are_of_float32(E, D, T, dtype):
    torch.manual_seed(E + D + T)
    x = torch.randn(T, D, device="cuda").bfloat16()
    weight = (torch.randn(E, D, device="cuda") * 0.03).to(dtype)
    with poisoned_outputs():
        actual = _logits(x, weight).sum(0)
    assert frobenius_error(actual, x.double() @ weight.double().T) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 32, 65])
@pytest.mark.parametrize("name", ROUTINGS)
def test_gpu_routes_from_exact_logits(name, T, dtype):
    """Each token reads one column of the router, so that its logits are exact and its experts certain."""
    routing, bias = ROUTINGS[name]
    logits = grid_logits(routing, T, parts=1)[0]
    x, weight = torch.zeros(T, 2048), torch.zeros(routing.experts, 2048)
    columns = torch.randperm(2048)[:T]
    x[torch.arange(T), columns] = 1
    weight[:, columns] = logits.T
    bias = router(routing, 1, bias)[2]
    with poisoned_outputs():
        actual = route(x.bfloat16().cuda(), weight.to(dtype).cuda(), None if bias is None else bias.cuda(), routing)
    assert_chosen(actual, chosen_in_float64(logits, bias, routing))
