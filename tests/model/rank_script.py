"""A rank without a model, for the tests of the launch: ``python -m tests.model.rank_script WHAT [FOLDER]``."""

import os
import signal
import sys
import time
from pathlib import Path

from model import ranks
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
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def linger(folder: Path) -> None:
    """Leave the process id in ``folder`` and stay."""
    ranks.end_with_parent()
    (folder / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(60)


def disagree(folder: Path) -> None:
    """Ranks 1 and 2 find problems, one of them the same."""
    import torch

    def action() -> None:
        problems = {1: ["shard 1 is bad", "both know"], 2: ["both know"]}.get(topology.rank)
        if problems:
            raise InputError(problems)

    with ranks.join(3, torch.device("cpu")) as topology:
        assert topology.all_gather_object(topology.rank) == [0, 1, 2]
        assert topology.broadcast_object({"from": topology.rank}) == {"from": 0}
        ranks.agree(topology, action)
        print("not reached")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2] if len(sys.argv) > 2 else "."))
