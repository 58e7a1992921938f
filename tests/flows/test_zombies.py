"""The zombie automation: what it watches for, and that it is there once however often the script runs."""

from datetime import timedelta

import pytest
import typer
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from typer.testing import CliRunner

from flows import zombies


@pytest.fixture(scope="module")
def command():
    app = typer.Typer()
    app.command()(zombies.main)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def ours() -> list[Automation]:
    with get_client(sync_client=True) as client:
        return [found for found in client.read_automations() if found.name == zombies.NAME]


@pytest.mark.usefixtures("prefect_server")
def test_run_twice_there_is_one_with_the_last_settings(command):
    assert command().output == f"created: automation {zombies.NAME!r}, within 90 s\n"
    (first,) = ours()
    assert command("--within", "45").output == f"updated: automation {zombies.NAME!r}, within 45 s\n"
    (second,) = ours()
    assert (first.id, first.trigger.within) == (second.id, timedelta(seconds=90))
    assert second.trigger.within == timedelta(seconds=45)
    assert second.enabled


def test_a_heartbeat_must_follow_a_heartbeat_unless_the_run_has_ended():
    made = zombies.zombie_automation(timedelta(seconds=60))
    assert made.trigger.after == {"prefect.flow-run.heartbeat"}
    assert made.trigger.expect >= {
        "prefect.flow-run.heartbeat",
        "prefect.flow-run.Completed",
        "prefect.flow-run.Failed",
    }
    assert made.trigger.for_each == {"prefect.resource.id"}
    (action,) = made.actions
    assert (action.type, action.state) == ("change-flow-run-state", "CRASHED")


def test_a_time_shorter_than_a_heartbeat_is_refused(command):
    refused = command("--within", "30")
    assert refused.exit_code == 2
    assert "31" in refused.output
