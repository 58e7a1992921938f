"""Killed, starved of disk and memory: what is left, and what the next run makes of it."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from model.checkpoint.build import Resources
from model.checkpoint.convert import convert
from model.checkpoint.dequantize import dequantize
from model.checkpoint.verify import verify
from model.errors import InputError, RunError
from tests.checkpoints import tree_bytes
from tests.random_checkpoints import large_family, write_random

KILLS = 30
MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """About 160 MB of FP8 weights in 8 files, so that a conversion lasts long enough to be killed in every phase."""
    return write_random(large_family(), tmp_path_factory.mktemp("large") / "source")


STAGES = {
    "convert": lambda source, out: convert(source, out, mp=4, weights="bf16", resources=Resources(workers=2)),
    "dequantize": lambda source, out: dequantize(source, out, resources=Resources(workers=2)),
}

RUN = """
import sys
from pathlib import Path
from model.checkpoint.build import Resources
from model.checkpoint.convert import convert
from model.checkpoint.dequantize import dequantize
stage, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
if stage == "convert":
    convert(source, out, mp=4, weights="bf16", resources=Resources(workers=2))
else:
    dequantize(source, out, resources=Resources(workers=2))
"""


def begin(stage: str, source: Path, out: Path) -> subprocess.Popen:
    """A process that has imported everything and waits for a line to start."""
    command = [sys.executable, "-c", RUN, stage, str(source), str(out)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finished_files(partial: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of the files that a run has noted as finished."""
    noted = [path.name.removesuffix(".json") for path in (partial / "done").glob("*.json")]
    return {name: identity(partial / "files" / name) for name in noted}


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_30_moments_it_ends_with_the_same_bytes(source, tmp_path, stage):
    began = time.monotonic()
    STAGES[stage](source, tmp_path / "whole")
    lasts = time.monotonic() - began
    expected, rng, interrupted, kept = tree_bytes(tmp_path / "whole"), random.Random(5), 0, 0
    out, number = tmp_path / "out", 0
    for _ in range(KILLS):
        process = begin(stage, source, out)
        process.stdout.readline()
        before = finished_files(out.with_name(out.name + ".partial"))
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(rng.uniform(0, 1.1) * lasts)
        process.send_signal(signal.SIGKILL)
        interrupted += process.wait() == -signal.SIGKILL
        process.stdin.close()
        process.stdout.close()
        where = out if out.exists() else out.with_name(out.name + ".partial") / "files"
        for name, was in before.items():
            assert identity(where / name) == was, f"{name} was finished, and was done again"
        kept += len(before)
        if out.exists():
            assert tree_bytes(out) == expected
            number += 1
            out = tmp_path / f"out{number}"
    assert interrupted > KILLS // 2
    assert kept > 0
    STAGES[stage](source, out)
    assert tree_bytes(out) == expected
    assert not out.with_name(out.name + ".partial").exists()


@contextmanager
def mounted(directory: Path, options: str):
    """A tmpfs of its own on ``directory``."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount the small file system this needs")


@needs_root
def test_a_full_disk_is_one_clear_error_and_loses_nothing(tiny, tmp_path, monkeypatch):
    with mounted(tmp_path / "small", "size=20m") as small:
        (small / "precious").write_bytes(b"x" * 9 * MIB)
        with pytest.raises(RunError, match=r"small: 15,\d+,\d+ bytes are needed, 11,\d+,\d+ are free; free some space"):
            convert(tiny, small / "out", mp=2, weights="bf16")
        monkeypatch.setattr("model.checkpoint.build._check_space", lambda partial, plans: None)
        with pytest.raises(RunError, match="model[01]-mp2.safetensors: No space left on device; free some space"):
            convert(tiny, small / "out", mp=2, weights="bf16", resources=Resources(workers=1))
        assert not (small / "out").exists()
        (small / "precious").unlink()
        convert(tiny, small / "out", mp=2, weights="bf16")
        assert verify(small / "out", tiny).source_tensors == 139


@needs_root
def test_a_read_only_target_is_one_clear_error(tiny, tmp_path):
    with (
        mounted(tmp_path / "fixed", "ro,size=100m") as fixed,
        pytest.raises(RunError, match="out.partial: Read-only file system; the file system is read-only: choose"),
    ):
        convert(tiny, fixed / "out", mp=1)


MEASURE = """
import sys, threading, time
from pathlib import Path
from model.checkpoint.build import Resources
from model.checkpoint.convert import convert
from model.checkpoint.dequantize import dequantize
import torch
torch.ones(8).to(torch.bfloat16)

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

stage, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
memory, workers = int(sys.argv[4]), int(sys.argv[5])
idle, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
resources = Resources(max_memory=memory, workers=workers)
if stage == "dequantize":
    dequantize(source, out, resources=resources)
else:
    convert(source, out, mp=2, weights=stage, resources=resources)
done.set()
watcher.join()
print(peak - idle)
"""


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("stage", ["bf16", "fp8", "dequantize"])
def test_memory_stays_under_its_cap(source, tmp_path, stage, workers):
    """Peak anonymous memory above the idle interpreter, on a checkpoint of more than 4 times the cap."""
    cap = 32 * MIB
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    embedding = 16384 * 1024 * 2
    assert size > 4 * cap
    assert embedding > cap / 4
    command = [sys.executable, "-c", MEASURE, stage, source, tmp_path / "out", cap, workers]
    measured = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout
    assert int(measured) <= cap


def test_two_runs_at_once_do_not_meet(source, tmp_path):
    """Of two runs into one directory, one is refused at once and the other finishes."""
    outcomes = []

    def run():
        try:
            convert(source, tmp_path / "out", mp=4, resources=Resources(workers=1))
            outcomes.append("finished")
        except InputError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [outcome for outcome in outcomes if outcome != "finished"]
    assert len(refused) <= 1
    assert all("another run" in outcome for outcome in refused)
    assert verify(tmp_path / "out", source).source_tensors > 0
