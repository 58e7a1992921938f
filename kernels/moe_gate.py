"""The gate of a mixture of experts on the device: float32 logits of few tokens, and the choice of experts.

Shapes: T tokens, E routed experts, G groups, K experts a token, S = K + shared experts.
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.device import begin, has_fp8_product, jit, overlapping, tl, triton

PARTS = 16
"""Pieces of the width whose partial logits are summed by the choosing kernel: enough programs to read at full speed."""

FEW_TOKENS = 64
"""Beyond, the logits come from torch's float32 product."""


@dataclass(frozen=True)
class Routing:
    """How experts are chosen; see ``model.moe.Gate``. ``softmax`` or sigmoid scores; a bias judges groups by two.

    ``first`` to ``last`` are the experts of this rank; ``shared`` shared experts follow them in every stack of
    weights, chosen by every token with weight 1.
    """

    experts: int
    activated: int
    groups: int
    limited_groups: int
    softmax: bool
    normalise: bool
    scale: float
    first: int
    last: int
    shared: int = 0


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local expert ids (T, S) int32, -1 for other ranks', and weights (T, S) float32 of tokens ``x`` (T, D).

    ``weight`` (E, D) is float32, or BF16 where that loses nothing; ``bias`` (E,) and all arithmetic are float32.
    """
    if not has_fp8_product(x.device):
        return route_reference(x, weight, bias, routing)
    logits = _logits(x, weight)
    if routing.groups > 1 and routing.experts & (routing.experts - 1):  # DeepSeek-V2: 160 experts in 8 groups
        return choose_reference(logits, bias, routing)
    return choose_triton(logits, bias, routing)


def route_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route`` in plain torch, for any device."""
    return choose_reference(functional.linear(x.float(), weight.float())[None], bias, routing)


def choose_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """``choose_triton`` in plain torch, for any device."""
    summed = logits.sum(0)
    scores = summed.softmax(dim=-1) if routing.softmax else summed.sigmoid()
    chosen_by = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = chosen_by.unflatten(-1, (routing.groups, -1))
        judged = grouped.topk(1 if bias is None else 2, dim=-1).values.sum(dim=-1)
        kept = judged.topk(routing.limited_groups, dim=-1).indices
        dropped = torch.ones_like(judged, dtype=torch.bool).scatter(-1, kept, value=False)
        chosen_by = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)
    chosen = chosen_by.topk(routing.activated, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if routing.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    local = (chosen >= routing.first) & (chosen < routing.last)
    indices = torch.where(local, chosen - routing.first, -1)
    shared = torch.arange(routing.shared, device=logits.device) + routing.last - routing.first
    ones = weights.new_ones(len(summed), routing.shared)
    return (
        torch.cat([indices, shared.expand(len(summed), -1)], dim=-1).int(),
        torch.cat([torch.where(local, weights * routing.scale, 0.0), ones], dim=-1),
    )


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Float32 logits as partial sums (PARTS or 1, T, E)."""
    T, D = x.shape
    if T > FEW_TOKENS:
        return functional.linear(x.float(), weight.float())[None]
    E = weight.shape[0]
    logits = torch.empty(PARTS, T, E, dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        _logits_kernel[(triton.cdiv(E, 16), PARTS, triton.cdiv(T, 16))](
            x,
            weight,
            logits,
            T,
            D,
            E,
            triton.cdiv(triton.cdiv(D, PARTS), 64) * 64,
            STEP=64,
            num_stages=4,
            **overlapping(x.device),
        )
    return logits


def choose_triton(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """From partial logits (P, T, E): as ``route``; one program a token. Of equal scores the lower expert is chosen."""
    P, T, E = logits.shape
    S = routing.activated + routing.shared
    indices = torch.empty(T, S, dtype=torch.int32, device=logits.device)
    weights = torch.empty(T, S, dtype=torch.float32, device=logits.device)
    padded = triton.next_power_of_2(E)
    groups = routing.groups if routing.groups > 1 else 1
    assert groups == 1 or padded == E, f"{E} experts in {groups} groups: groups need a power of two"
    with torch.cuda.device(logits.device):
        _choose_kernel[(T,)](
            logits, logits if bias is None else bias, indices, weights, T, P, E, routing.scale,
            routing.first, routing.last,
            EXPERTS=padded, GROUPS=groups, LIMITED=routing.limited_groups, ACTIVATED=routing.activated,
            SHARED=routing.shared, BIAS=bias is not None, SOFTMAX=routing.softmax, NORMALISE=routing.normalise,
            CHOICES=triton.next_power_of_2(S), num_warps=1, **overlapping(logits.device),
        )  # fmt: skip
    return indices, weights


@jit(do_not_specialize=["T"])
def _logits_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    T: int,
    D: int,
    E: int,
    part: int,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """16 experts' logits of 16 tokens over one part of the width."""
    begin(OVERLAP)
    expert = tl.program_id(0) * 16 + tl.arange(0, 16)
    token = tl.program_id(2) * 16 + tl.arange(0, 16)
    first = tl.program_id(1) * part
    total = tl.zeros((16, 16), dtype=tl.float32)
    for k in range(first, tl.minimum(first + part, D), STEP):
        column = k + tl.arange(0, STEP)
        w_inside = (expert < E)[:, None] & (column < D)[None, :]
        w = tl.load(w_ptr + expert[:, None] * D + column[None, :], mask=w_inside, other=0.0)
        x_inside = (token < T)[None, :] & (column < D)[:, None]
        x = tl.load(x_ptr + token[None, :] * D + column[:, None], mask=x_inside, other=0.0)
        if w_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
            total = tl.dot(w, x, total, input_precision="tf32x3")
        else:  # three products that together are as exact as float32
            total += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="tf32x3")
    place = logits_ptr + (tl.program_id(1) * T + token[None, :]) * E + expert[:, None]
    tl.store(place, total, mask=(expert < E)[:, None] & (token < T)[None, :])


