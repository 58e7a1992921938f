"""What workers in other processes tell, and when they stop."""

import pytest
import torch

from model.checkpoint import tally
from model.checkpoint.build import work_directory
from model.checkpoint.headers import TensorInfo
from model.checkpoint.jobs import FileJob
from model.checkpoint.layout import FilePlan, Piece, Target
from model.checkpoint.tally import DIRECTORY, Desk, Tally
from model.checkpoint.writer import ShardWriter
from model.errors import RunError


@pytest.fixture(autouse=True)
def _every_word_is_told(monkeypatch):
    monkeypatch.setattr(tally, "INTERVAL_S", 0.0)


def file_job(partial, name, size):
    tensor = TensorInfo("t", "U8", (size,), partial / "source", 0, size)
    return FileJob(FilePlan(name, (Target("t", "U8", (size,), (Piece(tensor),)),)), (), (1, 1), partial, 1 << 20)


def test_what_is_told_adds_up_to_the_total(tmp_path):
    jobs, seen = [file_job(tmp_path, "a", 100), file_job(tmp_path, "b", 50), file_job(tmp_path, "c", 7)], []
    with Tally(jobs, seen.append) as told:
        first, second = Desk(told.path(jobs[0])), Desk(told.path(jobs[1]))
        told.read()
        first.advance(30)
        second.advance(20)
        told.read()
        told.read()
        first.advance(70)
        told.finish(jobs[0])
        second.advance(1)
        told.path(jobs[1]).write_text("5")  # an old word, as storage that machines share may give
        told.read()
        told.finish(jobs[1])
        told.finish(jobs[2])
    assert seen == [30, 20, 70, 30, 7]
    assert list((tmp_path / DIRECTORY).iterdir()) == []


def test_a_worker_stops_where_its_run_is_over(tmp_path):
    job = file_job(tmp_path, "a", 100)
    with Tally([job], print) as told:
        desk = Desk(told.path(job))
        desk.advance(1)
    with pytest.raises(RunError, match="stopped: another worker failed or the run was interrupted"):
        desk.advance(1)


def test_a_later_run_stops_the_workers_of_a_killed_one(tmp_path):
    partial = tmp_path / "out.partial"
    job = file_job(partial, "a", 100)
    killed = Tally([job], print).__enter__()
    desk = Desk(killed.path(job))
    desk.advance(1)
    with work_directory(tmp_path / "out", {}), pytest.raises(RunError, match="stopped: another worker"):
        desk.advance(1)


def test_a_killed_run_s_writer_never_takes_a_later_one_s_place(tmp_path):
    """The later run removes what the first has begun, and writes the same name; the first goes on all the while."""
    partial = tmp_path / "out.partial"
    job = file_job(partial, "a", 4)
    path = partial / "files" / "a"
    path.parent.mkdir(parents=True)
    orphan = ShardWriter(path, job.plan)
    orphan.__enter__()
    orphan.append(torch.zeros(4, dtype=torch.uint8))
    with work_directory(tmp_path / "out", {}):
        assert list(path.parent.iterdir()) == []
        with ShardWriter(path, job.plan) as later:
            with pytest.raises(RunError, match="a: No such file or directory"):
                orphan.__exit__(None, None, None)
            assert not path.exists()
            later.append(torch.ones(4, dtype=torch.uint8))
        assert path.read_bytes()[-4:] == bytes([1, 1, 1, 1])
