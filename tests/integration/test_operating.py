"""The first section of docs/operating.md, command by command; `team` has run those that set everything up."""

import pytest

from tests.integration.guide import blocks, exported

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_the_guide_sets_what_the_tests_set(team):
    assert exported() == {
        "PREFECT_API_URL", "PREFECT_SERVER_ANALYTICS_ENABLED", "DO_NOT_TRACK", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY",
        "CHECKPOINTS",
    }  # fmt: skip
    assert exported() <= team.env.keys()
    assert [block.keeps_running for block in blocks()] == [True, False, True, False, False]


def test_the_set_up_may_be_run_again(team):
    before = sorted(automation["name"] for automation in team.post("/automations/filter", {}))
    team.run(blocks()[1].command)
    assert sorted(automation["name"] for automation in team.post("/automations/filter", {})) == before
    assert len(team.post("/deployments/filter", {})) == 4
    team.lose_patience()


def test_from_the_first_run_to_the_schedule(team):
    first_run, what_follows = (team.run(block.command) for block in blocks()[3:])
    assert "Completed" in first_run
    assert "139 source tensors" in first_run
    assert "cron: 30 2 * * *" in what_follows
