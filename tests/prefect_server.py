"""One Prefect server for all tests that need it: starting it takes about 15 seconds."""

import os

import pytest


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory):
    """A temporary server and database; results go to a folder of the test run, and nothing phones home."""
    settings = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(tmp_path_factory.mktemp("results")),
        "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")),
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def artifacts(key: str) -> list[dict]:
    """All artifacts of a key, the newest first, as the server has them."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    with get_client(sync_client=True) as client:  # by key: the server gives no more than 200 at a time
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    newest = sorted(found, key=lambda artifact: artifact.created, reverse=True)
    return [artifact.model_dump() for artifact in newest]
