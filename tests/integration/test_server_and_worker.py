"""What a team does, against a real Prefect server and worker: deploy, run, cancel, lose a machine, share a GPU."""

import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from model.checkpoint.verify import verify
from tests.hub_server import HubServer
from tests.integration.guide import blocks
from tests.integration.processes import wait_for
from tests.random_checkpoints import large_family, write_random

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DEPLOYMENTS = {
    "checkpoint-pipeline/tiny",
    "checkpoint-pipeline/deepseek-v3",
    "reconvert/nightly",
    "evaluate/on-new-checkpoint",
}


def test_everything_is_deployed_with_its_schedule_limit_and_trigger(team):
    found = {}
    for deployment in team.post("/deployments/filter", {}):
        flow = team.get(f"/flows/{deployment['flow_id']}")["name"]
        found[f"{flow}/{deployment['name']}"] = deployment
    assert found.keys() == DEPLOYMENTS
    nightly = found["reconvert/nightly"]
    (schedule,) = nightly["schedules"]
    assert (schedule["slug"], schedule["active"]) == ("nightly", True)
    assert schedule["schedule"]["cron"] == "30 2 * * *"
    assert schedule["schedule"]["timezone"] == "Europe/Berlin"
    assert nightly["global_concurrency_limit"]["limit"] == 1
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    runs = wait_for(lambda: team.runs_of("reconvert"), 30, "the scheduler plans runs")
    planned = [datetime.fromisoformat(run["expected_start_time"]) for run in runs]
    local = [moment.astimezone(ZoneInfo("Europe/Berlin")) for moment in planned]
    assert {(moment.hour, moment.minute) for moment in local} == {(2, 30)}
    evaluation = found["evaluate/on-new-checkpoint"]
    owned = [a for a in team.post("/automations/filter", {}) if a["name"] == "evaluate each new checkpoint"]
    (automation,) = owned
    assert automation["enabled"]
    assert automation["trigger"]["expect"] == ["prefect.asset.materialization.succeeded"]
    assert automation["trigger"]["match"] == {"prefect.resource.id": "shardflow://checkpoint/*"}
    (action,) = automation["actions"]
    assert (action["type"], action["deployment_id"]) == ("run-deployment", evaluation["id"])
    assert action["parameters"] == {"params": {"checkpoint": "{{ event.payload.checkpoint }}", "gpu_limit": "gpu"}}
    forms = {name: deployment["parameter_openapi_schema"]["definitions"] for name, deployment in found.items()}
    assert forms["reconvert/nightly"]["ReconvertParameters"]["properties"]["keep"]["minimum"] == 1


@pytest.mark.parametrize(
    ("deployment", "change", "path"),
    [
        ("checkpoint-pipeline/tiny", {"mp": 0}, "params.mp"),
        ("reconvert/nightly", {"keep": 0}, "params.keep"),
    ],
)
def test_a_wrong_parameter_is_refused_with_its_path(team, deployment, change, path):
    found = team.get(f"/deployments/name/{deployment}")
    params = found["parameters"]["params"] | change
    before = len(team.runs_of(deployment.partition("/")[0]))
    answer = team.client.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": {"params": params}})
    assert answer.status_code == 409
    assert f"'{path}'" in answer.json()["detail"]
    assert len(team.runs_of(deployment.partition("/")[0])) == before


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 160 MB of FP8 weights: written in seconds, and long enough to be met in the middle."""
    return write_random(large_family(), tmp_path_factory.mktemp("large") / "source")


@pytest.fixture
def no_evaluation(team):
    """Checkpoints that are published meanwhile start no evaluation."""
    (automation,) = [a for a in team.post("/automations/filter", {}) if a["name"] == "evaluate each new checkpoint"]
    team.patch(f"/automations/{automation['id']}", {"enabled": False})
    yield
    team.patch(f"/automations/{automation['id']}", {"enabled": True})


def tiny_params(tiny: Path, out: Path) -> dict[str, Any]:
    return {"source": str(tiny), "out": str(out), "mp": 2, "weights": "bf16", "dequantize": "fused"}


def large_params(large: Path, out: Path) -> dict[str, Any]:
    """One file after the other, so that the second is at work when the first is finished."""
    return {"source": str(large), "out": str(out), "mp": 2, "weights": "bf16", "dequantize": "fused", "workers": 1}


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def stop_in_mid_conversion(team, run: str, place: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Freeze a flow run when its first shard is finished; returns its process and the identity of that shard."""
    process = team.flow_process(run)
    (note,) = wait_for(lambda: list(place.glob("*.partial/done/*.json")), 60, "the first shard is finished", 0.002)
    os.kill(process, signal.SIGSTOP)
    shard = note.parents[1] / "files" / note.name.removesuffix(".json")
    assert not (place / "out").exists()
    assert list(place.glob("*.partial/done/*.json")) == [note], "frozen too late: the second is finished, too"
    return process, {shard.name: identity(shard)}


