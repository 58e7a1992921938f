"""The whole flow on a real (temporary) Prefect server, from a directory and from a hub."""

import json

import pytest
from pydantic import ValidationError

from flows.parameters import PipelineParameters
from flows.pipeline import checkpoint_pipeline
from model.checkpoint.bands import _TargetBands
from model.checkpoint.convert import convert
from model.errors import InputError
from tests.checkpoints import copy_checkpoint, edit_tensor, tensor_bytes, tree_bytes
from tests.hub_server import HubServer, make_it_the_hub, quick_client
from tests.prefect_server import artifacts


def shard_bytes(directory):
    return {path.name: tensor_bytes(path) for path in sorted(directory.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def expected(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "out"
    convert(tiny, out, mp=2, weights="bf16")
    return shard_bytes(out)


@pytest.mark.usefixtures("prefect_server")
def test_from_a_directory_to_a_reply(tiny, tmp_path, expected):
    prompt = "When shall we three meet again?"
    params = PipelineParameters(source=str(tiny), out=tmp_path / "out", mp=2, weights="bf16", prompt=prompt)
    result = checkpoint_pipeline(params)
    assert shard_bytes(tmp_path / "out") == expected
    assert result.checkpoint.directory == tmp_path / "out"
    assert (result.validation.source_tensors, len(result.warm_up.ranks)) == (139, 2)
    assert all(rank.finite and len(rank.tokens) == 2 for rank in result.warm_up.ranks)
    assert result.warm_up.ranks[0].tokens == result.warm_up.ranks[1].tokens
    assert result.reply
    assert (tmp_path / "out.work" / "bf16" / "tiny-v3" / "dequantized.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.work"}

    rows = json.loads(artifacts("shards")[0]["data"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [(row["file"], row["bytes"], row["sha256"]) for row in rows] == [
        (file["name"], file["size"], file["sha256"]) for file in manifest["files"]
    ]
    assert "139 source tensors" in artifacts("validation")[0]["data"]
    assert "legal mp: 1, 2, 4, 8" in artifacts("plan")[0]["description"]
    assert result.reply.splitlines()[0] in artifacts("reply")[0]["data"]
    summary = artifacts("summary")[0]["data"]
    assert str(tmp_path / "out") in summary
    assert all(f"/artifacts/key/{key})" in summary for key in ("plan", "shards", "validation", "warm-up", "reply"))
    assert artifacts("convert-progress")[0]["data"] == 100.0

    before = tree_bytes(tmp_path / "out")
    again = checkpoint_pipeline(params)
    assert tree_bytes(tmp_path / "out") == before
    assert again.reply == result.reply


@pytest.mark.usefixtures("prefect_server")
def test_from_the_hub_fused_through_a_failing_network(tiny, tmp_path, expected, monkeypatch):
    monkeypatch.setattr("tasks.source.download.retry_delay_seconds", [0.0])
    with HubServer() as hub:
        quick_client(monkeypatch)
        make_it_the_hub(monkeypatch, hub.endpoint)
        commit = hub.add("org/tiny", tiny)
        hub.fault("model-00005-of-000007.safetensors", drop_after=700_000)
        params = PipelineParameters(source="org/tiny", out=tmp_path / "out", mp=2, weights="bf16", dequantize="fused")
        result = checkpoint_pipeline(params)
    assert (result.source.repo, result.source.commit) == ("org/tiny", commit)
    assert shard_bytes(tmp_path / "out") == expected
    source = json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]
    assert (source["repo"], source["commit"]) == ("org/tiny", commit)
    assert not (tmp_path / "out.work" / "bf16").exists()


@pytest.mark.usefixtures("prefect_server")
def test_a_damaged_source_fails_at_once_and_leaves_nothing(tiny, tmp_path):
    source = copy_checkpoint(tiny, tmp_path / "source")
    edit_tensor(source, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", None)
    params = PipelineParameters(source=str(source), out=tmp_path / "out", mp=2, weights="bf16")
    with pytest.raises(InputError, match=r"up_proj.weight' is F8_E4M3 but its scale"):
        checkpoint_pipeline(params)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.usefixtures("prefect_server")
def test_shards_that_fail_their_validation_are_not_published(tiny, tmp_path, monkeypatch):
    really = _TargetBands._band

    def doubled(self, *arguments):
        return really(self, *arguments) * (2 if self.target.name == "layers.0.attn.wo.weight" else 1)

    monkeypatch.setattr(_TargetBands, "_band", doubled)
    params = PipelineParameters(source=str(tiny), out=tmp_path / "out", mp=2, weights="bf16", dequantize="fused")
    with pytest.raises(Exception, match=r"tensor 'layers.0.attn.wo.weight' differs from source"):
        checkpoint_pipeline(params)
    assert {path.name for path in tmp_path.iterdir()} <= {"out.work"}


@pytest.mark.usefixtures("prefect_server")
def test_an_output_that_is_taken_is_refused_before_any_work(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty"):
        checkpoint_pipeline(PipelineParameters(source=str(tiny), out=tmp_path / "out", mp=2, weights="bf16"))
    assert tree_bytes(tmp_path) == {"out/precious.txt": b"mine"}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"mp": 0}, "mp"),
        ({"mp": "two"}, "mp"),
        ({"weights": "int4"}, "weights"),
        ({"max_memory": "much"}, "max_memory"),
        ({"workers": 0}, "workers"),
        ({"surprise": 1}, "surprise"),
        ({"weights": "fp8", "dequantize": "staged"}, ""),
        ({"work": "out"}, ""),
        ({"work": "out/below"}, ""),
        ({"ray_address": "ray://head:10001"}, ""),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_path(change, path):
    with pytest.raises(ValidationError) as caught:
        PipelineParameters(**{"source": "a/b", "out": "out", "mp": 2} | change)
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == [path]


def test_the_form_has_types_bounds_and_descriptions():
    schema = PipelineParameters.model_json_schema()
    assert all("description" in field for field in schema["properties"].values())
    assert schema["properties"]["mp"]["minimum"] == 1
    assert schema["required"] == ["source", "out", "mp"]
