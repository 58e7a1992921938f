import json

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config

from model.args import ModelArgs
from model.errors import InputError
from model.hf_config import from_hf

YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": YARN, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
V3_ARGS = ModelArgs(
    max_seq_len=163840, dtype="fp8", vocab_size=129280, dim=7168, inter_dim=18432, moe_inter_dim=2048, n_layers=61,
    n_dense_layers=3, n_heads=128, n_routed_experts=256, n_shared_experts=1, n_activated_experts=8, n_expert_groups=8,
    n_limited_groups=4, score_func="sigmoid", route_scale=2.5, q_lora_rank=1536, kv_lora_rank=512, rope_factor=40.0,
    yarn=True, norm_topk_prob=True, gate_bias=True, n_mtp_layers=1,
)  # fmt: skip


def test_deepseek_v3():
    assert from_hf(V3) == V3_ARGS


def test_official_json_gives_the_same_model():
    """The fields of the official config_671B.json."""
    official = {
        "vocab_size": 129280, "dim": 7168, "inter_dim": 18432, "moe_inter_dim": 2048, "n_layers": 61,
        "n_dense_layers": 3, "n_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 8,
        "n_expert_groups": 8, "n_limited_groups": 4, "route_scale": 2.5, "score_func": "sigmoid", "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "dtype": "fp8",
    }  # fmt: skip
    assert ModelArgs.from_official(official) == V3_ARGS.replace(max_seq_len=16384, n_mtp_layers=0)
    fields, reasons = V3_ARGS.to_official()
    assert reasons == []
    assert {name: fields[name] for name in official} == official
    assert fields["max_seq_len"] > fields["original_seq_len"]  # what switches YaRN on in the official code


def test_scale_fmt_of_v3_1():
    quantization = V3["quantization_config"] | {"scale_fmt": "ue8m0"}
    assert from_hf(V3 | {"quantization_config": quantization}).scale_fmt == "ue8m0"


def test_saved_by_transformers_without_scores_and_with_rope_parameters():
    config = DeepseekV3Config(
        num_hidden_layers=4, rope_parameters=YARN | {"rope_theta": 50000.0}, rms_norm_eps=1e-5, q_lora_rank=None
    )
    saved = json.loads(config.to_json_string())
    assert "scoring_func" not in saved
    assert "rope_theta" not in saved
    args = from_hf(saved)
    assert (args.score_func, args.gate_bias, args.norm_topk_prob) == ("sigmoid", True, True)
    assert (args.rope_theta, args.yarn, args.rope_factor, args.mscale) == (50000.0, True, 40.0, 1.0)
    assert (args.q_lora_rank, args.norm_eps, args.dtype) == (0, 1e-5, "bf16")


def test_v2_lite_greedy_means_one_group():
    config = DeepseekV2Config(
        q_lora_rank=None,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        n_group=8,
        topk_group=3,
        topk_method="greedy",
    )
    args = from_hf(json.loads(config.to_json_string()))
    assert (args.score_func, args.gate_bias, args.norm_topk_prob) == ("softmax", False, False)
    assert (args.n_expert_groups, args.n_limited_groups) == (1, 1)
    grouped = from_hf(json.loads(config.to_json_string()) | {"topk_method": "group_limited_greedy"})
    assert (grouped.n_expert_groups, grouped.n_limited_groups) == (8, 3)


