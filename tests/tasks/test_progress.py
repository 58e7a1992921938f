import logging
import re
import threading

import pytest
from prefect import flow, task

from tasks import progress
from tasks.progress import StageProgress
from tests.prefect_server import artifacts


@task(persist_result=False)
def stage():
    with StageProgress("demo") as shown:
        shown.phase("hash source", 1000)
        threads = [threading.Thread(target=shown.advance, args=(100,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        shown.phase("write shards", 4000)
        shown.advance(1000)
        shown.advance(3000)


@task(persist_result=False)
def failing_stage():
    with StageProgress("failing") as shown:
        shown.phase("write shards", 4000)
        shown.advance(1000)
        raise ValueError("no")


@flow
def one_stage():
    stage()


@flow
def one_failing_stage():
    failing_stage()


@pytest.mark.usefixtures("prefect_server")
def test_log_and_artifact_say_what_how_far_how_fast_and_how_long(monkeypatch, caplog):
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO)
    one_stage()
    lines = [record.getMessage() for record in caplog.records]
    assert "hash source: 1.0 kB to go" in lines
    assert any(re.fullmatch(r"hash source: 1\.0 kB in \d+\.\d s", line) for line in lines)
    assert any(re.fullmatch(r"write shards: 25 % of 4\.0 kB, .+/s, \d+ s left", line) for line in lines)
    newest, first = artifacts("demo-progress")[:2]
    assert (first["description"], first["data"]) == ("hash source: 1.0 kB", 100.0)
    assert (newest["description"], newest["data"]) == ("write shards: 4.0 kB", 100.0)


@pytest.mark.usefixtures("prefect_server")
def test_a_failed_stage_does_not_claim_to_be_complete():
    with pytest.raises(ValueError, match="no"):
        one_failing_stage()
    assert artifacts("failing-progress")[0]["data"] == 0.0
