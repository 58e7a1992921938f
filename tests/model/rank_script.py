"""A rank without a model, for the tests of the launch: ``python -m tests.model.rank_script WHAT [FOLDER]``."""

import atexit
import gc
import os
import signal
import sys
import time
from pathlib import Path

from model import launch, ranks
from model.errors import InputError


def say(folder: Path) -> None:
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, threads {os.environ['OMP_NUM_THREADS']}")
    print("a log line", file=sys.stderr)


def refuse_on_the_last(folder: Path) -> None:
    """The last rank is refused; the others would go on for long."""
    if os.environ["RANK"] == "2":
        sys.exit(2)
    time.sleep(60)


def die(folder: Path) -> None:
    """Rank 1 is killed as the kernel kills for memory, while the others would go on for long."""
    if os.environ["RANK"] == "1":
        print("on the brink", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_strangely(folder: Path) -> None:
    """By a real-time signal, which has no name."""
    os.kill(os.getpid(), 40)


def linger(folder: Path) -> None:
    """Leave the process id in ``folder`` and stay."""
    ranks.end_with_parent()
    (folder / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
    print("still here", file=sys.stderr, flush=True)
    time.sleep(60)


def disagree(folder: Path) -> None:
    """Ranks 1 and 2 find problems, one of them the same. Each leaves in ``folder`` how many gloo threads remain."""
    gc.disable()  # what a cycle holds is to stay
    status: object = None
    try:
        _disagree()
    except SystemExit as ended:
        status = ended.code
    (folder / f"rank{os.environ['RANK']}").write_text(str(gloo_threads()))
    while len(list(folder.glob("rank*"))) < 3:  # the first to end has the others ended
        time.sleep(0.01)
    sys.exit(status)


def _disagree() -> None:
    import torch

    def action() -> None:
        problems = {1: ["shard 1 is bad", "both know"], 2: ["both know"]}.get(topology.rank)
        if problems:
            raise InputError(problems)

    with ranks.join(3, torch.device("cpu")) as topology:
        assert topology.all_gather_object(topology.rank) == [0, 1, 2]
        assert gloo_threads() > 0
        assert topology.broadcast_object({"from": topology.rank}) == {"from": 0}
        ranks.agree(topology, action)
        print("not reached")


def gloo_threads() -> int:
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


def work(folder: Path) -> None:
    """``run_command`` on the checkpoint ``folder``, whose work ends as ``ENDING`` says."""
    atexit.register(lambda: print("the interpreter was taken apart"))

    def end(manifest, topology, device) -> None:
        topology.all_gather_object(None)
        print("worked", end="")
        if topology.rank == 0:
            exec(os.environ["ENDING"])
        elif "raise" in os.environ["ENDING"]:
            time.sleep(60)

    sys.exit(launch.run_command(__spec__.name, sys.argv[1:], folder, end, "cpu"))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2] if len(sys.argv) > 2 else "."))