def check_resumed(team, params: dict[str, Any], finished: dict[str, tuple[int, int]]) -> None:
    """A run with the same parameters goes on with what is missing, and ends with a proven checkpoint."""
    team.wait(team.start_run("checkpoint-pipeline/tiny", params))
    out = Path(params["out"])
    assert {name: identity(out / name) for name in finished} == finished, "a finished shard was written again"
    assert verify(out, Path(params["source"])).files > 0
    assert list(out.parent.glob("*.partial")) == []


def test_a_new_checkpoint_is_evaluated_once_and_a_cached_rerun_not_at_all(team, tiny, tmp_path):
    first, second = tiny_params(tiny, tmp_path / "first & 'best'"), tiny_params(tiny, tmp_path / "second")
    given = f"params={json.dumps(first)}"
    assert "Completed" in team.cli("deployment", "run", "checkpoint-pipeline/tiny", "--param", given, "--watch")
    again = team.start_run("checkpoint-pipeline/tiny", first)
    team.wait(again)
    stages = dict.fromkeys(("convert", "validate", "publish", "warm_up"), "Cached")
    wait_for(lambda: stages.items() <= team.task_states(again).items(), 20, "all stages of the re-run are cached")
    team.wait(team.start_run("checkpoint-pipeline/tiny", second))

    def evaluations() -> dict[str, str]:
        found = {run["id"]: run["parameters"]["params"]["checkpoint"] for run in team.runs_of("evaluate")}
        return {run: checkpoint for run, checkpoint in found.items() if checkpoint.startswith(str(tmp_path))}

    # Events are worked through in order: an evaluation of the re-run would stand before that of the second.
    wait_for(lambda: second["out"] in evaluations().values(), 90, "the evaluation of the second checkpoint begins")
    assert sorted(evaluations().values()) == [first["out"], second["out"]]
    for run, checkpoint in evaluations().items():
        team.wait(run)
        assert (Path(checkpoint) / "evaluation.json").exists()
    events = team.events("prefect.asset.materialization.succeeded")
    mine = [event for event in events if event["payload"]["checkpoint"].startswith(str(tmp_path))]
    assert [event["payload"]["checkpoint"] for event in mine] == [first["out"], second["out"]]
    assert mine[0]["resource"]["prefect.resource.id"].startswith("shardflow://checkpoint/")
    assert mine[0]["payload"].keys() == {"checkpoint", "mp", "weights", "manifest_sha256"}


@pytest.mark.usefixtures("no_evaluation")
def test_a_branch_is_followed_by_the_nightly_deployment(team, tiny, tmp_path):
    latest = tmp_path / "org" / "tiny" / "latest"
    params = {"repo": "org/tiny", "root": str(tmp_path), "mp": 1, "weights": "fp8", "keep": 1, "gpu_limit": "gpu"}
    with HubServer() as hub:

        def follow() -> str:
            run = team.start_run("reconvert/nightly", params, {"HF_ENDPOINT": hub.endpoint})
            team.wait(run)
            return run

        commit = hub.add("org/tiny", tiny)
        follow()
        assert latest.readlink() == Path(commit, "mp1-fp8")
        hub.clear()
        again = follow()
        wait_for(lambda: "nothing to do: main stands for" in team.run_log(again), 20, "the log says so")
        assert hub.fetched() == set()
    assert verify(latest, tiny).source_tensors == 259