def test_without_yarn():
    args = from_hf(V3 | {"rope_scaling": None, "rope_theta": 50000})
    assert not args.yarn
    assert args.rope_theta == 50000.0
    fields, _ = args.to_official()
    assert fields["max_seq_len"] <= fields["original_seq_len"]  # what switches YaRN off in the official code


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "(Qwen2ForCausalLM) is a Qwen2 model"),
        ({"model_type": "deepseek_v32"}, "is DeepSeek-V3.2"),
        (
            {"model_type": "novel"},
            "model_type 'novel' (DeepseekV3ForCausalLM) is not a model of the DeepSeek-V3 family",
        ),
        ({"hidden_size": None}, "hidden_size = None is not a whole number"),
        ({"hidden_size": "7168"}, "hidden_size = '7168' is not a whole number"),
        ({"hidden_size": True}, "hidden_size = True is not a whole number"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps = 'tiny' is not a number"),
        ({"scoring_func": "tanh"}, "scoring_func = 'tanh' is not implemented"),
        (
            {"topk_method": "noaux_tc", "scoring_func": "softmax"},
            "topk_method 'noaux_tc' contradicts scoring_func 'softmax'",
        ),
        (
            {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": True},
            "norm_topk_prob = true with scoring_func 'softmax' is not implemented",
        ),
        ({"attention_bias": True}, "attention_bias = True is not implemented"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not implemented"),
        ({"rope_interleave": False}, "rope_interleave = False is not implemented"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8 differs from num_attention_heads"),
        ({"rope_scaling": YARN | {"mscale": 0.5}}, "rope_scaling.mscale = 0.5 differs from mscale_all_dim = 1.0"),
        ({"rope_scaling": YARN | {"mscale_all_dim": None}}, "rope_scaling.mscale_all_dim is missing"),
        ({"rope_scaling": YARN | {"mscale": 0, "mscale_all_dim": 0}}, "rope_scaling.mscale_all_dim is missing or 0"),
        ({"rope_scaling": YARN | {"factor": 0}}, "rope_scaling.factor = 0 is not a number above 0"),
        ({"rope_scaling": YARN | {"rope_type": "default"}}, "type = 'yarn' contradicts rope_type = 'default'"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn' is not an object"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8' is not an object"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob = 'false' is not true or false"),
        ({"architectures": 5}, "architectures = 5 is not a list of texts"),
        ({"model_type": []}, "model_type = [] is not a text"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan is not a number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf is not a number"),
        ({"hidden_size": 10**400}, "is not a whole number"),
        ({"rope_theta": True}, "rope_theta = True is not a number above 0"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling.type = 'linear' is not implemented"),
        ({"rope_scaling": YARN | {"surprise": 1}}, "rope_scaling.surprise is not a known field"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate = False is not implemented"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5}},
            "rope_theta = 10000 contradicts rope_parameters.rope_theta = 5",
        ),
        ({"rope_theta": None}, "rope_theta = None is not a number above 0"),
        ({"n_group": 7}, "n_expert_groups = 7 does not divide n_routed_experts = 256"),
        ({"topk_group": 9}, "n_limited_groups = 9 is not between 1 and 8 groups"),
        ({"num_experts_per_tok": 129}, "n_activated_experts = 129 is not between 1 and the 128 experts"),
        ({"first_k_dense_replace": 62}, "n_dense_layers = 62 exceeds n_layers = 61"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method = 'awq' is not implemented",
        ),
        (
            {"quantization_config": V3["quantization_config"] | {"weight_block_size": None}},
            "quantization_config.weight_block_size = None is not two positive numbers",
        ),
        (
            {"quantization_config": V3["quantization_config"] | {"scale_fmt": "odd"}},
            "quantization_config.scale_fmt = 'odd' is neither null nor 'ue8m0'",
        ),
    ],
)
def test_unknown_or_contradicting_values_name_the_field(change, message):
    with pytest.raises(InputError) as caught:
        from_hf(V3 | change)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "q_lora_rank"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_fields_whose_absence_means_another_thing_to_each_program_must_be_stated(model_type, name):
    config = V3 | {"model_type": model_type}
    assert from_hf(config) == V3_ARGS
    del config[name]
    with pytest.raises(InputError) as caught:
        from_hf(config)
    [problem] = caught.value.problems
    assert problem.startswith(f"config.json: {name} is not stated")


def test_deepseek_v2_without_the_optional_routing_fields():
    config = json.loads(DeepseekV2Config(num_experts_per_tok=6, topk_method="greedy").to_json_string())
    assert (config["n_group"], config["topk_group"]) == (None, None)
    for name in ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "topk_method"):
        config.pop(name, None)
    args = from_hf(config)
    assert (args.norm_topk_prob, args.route_scale, args.n_expert_groups) == (False, 1.0, 1)
    del config["q_lora_rank"]
    with pytest.raises(InputError, match="q_lora_rank is not stated"):
        from_hf(config)
    with pytest.raises(InputError, match="n_group = None is not a whole number"):
        from_hf(config | {"topk_method": "group_limited_greedy", "q_lora_rank": None})


def test_null_is_a_model_without_low_rank_queries():
    assert from_hf(V3 | {"q_lora_rank": None}) == V3_ARGS.replace(q_lora_rank=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 1.0}, "rope_theta = 1.0 is not above 1"),
        ({"rope_theta": 1.0, "yarn": False}, "rope_theta = 1.0 is not above 1"),
        ({"rope_factor": 0.0}, "yarn needs rope_factor = 0.0 above 0"),
        ({"beta_fast": 0.0}, "yarn needs beta_fast = 0.0 above 0"),
        ({"beta_slow": 0.0}, "yarn needs beta_slow = 0.0 above 0"),
        ({"original_seq_len": 0}, "yarn needs original_seq_len = 0 above 0"),
        ({"beta_slow": float("inf")}, "beta_slow = inf is not a number"),
        ({"rope_theta": float("nan")}, "rope_theta = nan is not a number"),
        ({"block_size": 128}, "block_size = 128 is not two positive numbers"),
        ({"block_size": "ab"}, "block_size = 'ab' is not two positive numbers"),
        ({"block_size": [128]}, "block_size = (128,) is not two positive numbers"),
        ({"block_size": None}, "block_size = None is not two positive numbers"),
    ],
)
def test_arguments_that_rope_or_the_scales_cannot_take_are_refused(change, message):
    with pytest.raises(InputError) as caught:
        ModelArgs.from_json(V3_ARGS.to_json() | change)
    [problem] = caught.value.problems
    assert message in problem


def test_without_yarn_its_numbers_do_not_matter():
    args = V3_ARGS.replace(yarn=False, original_seq_len=0, rope_factor=0.0)
    assert ModelArgs.from_json(args.to_json()) == args


def test_every_problem_has_its_line():
    with pytest.raises(InputError) as caught:
        from_hf(V3 | {"hidden_act": "gelu", "vocab_size": -1, "attention_bias": True})
    assert len(caught.value.problems) == 3
    assert all(problem.startswith("config.json: ") for problem in caught.value.problems)


def test_arguments_survive_json_and_refuse_nonsense():
    assert ModelArgs.from_json(json.loads(json.dumps(V3_ARGS.to_json()))) == V3_ARGS
    for change, message in (
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"dim": 1.5}, "dim = 1.5 is not a whole number"),
        ({"dim": 0}, "dim = 0 is not positive"),
        ({"yarn": 1}, "yarn = 1 is not true or false"),
        ({"score_func": "odd"}, "score_func = 'odd' is neither"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63 is odd"),
    ):
        with pytest.raises(InputError) as caught:
            ModelArgs.from_json(V3_ARGS.to_json() | change)
        assert message in str(caught.value)