@jit(do_not_specialize=["T"])
def _choose_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    T: int,
    P: int,
    E: int,
    scale: float,
    first: int,
    last: int,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMITED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    CHOICES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    logits = tl.zeros((EXPERTS,), dtype=tl.float32)
    for p in range(P):
        logits += tl.load(logits_ptr + (p * T + token) * E + expert, mask=expert < E, other=0.0)
    if SOFTMAX:
        logits = tl.where(expert < E, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    else:
        scores = 1 / (1 + tl.exp(-logits))
    chosen_by = scores
    if BIAS:
        chosen_by += tl.load(bias_ptr + expert, mask=expert < E, other=0.0)
    chosen_by = tl.where(expert < E, chosen_by, float("-inf"))

    if GROUPS > 1:
        # The best groups, judged by their best expert, or with a bias by their best two.
        WIDTH: tl.constexpr = EXPERTS // GROUPS
        grouped = tl.reshape(chosen_by, (GROUPS, WIDTH))
        judged = tl.max(grouped, axis=1)
        if BIAS:
            best = tl.argmax(grouped, axis=1)
            others = tl.where(tl.arange(0, WIDTH)[None, :] == best[:, None], float("-inf"), grouped)
            judged += tl.max(others, axis=1)
        group = tl.arange(0, GROUPS)
        kept = tl.zeros((GROUPS,), dtype=tl.int32)
        for _ in range(LIMITED):
            winner = tl.argmax(judged, axis=0)
            kept = tl.where(group == winner, 1, kept)
            judged = tl.where(group == winner, float("-inf"), judged)
        grouped = tl.where(kept[:, None] == 1, grouped, float("-inf"))
        chosen_by = tl.reshape(grouped, (EXPERTS,))

    choice = tl.arange(0, CHOICES)
    indices = last - first + choice - ACTIVATED  # what the shared experts' places hold
    weights = tl.full((CHOICES,), 1.0, tl.float32)
    for number in range(ACTIVATED):
        winner = tl.argmax(chosen_by, axis=0)
        score = tl.sum(tl.where(expert == winner, scores, 0.0), axis=0)
        indices = tl.where(choice == number, winner, indices)
        weights = tl.where(choice == number, score, weights)
        chosen_by = tl.where(expert == winner, float("-inf"), chosen_by)
    routed = choice < ACTIVATED
    if NORMALISE:
        weights = tl.where(routed, weights / (tl.sum(tl.where(routed, weights, 0.0), axis=0) + 1e-20), weights)
    local = (indices >= first) & (indices < last)
    weights = tl.where(routed, tl.where(local, weights * scale, 0.0), weights)
    indices = tl.where(routed, tl.where(local, indices - first, -1), indices)
    place = token * (ACTIVATED + SHARED) + choice
    tl.store(indices_ptr + place, indices, mask=choice < ACTIVATED + SHARED)
    tl.store(weights_ptr + place, weights, mask=choice < ACTIVATED + SHARED)
