"""What all tests share: the trained tiny checkpoint, and caches that belong to the test run alone."""

import os
from pathlib import Path

import pytest

pytest_plugins = ["tests.prefect_server"]

TINY = Path(__file__).parent / "assets" / "tiny-v3"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The trained FP8 checkpoint, read only."""
    return TINY


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Remembered digests of other runs must not decide what a test sees."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
