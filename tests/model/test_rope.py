"""Inverse frequencies and the softmax scale against transformers, the rotation against plain trigonometry."""

import math

import pytest
import torch

from model.args import ModelArgs
from model.hf_config import from_hf
from model.rope import inverse_frequencies, rotate, rotations, softmax_scale
from tests.model.oracle import CASES, PLAIN, SMALL, V3, YARN

V3_ROPE = {"factor": 40.0, "original_max_position_embeddings": 4096}
CONFIGS = CASES | {
    "V3 itself": V3 | {"rope_parameters": YARN | V3_ROPE, "qk_rope_head_dim": 64},
    "Kimi-K2": V3
    | {
        "rope_parameters": YARN | V3_ROPE | {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0},
        "qk_rope_head_dim": 64,
    },
    "low equals high": V3 | {"rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0}, "qk_rope_head_dim": 2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_and_scale_are_those_of_transformers(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = CONFIGS[name] | {"num_hidden_layers": 1}
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).model
    rotary = type(model.rotary_emb)(config)
    args = from_hf(fields)
    assert torch.equal(inverse_frequencies(args), rotary.inv_freq)
    assert rotary.attention_scaling == 1.0
    assert softmax_scale(args) == pytest.approx(model.layers[0].self_attn.scaling, rel=1e-15)


def test_yarn_belongs_to_the_checkpoint_not_to_the_length_of_the_cache():
    args = from_hf(V3 | {"rope_parameters": YARN})
    short = args.replace(max_seq_len=16)
    assert torch.equal(inverse_frequencies(short), inverse_frequencies(args))
    assert softmax_scale(short) == softmax_scale(args)


def test_without_yarn_neither_factor_nor_mscale_counts():
    args = from_hf(V3 | {"rope_parameters": PLAIN}).replace(rope_factor=40.0, mscale=2.0)
    width = SMALL["qk_rope_head_dim"]
    expected = torch.tensor([10000.0 ** -(2 * pair / width) for pair in range(width // 2)])
    torch.testing.assert_close(inverse_frequencies(args), expected, rtol=1e-6, atol=0)
    assert softmax_scale(args) == args.qk_head_dim**-0.5


def test_interleaved_pairs_turn_by_position_times_frequency():
    frequencies = inverse_frequencies(ModelArgs(qk_rope_head_dim=6, yarn=False))
    x = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    actual = rotate(x, rotations(frequencies, 100, 3))
    for position in range(3):
        for pair in range(3):
            angle = (100 + position) * float(frequencies[pair])
            even, odd = x[:, position, :, 2 * pair].double(), x[:, position, :, 2 * pair + 1].double()
            turned = actual[:, position, :, 2 * pair : 2 * pair + 2].double()
            torch.testing.assert_close(
                turned[..., 0], even * math.cos(angle) - odd * math.sin(angle), atol=1e-4, rtol=0
            )
            torch.testing.assert_close(
                turned[..., 1], even * math.sin(angle) + odd * math.cos(angle), atol=1e-4, rtol=0
            )


def test_rotation_keeps_the_dtype_and_computes_in_float32():
    x = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    rotation = rotations(torch.tensor([1.0, 0.1, 0.01, 0.001]), 5, 2)
    actual = rotate(x, rotation)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, rotate(x.float(), rotation).bfloat16())
