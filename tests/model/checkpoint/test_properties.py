"""For any small config and mp: convert, verify and reassemble is the identity, and resharding equals converting."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.checkpoint.build import Resources
from model.checkpoint.convert import convert
from model.checkpoint.dequantize import dequantize
from model.checkpoint.plan import plan_shards
from model.checkpoint.reshard import reshard
from model.checkpoint.source import open_source
from model.checkpoint.verify import verify
from model.errors import InputError
from tests import official
from tests.checkpoints import load_tensors, tree_bytes
from tests.random_checkpoints import small_family, write_random

odd = st.integers(1, 70)


@st.composite
def families(draw):
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = groups * draw(st.sampled_from([2, 3, 4]))
    layers = draw(st.integers(1, 3))
    return small_family(
        fp8=draw(st.booleans()),
        files=draw(st.integers(1, 4)),
        block=draw(st.sampled_from([16, 32, 128])),
        num_attention_heads=draw(st.sampled_from([1, 2, 4, 6])),
        n_routed_experts=experts,
        n_group=groups,
        topk_group=draw(st.integers(1, groups)),
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        first_k_dense_replace=draw(st.integers(0, layers)),
        vocab_size=draw(st.sampled_from([48, 60, 63])),
        hidden_size=draw(odd),
        intermediate_size=draw(st.sampled_from([24, 48, 96, 63])),
        moe_intermediate_size=draw(st.sampled_from([12, 33, 64])),
        q_lora_rank=draw(st.sampled_from([None, 1, 24, 63])),
        kv_lora_rank=draw(odd),
        qk_nope_head_dim=draw(st.sampled_from([4, 16, 17])),
        qk_rope_head_dim=draw(st.sampled_from([2, 6, 8])),
        v_head_dim=draw(st.sampled_from([4, 9, 16])),
        num_nextn_predict_layers=draw(st.integers(0, 1)),
    )


def plain(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree_bytes(directory).items() if name != "manifest.json"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(family=families(), seed=st.integers(0, 2**16), memory=st.sampled_from([1, 4096, 1 << 20]), choice=st.data())
def test_converting_is_the_identity(family, seed, memory, choice):
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        source = write_random(family, root / "source", seed)
        weights = choice.draw(st.sampled_from(["bf16", "fp8"] if family.fp8 else ["bf16"]))
        mtp = choice.draw(st.sampled_from(["drop", "keep"] if family.mtp else ["drop"]))
        legal = plan_shards(open_source(source, mtp), mp=1, weights=weights, mtp=mtp).legal_mp
        old, new = (choice.draw(st.sampled_from(legal)) for _ in range(2))
        resources = Resources(max_memory=memory, workers=choice.draw(st.integers(1, 3)))
        convert(source, root / "old", mp=old, weights=weights, mtp=mtp, resources=resources)
        assert verify(root / "old", source).source_tensors > 0
        _assert_reassembled(root / "old", source, family, weights)
        convert(source, root / "new", mp=new, weights=weights, mtp=mtp)
        reshard(root / "old", root / "resharded", mp=new, resources=resources)
        assert plain(root / "resharded") == plain(root / "new")
        if family.fp8 and weights == "bf16":
            dequantize(source, root / "bf16", resources=resources)
            convert(root / "bf16", root / "staged", mp=old, mtp=mtp)
            assert plain(root / "staged").keys() == plain(root / "old").keys()
            assert all(
                data == (root / "old" / name).read_bytes()
                for name, data in plain(root / "staged").items()
                if name.endswith(".safetensors")
            )


def _assert_reassembled(checkpoint: Path, source: Path, family, weights: str) -> None:
    """Against the official converter's rules, in memory, by nothing of this project."""
    tensors = load_tensors(source)
    if weights == "bf16":
        tensors = official.dequantised(tensors, family.block)
    config = family.config
    shards = sorted(checkpoint.glob("model*.safetensors"))
    expected = official.shards(tensors, len(shards), config["n_routed_experts"], config["num_hidden_layers"])
    for rank, shard in enumerate(expected):
        actual = load_tensors_of(checkpoint / f"model{rank}-mp{len(shards)}.safetensors")
        assert actual.keys() == shard.keys()
        for name, tensor in shard.items():
            assert actual[name].dtype == tensor.dtype
            assert torch.equal(actual[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def load_tensors_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_an_mp_that_is_not_legal_is_always_refused(tmp_path):
    source = write_random(
        small_family(num_attention_heads=6, vocab_size=60, n_routed_experts=6, n_group=1), tmp_path / "s"
    )
    legal = plan_shards(open_source(source, "drop"), mp=1, weights="bf16").legal_mp
    assert legal == (1, 2)
    for mp in (3, 4, 5, 6, 7):
        with pytest.raises(InputError, match=f"mp = {mp} is not legal"):
            convert(source, tmp_path / "out", mp=mp, weights="bf16")
