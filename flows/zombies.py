"""The automation that ends zombies: ``python -m flows.zombies [--within SECONDS]``, once for each Prefect server.

A worker marks a flow run whose process dies. Where the machine or the worker itself dies, nobody does, and the run
would stay RUNNING and hold its concurrency slots. This automation marks it CRASHED once its heartbeat is missing.
"""

from datetime import timedelta
from typing import Annotated

import typer
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

NAME = "heartbeat lost: mark the run crashed"
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDED = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended")
"""After these states no heartbeat is due."""

LEAST_S = 31
"""No heartbeat comes more often than every 30 s: the least that PREFECT_FLOWS_HEARTBEAT_FREQUENCY may be."""


def zombie_automation(within: timedelta) -> Automation:
    """An automation that marks a flow run as crashed when ``within`` passes after a heartbeat without another."""
    return Automation(
        name=NAME,
        description=f"A flow run whose heartbeat is missing for {within.total_seconds():g} s has lost its process.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={HEARTBEAT},
            expect={HEARTBEAT, *(f"prefect.flow-run.{state}" for state in ENDED)},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            for_each={"prefect.resource.id"},
            threshold=1,
            within=within,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="its heartbeat was lost; run it again to resume")],
    )


def ensure(automation: Automation) -> str:
    """Create ``automation`` on the server, or update the one of its name; returns which of the two was done."""
    with get_client(sync_client=True) as client:
        found = client.read_automations_by_name(automation.name)
    if not found:
        automation.create()
        return "created"
    automation.id = found[0].id
    automation.update()
    return "updated"


def main(
    within: Annotated[
        int, typer.Option(min=LEAST_S, help="Seconds without a heartbeat: three times the workers' frequency.")
    ] = 90,
) -> None:
    """Mark flow runs as crashed when their heartbeat is lost."""
    done = ensure(zombie_automation(timedelta(seconds=within)))
    print(f"{done}: automation {NAME!r}, within {within} s")


if __name__ == "__main__":
    typer.run(main)
