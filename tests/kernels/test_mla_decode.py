"""Absorbed attention over a paged cache, against sequence-by-sequence attention in float64 and ``model.attention``."""

import pytest
import torch

from kernels.act_quant import act_quant_reference
from kernels.latent_cache import PAGE
from kernels.mla_decode import (
    PROGRAMS,
    _mla_decode_triton,
    heads_of_one_program,
    mla_decode,
    mla_decode_reference,
    parts_of,
)
from model.args import ModelArgs
from model.attention import AbsorbedAttention, NaiveAttention, Positions
from model.layers import Execution
from model.topology import Topology
from tests.kernels.operands import assert_same_bits, frobenius_error, poisoned_outputs

GATE_BF16 = 3.5e-3
"""Weights, sums and results are each rounded to BF16: 1.7e-3 each, on random operands 2.9e-3 together."""

LENGTHS = [[1], [64], [65], [65, 1, 64], [1, 129, 192, 63, 128]]


def attention_operands(
    lengths: list[int], H: int, C: int, R: int, V: int, dtype=torch.float32, device: str = "cpu"
) -> dict:
    """Pages in any order. Those of no sequence, and what lies beyond each sequence's length, are NaN."""
    torch.manual_seed(sum(lengths) + H + C + V)
    longest = max(-(-length // PAGE) for length in lengths)
    n_pages = len(lengths) * longest + 2
    table = torch.randperm(n_pages)[: len(lengths) * longest].view(len(lengths), longest)
    pages = torch.full((n_pages, PAGE, C + R), torch.nan, dtype=dtype, device=device)
    for number, length in enumerate(lengths):
        for start in range(0, length, PAGE):
            filled = min(PAGE, length - start)
            pages[table[number, start // PAGE], :filled] = torch.randn(filled, C + R, device=device).to(dtype)
    both = torch.randn(len(lengths), H, C + R, device=device).to(dtype)
    return {
        "q_latent": both[..., :C].contiguous(),
        "q_rope": both[..., C:],
        "pages": pages,
        "table": table.int().to(device),
        "lengths": torch.tensor(lengths, device=device),
        "to_values": (torch.randn(H, V, C, device=device) * 0.1).to(dtype),
        "scale": 1.5 * (C + R) ** -0.5,
    }


def attended_in_float64(operands: dict) -> torch.Tensor:
    """One sequence and one head at a time, over its own positions only, expanded before they are summed."""
    lengths, table, pages = operands["lengths"].tolist(), operands["table"], operands["pages"]
    query = torch.cat([operands["q_latent"], operands["q_rope"]], dim=-1).double()
    to_values = operands["to_values"].double()
    C = to_values.shape[2]
    results = []
    for b, length in enumerate(lengths):
        cached = torch.stack([pages[table[b, at // PAGE], at % PAGE] for at in range(length)]).double()
        powers = (cached @ query[b].T * operands["scale"]).exp()  # positions, H
        values = torch.einsum("tc,hvc->thv", cached[:, :C], to_values)
        results.append(torch.einsum("th,thv->hv", powers / powers.sum(0), values))
    return torch.stack(results)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("H", "C", "R", "V"), [(1, 1, 2, 1), (3, 63, 2, 63), (5, 192, 16, 576)])
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, 2e-6), (torch.bfloat16, 1.2e-2)])
def test_reference_against_float64(lengths, H, C, R, V, dtype, gate):
    """In BF16 the reference also rounds its scores, as the definition does."""
    operands = attention_operands(lengths, H, C, R, V, dtype)
    actual, quantised = mla_decode(**operands)
    assert quantised is None
    assert (actual.dtype, actual.shape) == (dtype, (len(lengths), H, V))
    assert frobenius_error(actual, attended_in_float64(operands)) <= gate


@pytest.mark.parametrize("form", [NaiveAttention, AbsorbedAttention])
@pytest.mark.parametrize("length", [1, 64, 65])
def test_reference_is_the_model_s_attention(form, length):
    """The newest of ``length`` positions, over the latents that the model's own cache would hold."""
    args = ModelArgs(
        dim=24, n_heads=3, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10, yarn=False
    )
    torch.manual_seed(length)
    attention = form(args, Execution(Topology(), torch.device("cpu"), torch.float32))
    attention.wkv_b.weight.copy_(torch.randn(3 * 22, 20) * 0.3)
    query, latent, key = torch.randn(2, 1, 3, 18), torch.randn(2, length, 20), torch.randn(2, length, 6)
    cache = attention.new_cache(2, length)
    before = Positions(0, torch.empty(0), None)
    if length > 1:
        attention.attend(query.expand(-1, length - 1, -1, -1), latent[:, :-1], key[:, :-1], before, cache)
    newest = Positions(length - 1, torch.empty(0), None)
    expected = attention.attend(query, latent[:, -1:], key[:, -1:], newest, cache)[:, 0]

    expansion = attention.wkv_b.weight.view(3, 22, 20)
    pages = torch.full((5, PAGE, 26), torch.nan)
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    for at in range(length):
        pages[table[:, at // PAGE].long(), at % PAGE] = torch.cat([latent[:, at], key[:, at]], dim=-1)
    q_latent = torch.einsum("bhn,hnc->bhc", query[:, 0, :, :12], expansion[:, :12])
    lengths = torch.tensor([length, length])
    actual, _ = mla_decode(
        q_latent, query[:, 0, :, 12:], pages, table, lengths, expansion[:, 12:], attention.softmax_scale
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_quantises_what_it_returns(scale_fmt):
    operands = attention_operands([65, 1], 3, 63, 2, 128, torch.bfloat16)
    heads, (q, s) = mla_decode(**operands, quantise=True, scale_fmt=scale_fmt)
    expected_q, expected_s = act_quant_reference(heads.flatten(1), scale_fmt=scale_fmt)
    assert_same_bits(q, expected_q)
    assert_same_bits(s, expected_s)


@pytest.mark.parametrize("batch", [1, 3, 32, 64, 1000])
@pytest.mark.parametrize("heads", [1, 16, 20, 128])
@pytest.mark.parametrize("pages", [1, 2, 3, 64, 2560])
def test_parts_are_powers_of_two_that_fill_a_gpu_and_no_more(batch, heads, pages):
    blocks = -(-heads // heads_of_one_program(batch, heads))
    parts = parts_of(batch, blocks, pages)
    assert parts in (1, 2, 4, 8, 16)
    assert parts <= pages
    assert parts == 1 or parts * batch * blocks <= PROGRAMS


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "H"),
    [
        ([1], 16),
        ([64], 128),
        ([65], 16),
        ([4097], 128),
        ([65, 1, 64, 700], 16),
        ([65, 1, 64, 700], 20),
        ([1 + 37 * number for number in range(32)], 16),
        ([1 + 37 * number for number in range(32)], 128),
        ([1 + 5 * number for number in range(130)], 16),
    ],
    ids=lambda value: str(value)[:24],
)
def test_gpu_against_float32(lengths, H):
    operands = attention_operands(lengths, H, 512, 64, 128, torch.bfloat16, "cuda")
    with poisoned_outputs():
        actual, _ = _mla_decode_triton(**operands)
    wide = {name: of.float() if getattr(of, "dtype", None) == torch.bfloat16 else of for name, of in operands.items()}
    expected, _ = mla_decode_reference(**wide)
    errors = (actual.double() - expected).flatten(1).norm(dim=1) / expected.double().flatten(1).norm(dim=1)
    assert not errors.isnan().any()
    assert frobenius_error(actual, expected.double()) <= GATE_BF16
    assert errors.max() <= 1.5 * GATE_BF16, f"sequence {errors.argmax().item()}: {errors.max().item():.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize(("lengths", "H"), [([65], 128), ([65, 1, 64], 16), ([65] * 70, 16), ([65] * 33, 128)], ids=str)
def test_gpu_quantises_what_it_returns(lengths, H, scale_fmt):
    operands = attention_operands(lengths, H, 512, 64, 128, torch.bfloat16, "cuda")
    with poisoned_outputs():
        heads, (q, s) = mla_decode(**operands, quantise=True, scale_fmt=scale_fmt)
    expected_q, expected_s = act_quant_reference(heads.flatten(1).cpu(), scale_fmt=scale_fmt)
    assert_same_bits(s.cpu(), expected_s)
    assert_same_bits(q.cpu(), expected_q)
