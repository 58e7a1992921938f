"""What a team does, against a real Prefect server and worker: deploy, run, cancel, lose a machine, share a GPU."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from tests.integration.processes import wait_for

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
    planned = [
        run["expected_start_time"] for run in wait_for(lambda: team.runs_of("reconvert"), 30, "runs are planned")
    ]
    local = [datetime.fromisoformat(time).astimezone(ZoneInfo("Europe/Berlin")) for time in planned]
    assert {(time.hour, time.minute) for time in local} == {(2, 30)}
    evaluation = found["evaluate/on-new-checkpoint"]
    owned = [a for a in team.post("/automations/filter", {}) if a["name"] == "evaluate each new checkpoint"]
    (automation,) = owned
    assert automation["enabled"]
    assert automation["trigger"]["expect"] == ["prefect.asset.materialization.succeeded"]
    assert automation["trigger"]["match"] == {"prefect.resource.id": "shardflow://checkpoint/*"}
    (action,) = automation["actions"]
    assert (action["type"], action["deployment_id"]) == ("run-deployment", evaluation["id"])
    assert action["parameters"] == {"params": {"checkpoint": "{{ event.payload.checkpoint }}"}}
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
    answer = team.client.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": {"params": params}})
    assert answer.status_code == 409
    assert f"'{path}'" in answer.json()["detail"]
    assert {run["state_type"] for run in team.runs_of(deployment.partition("/")[0])} <= {"SCHEDULED"}
