"""One server and one worker for all tests of this folder; starting them takes about 20 seconds."""

import sys

import pytest

from tests.integration.processes import HEARTBEAT_S, POOL, prefect


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory):
    """A server with the deployments of prefect.yaml, the limit `gpu`, the zombie automation, and a worker."""
    with prefect(tmp_path_factory.mktemp("team")) as running:
        running.cli("work-pool", "create", POOL, "--type", "process")
        running.cli("gcl", "create", "gpu", "--limit", "1")
        running.run([sys.executable, "-m", "flows.zombies", "--within", str(HEARTBEAT_S + 10)])
        running.cli("--no-prompt", "deploy", "--all")
        running.start_worker()
        yield running