@pytest.mark.usefixtures("no_evaluation")
def test_cancelled_in_mid_conversion_nothing_half_written_stays_and_the_next_run_resumes(team, large, tmp_path):
    params = large_params(large, tmp_path / "out")
    run = team.start_run("checkpoint-pipeline/tiny", params)
    process, finished = stop_in_mid_conversion(team, run, tmp_path)
    team.cli("flow-run", "cancel", run)
    wait_for(lambda: asked_to_end(process), 60, "the worker asks the flow's process to end")
    os.kill(process, signal.SIGCONT)
    team.wait(run, want="CANCELLED")
    wait_for(lambda: process not in team.processes(), 30, "the flow's process ends")
    assert {path.suffix for path in tmp_path.iterdir()} <= {".partial", ".work"}
    check_resumed(team, params, finished)


def asked_to_end(process: int) -> bool:
    """Whether SIGTERM waits for a frozen process, or SIGKILL has ended it."""
    status = Path(f"/proc/{process}/status")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
    return not lines or lines["State"].split()[0] == "Z" or bool(int(lines["ShdPnd"], 16) & 1 << (signal.SIGTERM - 1))


@pytest.mark.usefixtures("no_evaluation")
def test_a_killed_flow_takes_its_ranks_along_and_a_lost_machine_is_noticed(team, tiny, large, tmp_path):
    params = large_params(large, tmp_path / "out")
    lost = team.start_run("checkpoint-pipeline/tiny", params)
    process, finished = stop_in_mid_conversion(team, lost, tmp_path)
    team.worker.kill()
    team.worker.wait()
    os.kill(process, signal.SIGKILL)
    team.start_worker("second worker", blocks()[2].command)
    assert team.state(lost) == "RUNNING", "nobody can know yet"

    killed = team.start_run("checkpoint-pipeline/tiny", tiny_params(tiny, tmp_path / "tiny"))
    wait_for(lambda: len(team.processes("model.warmup")) >= 2, 90, "the ranks of the warm-up run", 0.05)
    os.kill(team.flow_process(killed), signal.SIGKILL)
    wait_for(lambda: not team.processes("model.warmup"), 15, "no rank outlives its flow")
    team.wait(killed, want="CRASHED")

    team.wait(lost, want="CRASHED")
    assert "its heartbeat was lost" in team.get(f"/flow_runs/{lost}")["state"]["message"]
    assert not (tmp_path / "out").exists()
    check_resumed(team, params, finished)


@pytest.mark.usefixtures("no_evaluation")
def test_a_cancelled_flow_takes_its_ranks_along(team, tiny, tmp_path):
    """The ranks are frozen, so that the warm-up lasts until the cancelling arrives, and cannot end by themselves."""
    run = team.start_run("checkpoint-pipeline/tiny", tiny_params(tiny, tmp_path / "out"))
    ranks = wait_for(lambda: len(found := team.processes("model.warmup")) >= 2 and found, 90, "the ranks run", 0.05)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    team.cli("flow-run", "cancel", run)
    team.wait(run, want="CANCELLED")
    wait_for(lambda: not team.processes("model.warmup"), 60, "no rank outlives its cancelled flow")


@pytest.mark.usefixtures("no_evaluation")
def test_two_warm_ups_have_the_gpu_one_after_the_other(team, tiny, tmp_path):
    outs = [str(tmp_path / name) for name in ("one", "two")]
    slot = {"names": ["gpu"], "slots": 1, "mode": "concurrency"}
    team.post("/v2/concurrency_limits/increment", slot)
    runs = [
        team.start_run("checkpoint-pipeline/tiny", tiny_params(tiny, Path(out)) | {"gpu_limit": "gpu"}) for out in outs
    ]
    for run in runs:
        wait_for(lambda run=run: team.task_states(run).get("warm_up") == "Running", 90, "a warm-up waits for the GPU")
    assert team.processes("model.warmup") == {}, "the GPU is taken"
    team.post("/v2/concurrency_limits/decrement", slot)

    seen = set()
    while any(team.state(run) == "RUNNING" for run in runs):
        commands = team.processes("model.warmup").values()
        warming = {out for out in outs for command in commands if f" {out} " in command}
        assert len(warming) <= 1, "two have the GPU at once"
        seen |= warming
        time.sleep(0.05)
    assert seen == set(outs)
    for run in runs:
        team.wait(run)
