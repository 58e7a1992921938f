"""One server and one worker for all tests of this folder, set up by the commands of docs/operating.md."""

import pytest

from tests.integration.guide import blocks
from tests.integration.processes import prefect


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory):
    """A server with the deployments of prefect.yaml, the limit `gpu`, the zombie automation, and a worker."""
    server, set_up, worker, *_ = blocks()
    with prefect(tmp_path_factory.mktemp("team")) as running:
        running.start_server(server.command)
        running.run(set_up.command)
        running.lose_patience()
        running.start_worker("worker", worker.command)
        yield running
