"""Files written by threads, processes and a Ray cluster, on a real (temporary) Prefect server."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.runtime import flow_run

from model.checkpoint.build import Resources
from model.checkpoint.convert import convert
from model.checkpoint.dequantize import dequantize
from model.checkpoint.headers import FileStamp
from model.checkpoint.jobs import FileJob, jobs_for
from model.checkpoint.plan import plan_shards
from model.checkpoint.source import open_source
from model.errors import InputError, RunError
from tasks.spreading import Assignment, spread_by
from tests.checkpoints import copy_checkpoint, tree_bytes

pytestmark = pytest.mark.usefixtures("prefect_server")

RUNNERS = ("threads", "processes", "ray")
STAGES = {"convert": lambda *where, **how: convert(*where, mp=4, weights="bf16", **how), "dequantize": dequantize}
WRITTEN = re.compile(r"(.+): written by process (\d+) of ")


class Counted:
    """Progress as numbers: the total and what was done of each phase."""

    def __init__(self):
        self.phases = []

    def phase(self, label, total):
        self.phases.append([label, total, 0])

    def advance(self, size):
        assert size >= 0
        self.phases[-1][2] += size


def run(names, source, out, spread, progress=None):
    """Each stage, in a task of a flow run, into a directory of its name below ``out``; returns the flow run's id."""

    @task(persist_result=False)
    def stage(name):
        resources = Resources(workers=2)
        STAGES[name](source, out / name, resources=resources, progress=progress or Counted(), spread=spread)

    @flow
    def stages():
        for name in names:
            stage(name)
        return flow_run.id

    return stages()


def written(flow_id, count):
    """The file and the process of each line that a worker logged, once ``count`` have come to the server."""
    of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_id]))
    deadline = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        while True:
            lines = [log.message for log in client.read_logs(of_run)]
            found = [match.groups() for line in lines if (match := WRITTEN.match(line))]
            if len(found) >= count or time.monotonic() > deadline:
                return found
            time.sleep(0.5)


