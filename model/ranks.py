"""What one rank does besides the model: find its place, meet the others, agree on errors, end with its parent."""

import ctypes
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from model.checkpoint.manifest import Manifest, read_manifest
from model.errors import InputError, RunError, ShardflowError
from model.topology import Topology

Result = TypeVar("Result")

MEETING = "SHARDFLOW_MEETING"
"""Environment variable of own ranks: the URL of the file where they meet. Others meet at MASTER_ADDR."""

PARENT = "SHARDFLOW_PARENT"
"""Environment variable of own ranks: the process id that none of them outlives."""

NO_LIMIT = timedelta(days=365)
"""Timeout of the control group: ranks may wait there while a person thinks."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a command ended by Ctrl-C."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h


Work = Callable[[Manifest, Topology, torch.device], None]
"""What a command does on each rank: the checkpoint's manifest, the rank's place, its device."""


def is_rank() -> bool:
    """Whether this process was started as a rank, by ``launch.start_ranks`` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def first_without_launcher() -> bool:
    """Whether this rank speaks for all ranks where no process of this project has spoken before them (torchrun)."""
    return os.environ["RANK"] == "0" and PARENT not in os.environ


def own_environment(mp: int, meeting: Path) -> dict[str, str]:
    """What the ranks that this process starts must know, besides their own numbers."""
    return {
        "WORLD_SIZE": str(mp),
        "LOCAL_WORLD_SIZE": str(mp),
        MEETING: (meeting / "store").as_uri(),
        PARENT: str(os.getpid()),
    }


def run_rank(module: str, arguments: Sequence[str], checkpoint: Path, work: Work, device: str) -> NoReturn:
    """Join the other ranks, do ``work`` and end this process. Used by ``launch.run_command``.

    The exit status is that of ``work``'s error or ``SystemExit``, 130 after Ctrl-C, 1 after a traceback, else 0.
    """
    end_with_parent()
    try:
        _expect_interrupts()
        status = _status_of(module, arguments, checkpoint, work, device)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status)


def leave(status: int) -> NoReturn:
    """End this process with ``status`` as soon as what it said is written.

    The interpreter would take itself apart first. Threads of a process group that is still alive then, since a
    traceback, a cycle or an interrupted collective holds it, abort the process, and its status would be SIGABRT.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more
            status = status or 1
    os._exit(status)


def _expect_interrupts() -> None:
    """Lift the block that ``launch.start_ranks`` put on Ctrl-C, where it is not ignored as in a script's background.

    Rank 0 alone has a terminal to leave in order, which a second signal must not disturb: the terminal sends one to
    every rank, and the launcher sends one on.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once if os.environ["RANK"] == "0" else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _interrupt_once(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _status_of(module: str, arguments: Sequence[str], checkpoint: Path, work: Work, device: str) -> int:
    try:
        manifest = read_manifest(checkpoint)
        world_size = int(os.environ["WORLD_SIZE"])
        check_world_size(manifest.mp, world_size, checkpoint, module, arguments)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        own_device = pick_device(device, here)
    except ShardflowError as error:
        return _status_of_host(error)
    with join(manifest.mp, own_device) as topology:
        try:
            work(manifest, topology, own_device)
        except ShardflowError as error:
            # Only an error that the ranks did not agree on comes here, so it is this rank's own.
            report(type(error)(f"rank {topology.rank}: {problem}" for problem in error.problems))
            return error.exit_status
    return 0


def check_world_size(mp: int, world_size: int, checkpoint: Path, module: str, arguments: Sequence[str]) -> None:
    """Raise ``InputError`` with the launch line to use where ``world_size`` ranks cannot load ``mp`` shards."""
    if world_size != mp:
        line = shlex.join(["torchrun", "--nproc-per-node", str(mp), "-m", module, *arguments])
        raise InputError(
            f"{checkpoint}: holds shards for {mp} {_ranks(mp)} (mp = {mp}), but {world_size} {_ranks(world_size)} "
            f"were started; start it with: {line}"
        )


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def pick_device(device: str, ranks_here: int) -> torch.device:
    """This rank's device: ``auto`` is a GPU of its own where the host has GPUs, else the CPU.

    Raises ``InputError`` where ``ranks_here`` ranks of one host do not find a GPU each.
    """
    count = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and count == 0):
        return torch.device("cpu")
    if count < ranks_here:
        raise InputError(
            f"device {device!r} needs a GPU for each of this host's ranks ({ranks_here}), and torch finds {count}; "
            "use --device cpu, or torchrun on several hosts"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def join(mp: int, device: torch.device) -> Iterator[Topology]:
    """This process's place among ``mp`` ranks, in process groups that end with the context.

    Tensors travel through NCCL on GPUs and gloo on the CPU; Python objects through a gloo group that waits
    without a limit.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # NCCL and Triton work on the current device
    if mp == 1:
        yield Topology()
        return
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        init_method=os.environ.get(MEETING, "env://"),
        rank=rank,
        world_size=mp,
        device_id=device if on_gpu else None,
    )
    try:
        control = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        yield Topology(rank, mp, dist.group.WORLD, control)
    finally:
        dist.destroy_process_group()


def agree(topology: Topology, action: Callable[[], Result]) -> Result:
    """Run ``action`` on each rank; where it raises ``ShardflowError`` on any, all of them end with its status.

    Without this, a rank that found an error would leave the others waiting in a collective. Rank 0 prints all
    problems, each once, before any rank ends (``SystemExit``). On a single rank the error is simply raised.
    """
    if topology.size == 1:
        return action()
    error: ShardflowError | None = None
    try:
        result = action()
    except ShardflowError as caught:
        # Its traceback holds this frame, which holds it: in that cycle the topology would outlive its context.
        error = caught.with_traceback(None)
    errors = [found for found in topology.all_gather_object(error) if isinstance(found, ShardflowError)]
    if errors:
        kind = InputError if all(isinstance(found, InputError) for found in errors) else RunError
        if topology.rank == 0:
            report(kind(dict.fromkeys(problem for found in errors for problem in found.problems)))
        dist.barrier(group=topology.control)
        raise SystemExit(kind.exit_status)
    return result


def report(error: ShardflowError) -> None:
    """Print each problem on standard error as one ``error:`` line."""
    print(*(f"error: {problem}" for problem in error.problems), sep="\n", file=sys.stderr, flush=True)


def _status_of_host(error: ShardflowError) -> int:
    """Report an error that every rank of this host finds before they meet, once for the host.

    A launcher ends all ranks as soon as one fails, so the silent ones give the speaker time.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        report(error)
    else:
        time.sleep(3)
    return error.exit_status


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that comes about (Linux).

    ``parent`` is its process id, by default what ``own_environment`` says.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is None and PARENT in os.environ:
        parent = int(os.environ[PARENT])
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it ended before the kernel was told
