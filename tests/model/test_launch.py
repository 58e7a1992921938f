"""Ranks that this project starts: what they are told, whose status counts, and that none outlives its parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model import ranks
from model.errors import InputError, RunError
from model.launch import start_ranks

SCRIPT = "tests.model.rank_script"


def test_each_rank_is_told_its_place_and_output_is_captured(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    done = start_ranks(SCRIPT, ["say"], 3, capture=True)
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3, threads {threads}" for rank in range(3)]
    assert done.stderr.splitlines() == ["a log line"] * 3


def test_own_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "threads 5" in start_ranks(SCRIPT, ["say"], 1, capture=True).stdout


def test_status_of_the_rank_that_failed_counts_and_the_others_are_ended():
    assert start_ranks(SCRIPT, ["refuse_on_the_last"], 3, timeout=50).returncode == 2


def test_a_killed_rank_is_named():
    with pytest.raises(RunError, match=r"^rank 1 of 3 was ended by SIGKILL; did the host run out of memory\?$"):
        start_ranks(SCRIPT, ["die"], 3, timeout=50)


def test_ranks_that_take_too_long_are_ended(tmp_path):
    before = children()
    with pytest.raises(RunError, match=r"^the 2 ranks were not done after 0\.5 s$"):
        start_ranks(SCRIPT, ["linger", str(tmp_path)], 2, timeout=0.5)
    assert children() == before


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    program = f"from model.launch import start_ranks; start_ranks({SCRIPT!r}, ['linger', {str(tmp_path)!r}], 2)"
    launcher = subprocess.Popen([sys.executable, "-c", program])
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    launcher.kill()
    launcher.wait()
    wait_until(lambda: all(has_ended(int(file.read_text())) for file in files))


def test_a_rank_whose_parent_is_already_gone_ends_at_once(tmp_path):
    environment = os.environ | {"RANK": "0", ranks.PARENT: "1"}
    ended = subprocess.run([sys.executable, "-m", SCRIPT, "linger", str(tmp_path)], env=environment, check=False)
    assert ended.returncode == 1
    assert not list(tmp_path.iterdir())


def test_ranks_agree_on_errors_which_rank_0_prints_once():
    done = start_ranks(SCRIPT, ["disagree"], 3, timeout=100, capture=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [
        "error: shard 1 is bad",
        "error: both know",
    ]
    assert "Traceback" not in done.stderr


def test_wrong_number_of_ranks_is_answered_with_the_launch_line():
    ranks.check_world_size(2, 2, Path("ckpt"), "model.generate", [])
    with pytest.raises(InputError) as caught:
        ranks.check_world_size(1, 4, Path("ckpt"), "model.generate", ["ckpt", "--prompt", "Who's there?"])
    assert caught.value.problems == (
        "ckpt: holds shards for 1 rank (mp = 1), but 4 ranks were started; start it with: "
        "torchrun --nproc-per-node 1 -m model.generate ckpt --prompt 'Who'\"'\"'s there?'",
    )


@pytest.mark.parametrize(
    ("device", "gpus", "ranks_here", "expected"),
    [
        ("cpu", 8, 2, "cpu"),
        ("auto", 0, 2, "cpu"),
        ("auto", 4, 4, "cuda:3"),
        ("cuda", 8, 4, "cuda:3"),
    ],
)
def test_each_rank_of_a_host_has_a_gpu_of_its_own(device, gpus, ranks_here, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert str(ranks.pick_device(device, ranks_here)) == expected


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("cuda", 1), ("cuda", 0)])
def test_too_few_gpus_are_refused(device, gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(InputError, match=rf"a GPU for each of this host's ranks \(2\), and torch finds {gpus}"):
        ranks.pick_device(device, 2)


def children() -> set[str]:
    """Process ids of what this process has started and not yet seen end."""
    return {child for file in Path("/proc/self/task").glob("*/children") for child in file.read_text().split()}


def has_ended(process: int) -> bool:
    """Gone, or dead and waiting for whoever adopted it to notice."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def wait_until(condition, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.05)