@pytest.fixture(scope="module")
def expected(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected")
    for name, work in STAGES.items():
        work(tiny, out / name)
    return tree_bytes(out)


@pytest.fixture(scope="module", autouse=True)
def _ray_s_workers_need_not_import_this_file():
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def two_machines():
    """The address of a Ray cluster of two nodes, of one worker process each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def identity(path):
    return path.stat().st_ino, path.stat().st_mtime_ns


def meeting(spread, at):
    """``spread``, with jobs that begin only where two processes are at work; each leaves its id in ``at``."""

    class Meeting(FileJob):
        def run(self, advance):
            (at / str(os.getpid())).touch()
            deadline = time.monotonic() + 60
            while len(list(at.iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
                advance(0)
            return FileJob.run(self, advance)

    def with_meetings(jobs, advance):
        at.mkdir(exist_ok=True)
        return spread([Meeting(*vars(job).values()) for job in jobs], advance)

    return with_meetings


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_runner_gives_the_same_bytes(tiny, tmp_path, expected, runner, request):
    address = request.getfixturevalue("two_machines") if runner == "ray" else None
    spread = spread_by(runner, 1 if runner == "ray" else 2, address)
    if runner != "threads":
        spread = meeting(spread, tmp_path / "processes")
    progress = Counted()
    flow_id = run(STAGES, tiny, tmp_path / "out", spread, progress)
    assert tree_bytes(tmp_path / "out") == expected
    assert {label for label, _, _ in progress.phases} == {"hash source", "write shards", "dequantise"}
    assert all(done == total for _, total, done in progress.phases)
    shards = sorted(Path(name).name for name in expected if name.endswith(".safetensors"))
    logged = written(flow_id, len(shards))
    assert sorted(name for name, _ in logged) == shards
    pids = {int(pid) for _, pid in logged}
    if runner == "threads":
        assert pids == {os.getpid()}
    else:
        assert os.getpid() not in pids
        assert pids == {int(path.name) for path in (tmp_path / "processes").iterdir()}
        assert len(pids) >= 2


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_failing_file_is_the_project_s_own_error_and_the_rest_is_kept(tiny, tmp_path, expected, runner):
    source = copy_checkpoint(tiny, tmp_path / "source")
    last = source / "model-00007-of-000007.safetensors"
    was = last.stat()
    spread = spread_by(runner, 2)

    def damaging(jobs, advance):
        os.utime(last, ns=(1, 1))
        return spread(jobs, advance)

    out = tmp_path / "dequantize"
    with pytest.raises(RunError, match=r"model-00007-of-000007.safetensors: changed during the run") as raised:
        run(["dequantize"], source, tmp_path, damaging)
    assert len(raised.value.problems) == 1
    assert not out.exists()
    partial = tmp_path / "dequantize.partial"
    kept = {path.name: identity(path) for path in (partial / "files").iterdir()}
    assert {path.name for path in (partial / "done").iterdir()} == {f"{name}.json" for name in kept}
    assert 1 <= len(kept) <= 6
    assert list((partial / "at-work").iterdir()) == []
    os.utime(last, ns=(was.st_atime_ns, was.st_mtime_ns))
    dequantize(source, out)
    assert {name: identity(out / name) for name in kept} == kept
    assert tree_bytes(out) == {
        name.removeprefix("dequantize/"): data for name, data in expected.items() if name.startswith("dequantize/")
    }


def test_a_job_is_as_large_as_what_it_reads(tiny, tmp_path):
    plan = plan_shards(open_source(tiny), mp=1)
    small = replace(plan.files[0], targets=plan.files[0].targets[:1])
    stamps = (*plan.source.headers, *(FileStamp(Path(f"/source/{number}"), 1, 1) for number in range(10_000)))
    (job,) = jobs_for([small], stamps, (128, 128), tmp_path, 1 << 20)
    assert [stamp.path for stamp in job.stamps] == list(small.sources())
    assert len(pickle.dumps(Assignment(job, tmp_path))) < 2000


def test_ray_that_is_not_there_is_named(tiny, tmp_path):
    with pytest.raises(RunError, match=r"ray_address 127.0.0.1:1: no Ray cluster answers: .*refused; check"):
        run(["convert"], tiny, tmp_path, spread_by("ray", 2, "127.0.0.1:1"))
    assert list(tmp_path.iterdir()) == []


def test_ray_that_is_not_installed_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tasks.ray_runner", None)
    with pytest.raises(InputError, match=r"install the extra: pip install 'shardflow\[ray\]'"):
        run(["convert"], tiny, tmp_path, spread_by("ray", 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("runner", ["processes", "ray"])
def test_a_worker_that_is_killed_is_one_clear_error(tiny, tmp_path, runner):
    class Killed(FileJob):
        def run(self, advance):
            os.kill(os.getpid(), signal.SIGKILL)

    spread = spread_by(runner, 2)
    with pytest.raises(
        RunError, match="(a worker process was killed|Ray: .*died).*; run again: finished files are kept"
    ):
        run(["convert"], tiny, tmp_path, lambda jobs, advance: spread([Killed(*vars(jobs[0]).values())], advance))
    assert not (tmp_path / "convert").exists()
    convert(tiny, tmp_path / "convert", mp=4, weights="bf16")


ORPHANED = """
import os, sys, time
from pathlib import Path
from prefect import flow
from model.checkpoint.convert import convert
from model.checkpoint.jobs import FileJob
from tasks.spreading import spread_by

def slow(jobs, advance):
    class Slow(FileJob):
        def run(self, advance):
            print(os.getpid(), flush=True)
            time.sleep(600)
    return spread_by("processes", 1)([Slow(*vars(jobs[0]).values())], advance)

@flow
def stage():
    convert(Path(sys.argv[1]), Path(sys.argv[2]), mp=1, spread=slow)

if __name__ == "__main__":
    stage()
"""


@pytest.mark.long
def test_no_worker_process_outlives_its_killed_run(tiny, tmp_path):
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    with get_client(sync_client=True) as client:
        environment = os.environ | {"PREFECT_API_URL": str(client.api_url), "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(script), str(tiny), str(tmp_path / "out")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}").exists()
    convert(tiny, tmp_path / "out", mp=1)
