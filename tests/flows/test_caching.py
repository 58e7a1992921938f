"""Which stages of a second run are taken from the cache, and which run again because the disk says otherwise."""

import os
import shutil

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings

from flows.parameters import PipelineParameters
from flows.pipeline import checkpoint_pipeline
from model.errors import InputError
from tasks.caching import STAGE_VERSIONS
from tests.checkpoints import copy_checkpoint, tensor_bytes
from tests.hub_server import HubServer, make_it_the_hub, quick_client
from tests.random_checkpoints import small_family, write_random

STAGED = ["plan", "dequantize", "convert", "validate", "publish", "release_intermediates", "warm_up"]
FROM_THE_HUB = ["download", *STAGED]
SHARD = "out/model1-mp2.safetensors"
BF16_FILE = "out.work/bf16/source/model-00002-of-000007.safetensors"

pytestmark = pytest.mark.usefixtures("prefect_server")


def run(params, **changes):
    """The stages of a run that did work, and those that were cached, each in order."""
    params = PipelineParameters(**params.model_dump() | changes)
    state = checkpoint_pipeline(params, return_state=True)
    state.result()
    flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        tasks = sorted(client.read_task_runs(flow_run_filter=flow_run), key=lambda task: task.expected_start_time)
    stages = [task for task in tasks if not task.task_key.startswith(("resolve_revision", "write_file"))]
    names = {task.task_key.split(".")[-1].split("-")[0].lstrip("_"): task.state.name for task in stages}
    worked = [name for name, state in names.items() if state == "Completed"]
    cached = [name for name, state in names.items() if state == "Cached"]
    assert len(worked) + len(cached) == len(names), names
    return worked, cached


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path_factory):
    """Results of other tests, whose copies of the same source have the same fingerprint, do not count."""
    with temporary_settings({PREFECT_RESULTS_LOCAL_STORAGE_PATH: tmp_path_factory.mktemp("results")}):
        yield


@pytest.fixture
def params(tiny, tmp_path):
    source = copy_checkpoint(tiny, tmp_path / "source")
    return PipelineParameters(source=str(source), out=tmp_path / "out", mp=2, weights="bf16")


def delete(path):
    path.unlink()


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def replace_by_another(path):
    path.unlink()
    path.write_bytes(b"another file of another size")


@pytest.mark.parametrize(("lost", "first_again"), [(SHARD, "convert"), (BF16_FILE, "dequantize")])
def test_a_lost_output_runs_its_stage_and_those_after_it_again(params, tmp_path, lost, first_again):
    assert run(params) == (STAGED, [])
    before = tensor_bytes(tmp_path / SHARD)
    assert run(params) == ([], STAGED)
    at = STAGED.index(first_again)
    for damage in (delete, truncate, replace_by_another):
        damage(tmp_path / lost)
        assert run(params) == (STAGED[at:], STAGED[:at]), damage
        assert tensor_bytes(tmp_path / SHARD) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.work", "source"]


def test_a_raised_stage_version_and_a_changed_parameter_are_misses(params, monkeypatch):
    assert run(params, dequantize="fused") == ([stage for stage in STAGED if stage != "dequantize"], [])
    fused = [stage for stage in STAGED if stage != "dequantize"]
    assert run(params, dequantize="fused", workers=1, max_memory=1 << 30) == ([], fused)
    assert run(params, dequantize="fused", keep_intermediates="none") == (
        ["release_intermediates"],
        [stage for stage in fused if stage != "release_intermediates"],
    )
    monkeypatch.setitem(STAGE_VERSIONS, "validate", STAGE_VERSIONS["validate"] + 1)
    assert run(params, dequantize="fused") == (fused[2:], fused[:2])


def test_a_source_that_changes_in_place_is_never_a_cached_success(params, tmp_path):
    run(params, dequantize="fused")
    weights = tmp_path / "source" / "model-00002-of-000007.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InputError, match=r"out: holds a checkpoint that differs in source; choose another place"):
        run(params, dequantize="fused")


def test_released_intermediates_count_while_the_checkpoint_is_whole(tiny, tmp_path, monkeypatch):
    with HubServer() as hub:
        quick_client(monkeypatch)
        make_it_the_hub(monkeypatch, hub.endpoint)
        hub.add("org/tiny", tiny)
        params = PipelineParameters(
            source="org/tiny", out=tmp_path / "out", mp=2, weights="bf16", keep_intermediates="none"
        )
        assert run(params) == (FROM_THE_HUB, [])
        assert not list((tmp_path / "out.work").rglob("*.safetensors"))
        assert len(list((tmp_path / "out.work").rglob("*.released.json"))) == 2
        assert run(params) == ([], FROM_THE_HUB)
        os.truncate(tmp_path / SHARD, 100)
        assert run(params) == (FROM_THE_HUB, [])
        assert run(params) == ([], FROM_THE_HUB)


def test_keep_bf16_releases_the_download_alone(tiny, tmp_path, monkeypatch):
    with HubServer() as hub:
        quick_client(monkeypatch)
        make_it_the_hub(monkeypatch, hub.endpoint)
        commit = hub.add("org/tiny", tiny)
        params = PipelineParameters(
            source="org/tiny", out=tmp_path / "out", mp=2, weights="bf16", keep_intermediates="bf16"
        )
        run(params)
        work = tmp_path / "out.work"
        assert not (work / "hub" / "org--tiny" / commit).exists()
        assert (work / "bf16" / "org--tiny" / commit / "dequantized.json").exists()
        # A lost file of what was kept needs what was not.
        truncate(work / "bf16" / "org--tiny" / commit / "model-00002-of-000007.safetensors")
        assert run(params) == (FROM_THE_HUB, [])
        # A raised version of a stage that reads the download needs it again.
        monkeypatch.setitem(STAGE_VERSIONS, "validate", STAGE_VERSIONS["validate"] + 1)
        worked, cached = run(params)
        assert (worked[:2], cached) == (["download", "plan"], [])


def test_a_new_commit_is_a_miss(tmp_path, monkeypatch):
    with HubServer() as hub:
        quick_client(monkeypatch)
        make_it_the_hub(monkeypatch, hub.endpoint)
        hub.add("org/small", write_random(small_family(), tmp_path / "one", seed=1))
        params = PipelineParameters(source="org/small", out=tmp_path / "out", mp=1, weights="fp8")
        run(params)
        hub.add("org/small", write_random(small_family(), tmp_path / "two", seed=2))
        with pytest.raises(InputError, match="differs in source"):
            run(params)
        shutil.rmtree(tmp_path / "out")
        fp8 = [stage for stage in FROM_THE_HUB if stage != "dequantize"]
        assert run(params) == (fp8[2:], fp8[:2])  # the refused run had come that far
