"""Ranks that this project starts: what they are told, whose status counts, and that none outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model import launch, ranks
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


def test_a_killed_rank_s_last_words_are_kept():
    with pytest.raises(RunError) as caught:
        start_ranks(SCRIPT, ["die"], 3, timeout=50, capture=True)
    assert caught.value.problems == (
        "rank 1 of 3 was ended by SIGKILL; did the host run out of memory?",
        "the ranks' last words: on the brink",
    )


def test_a_signal_without_a_name_has_its_number():
    with pytest.raises(RunError, match=r"^rank 0 of 1 was ended by signal 40$"):
        start_ranks(SCRIPT, ["die_strangely"], 1, timeout=50)


def test_ranks_that_take_too_long_are_ended(tmp_path):
    before = children()
    with pytest.raises(RunError, match=r"^the 2 ranks were not done after 0\.5 s$"):
        start_ranks(SCRIPT, ["linger", str(tmp_path)], 2, timeout=0.5)
    assert children() == before


class Ended:
    """A rank that ends with ``status``, or that only SIGKILL ends."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self.signals: list[str] = []

    def poll(self) -> int | None:
        return self.status

    def send_signal(self, number: int) -> None:
        self.signals.append(signal.Signals(number).name)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.status = -signal.SIGKILL

    def wait(self) -> int:
        assert self.status is not None, "would wait for ever"
        return self.status


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([0, 0], 0), ([None, 1], 1), ([1, 2, None], 2), ([-signal.SIGABRT, 2], 2), ([130, -signal.SIGINT], 130)],
)
def test_the_status_that_the_ranks_agreed_on_counts(statuses, expected):
    assert launch._wait([Ended(status) for status in statuses], None) == expected


def test_a_rank_that_fails_since_another_was_killed_does_not_hide_that():
    with pytest.raises(RunError, match="rank 1 of 2 was ended by SIGKILL"):
        launch._wait([Ended(1), Ended(-signal.SIGKILL)], None)


def test_ranks_that_do_not_end_share_one_time_of_grace(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(launch, "time", clock)
    stubborn = [Ended(None) for _ in range(3)]
    launch._end(stubborn)
    assert [rank.signals for rank in stubborn] == [["SIGTERM", "SIGKILL"]] * 3
    assert launch.GRACE_S <= clock.now < 1.1 * launch.GRACE_S


@pytest.mark.parametrize(
    ("ending", "status", "last_line"),
    [
        ("pass", 0, None),
        ("raise ValueError('own mistake')", 1, "ValueError: own mistake"),
        ("raise SystemExit('enough')", 1, "enough"),
        ("raise InputError('bad prompt')", 2, "error: rank 0: bad prompt"),
        ("raise KeyboardInterrupt", 130, None),
    ],
)
def test_a_rank_ends_at_once_with_the_status_of_its_work(shards, monkeypatch, capfd, ending, status, last_line):
    monkeypatch.setenv("ENDING", ending)
    checkpoint = shards("tiny-v3", 2)
    assert launch.start_ranks(SCRIPT, ["work", str(checkpoint)], 2, timeout=100).returncode == status
    out, err = capfd.readouterr()
    assert out.startswith("worked")
    assert "the interpreter was taken apart" not in out
    assert err.splitlines()[-1:] == ([last_line] if last_line else [])


def test_a_program_s_own_answer_to_sigterm_is_left_alone():
    def own(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, own)
    try:
        with launch._sigterm_raises():
            assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(launch.Terminated), launch._sigterm_raises():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


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


def test_ranks_agree_on_errors_which_rank_0_prints_once(tmp_path):
    done = start_ranks(SCRIPT, ["disagree", str(tmp_path)], 3, timeout=100, capture=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [
        "error: shard 1 is bad",
        "error: both know",
    ]
    assert "Traceback" not in done.stderr
    # A group that outlives its context aborts the process, sometimes, when the interpreter ends.
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"rank0": "0", "rank1": "0", "rank2": "0"}


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
