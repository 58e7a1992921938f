"""The scheduled flow against a hub: new commits, nothing new, failures, and what stays of old versions."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.reconvert import ReconvertParameters, reconvert
from model.checkpoint.hub_errors import TransientError
from model.checkpoint.manifest import read_manifest
from model.checkpoint.verify import VerificationError, verify
from model.errors import InputError
from tests.checkpoints import copy_checkpoint, edit_json, tree_bytes
from tests.hub_server import HubServer, make_it_the_hub, quick_client

REPO = "org/tiny"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("tasks.source.resolve_revision.retry_delay_seconds", [0.0])
    monkeypatch.setattr("tasks.source.download.retry_delay_seconds", [0.0])
    with HubServer() as server:
        quick_client(monkeypatch)
        make_it_the_hub(monkeypatch, server.endpoint)
        yield server


@pytest.fixture
def params(tmp_path):
    return ReconvertParameters(repo=REPO, root=tmp_path / "root", mp=2, weights="fp8", keep=2)


def push(hub: HubServer, tiny, tmp_path, number: int) -> str:
    """The tiny checkpoint as one more commit."""
    source = copy_checkpoint(tiny, tmp_path / f"source{number}")
    edit_json(source / "generation_config.json", max_length=number)
    return hub.add(REPO, source)


@pytest.mark.usefixtures("prefect_server")
def test_a_new_commit_becomes_latest_and_old_versions_go(hub, params, tiny, tmp_path):
    home, commits, current = tmp_path / "root" / "org" / "tiny", [], []
    for number in range(3):
        commits.append(push(hub, tiny, tmp_path, number))
        result = reconvert(params)
        version = home / commits[-1] / "mp2-fp8"
        assert (result.commit, result.checkpoint, result.converted) == (commits[-1], version, True)
        assert (home / "latest").readlink() == Path(commits[-1], "mp2-fp8")
        assert read_manifest(home / "latest").source.commit == commits[-1]
        current.append(result)
    assert [result.removed for result in current] == [(), (), (home / commits[0] / "mp2-fp8",)]
    assert verify(home / "latest", tmp_path / "source2").source_tensors == 259
    assert {path.name for path in home.iterdir()} == {*commits[1:], "latest", ".lock", ".work"}
    assert {path.name for path in (home / commits[2]).iterdir()} == {"mp2-fp8"}
    assert list(home.rglob("*.safetensors.index.json")) == [], "no download is left"


@pytest.mark.usefixtures("prefect_server")
def test_where_nothing_is_new_nothing_is_done_and_a_lost_file_is_made_again(hub, params, tiny, tmp_path, caplog):
    commit = push(hub, tiny, tmp_path, 0)
    reconvert(params)
    before, checkpoint = tree_bytes(tmp_path / "root"), tree_bytes(params.versions.directory(commit))
    hub.clear()
    with caplog.at_level("INFO"):
        again = reconvert(params)
    assert (again.commit, again.converted, again.removed) == (commit, False, ())
    assert f"nothing to do: main stands for {commit}, which {tmp_path}/root/org/tiny/latest names" in caplog.text
    assert hub.fetched() == set()
    assert tree_bytes(tmp_path / "root") == before

    (again.checkpoint / "model1-mp2.safetensors").unlink()
    assert reconvert(params).converted
    assert tree_bytes(again.checkpoint) == checkpoint


@pytest.mark.usefixtures("prefect_server")
def test_a_hub_that_is_down_fails_without_touching_latest(hub, params, tiny, tmp_path):
    push(hub, tiny, tmp_path, 0)
    reconvert(params)
    before = tree_bytes(tmp_path / "root")
    commit = push(hub, tiny, tmp_path, 1)
    hub.fault("api:info", status=503, failures=1000)
    with pytest.raises(TransientError, match=REPO):
        reconvert(params)
    assert tree_bytes(tmp_path / "root") == before
    hub.heal()
    hub.fault("model-00003-of-000007.safetensors", status=503, failures=1000)
    with pytest.raises(TransientError, match="model-00003-of-000007.safetensors"):
        reconvert(params)
    latest = tmp_path / "root" / "org" / "tiny" / "latest"
    assert read_manifest(latest).source.commit != commit
    hub.heal()
    assert reconvert(params).commit == commit == read_manifest(latest).source.commit


@pytest.mark.usefixtures("prefect_server")
def test_a_version_that_fails_its_validation_does_not_become_latest(hub, params, tiny, tmp_path, monkeypatch):
    push(hub, tiny, tmp_path, 0)
    first = reconvert(params)
    push(hub, tiny, tmp_path, 1)

    def fails(*arguments):
        raise VerificationError("tensor 'layers.0.attn.wo.weight' differs from source")

    with monkeypatch.context() as patched:
        patched.setattr("tasks.stages.verify", fails)
        with pytest.raises(VerificationError):
            reconvert(params)
    latest = tmp_path / "root" / "org" / "tiny" / "latest"
    assert latest.resolve() == first.checkpoint.resolve()


@pytest.mark.usefixtures("prefect_server")
def test_a_root_of_another_variant_is_refused_before_the_hub_is_asked(hub, params, tmp_path):
    home = tmp_path / "root" / "org" / "tiny"
    home.mkdir(parents=True)
    (home / "latest").symlink_to(f"{'a' * 40}/mp8-fp8")
    with pytest.raises(InputError, match="names a+/mp8-fp8, but this run makes mp2-fp8; choose another root"):
        reconvert(params)
    assert hub.log == []
    assert [path.name for path in home.iterdir()] == ["latest"]


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"repo": "tiny"}, "repo", "pattern"),
        ({"repo": "../../etc"}, "repo", "pattern"),
        ({"keep": 0}, "keep", "greater than or equal to 1"),
        ({"mp": 0}, "mp", "greater than or equal to 1"),
        ({"weights": None}, "weights", "'bf16' or 'fp8'"),
        ({"max_memory": "much"}, "max_memory", "byte"),
        ({"ray_address": "ray://head:10001"}, "", "ray_address: belongs to task_runner ray"),
        ({"surprise": 1}, "surprise", "Extra inputs"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_path(change, path, message):
    with pytest.raises(ValidationError) as caught:
        ReconvertParameters(**{"repo": REPO, "root": "root", "mp": 2, "weights": "fp8"} | change)
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == [path]
    assert message in caught.value.errors()[0]["msg"]


def test_the_pipeline_gets_all_that_was_said(tmp_path):
    said = {
        "mp": 4, "weights": "bf16", "mtp": "keep", "max_memory": 1 << 30, "workers": 3, "task_runner": "ray",
        "ray_address": "ray://head:10001", "gpu_limit": "gpu", "warm_up_timeout_s": 60.0,
    }  # fmt: skip
    made = ReconvertParameters(repo=REPO, root=tmp_path, **said).pipeline("c" * 40)
    assert made.model_dump(include=set(said)) == said
    assert (made.source, made.revision, made.out) == (REPO, "c" * 40, tmp_path / REPO / ("c" * 40) / "mp4-bf16")
    assert (made.dequantize, made.keep_intermediates) == ("fused", "none")


def test_the_form_has_types_bounds_and_descriptions():
    schema = ReconvertParameters.model_json_schema()
    assert [name for name, field in schema["properties"].items() if "description" not in field] == []
    assert schema["required"] == ["repo", "root", "mp", "weights"]
