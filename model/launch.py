"""How a command gets its ranks: it starts them itself on one host, or is one of an external torchrun's.

Every command that computes (generate, warm-up, evaluate, serve) is ``run_command(...)``: in the process a person
starts, it checks the checkpoint and starts one process a rank with the same arguments; in a rank (RANK and
WORLD_SIZE are set) it joins the others (``model.ranks``) and does the work.

Own ranks are plain processes in the group of the process that starts them, so Ctrl-C reaches all of them and
their exit status comes through. (torchrun gives each a session of its own and turns every failure into status 1.)
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from model import ranks
from model.checkpoint.manifest import read_manifest
from model.conflicts import say_conflict
from model.errors import InputError, RunError, ShardflowError
from model.ranks import INTERRUPTED

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a command ended by SIGTERM."""

GRACE_S = 5.0
"""Seconds that the ranks get to end by themselves, and again after SIGTERM, before they are killed."""

LAST_LINES = 20
"""Lines of the ranks' standard error that go into an error: a traceback and what led to it."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came while this process had ranks. It ends as after Ctrl-C, with a status of its own."""


def run_command(module: str, arguments: Sequence[str], checkpoint: Path, work: ranks.Work, device: str = "auto") -> int:
    """Do ``work`` on every rank of ``checkpoint`` and return the exit status: 0 done, 1 failed, 2 refused.

    ``module`` with ``arguments`` is the command that a started rank runs; it must come here again, and ends here.
    Problems are printed on standard error, one ``error:`` line each, once.
    """

    def command() -> int:
        if ranks.is_rank():
            if ranks.first_without_launcher():
                say_conflict()
            ranks.run_rank(module, arguments, checkpoint, work, device)
        say_conflict()
        manifest = read_manifest(checkpoint)
        own_device = ranks.pick_device(device, manifest.mp)
        if manifest.mp > 1:
            return start_ranks(module, arguments, manifest.mp).returncode
        with ranks.join(1, own_device) as topology:
            work(manifest, topology, own_device)
        return 0

    return status_of(command)


def status_of(command: Callable[[], int]) -> int:
    """The exit status that ``command`` returns, or that of the problem it raises, printed on standard error."""
    try:
        return command()
    except ShardflowError as error:
        ranks.report(error)
        return error.exit_status
    except Terminated:
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED


def start_ranks(
    module: str, arguments: Sequence[str], mp: int, *, timeout: float | None = None, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module arguments…`` once for each of ``mp`` ranks on this host and wait for all of them.

    ``returncode`` is 0, or the status of a rank that failed (the others are then ended): 2 where any gave it, else
    that of the first. With ``capture``, ``stdout`` and ``stderr`` hold what all ranks wrote; otherwise it goes where
    this process's does. Raises ``RunError`` where a signal ends a rank, or after ``timeout`` seconds, with the last
    of a captured ``stderr``. No rank outlives the call, nor this process should it be killed. SIGTERM raises
    ``Terminated`` in the main thread, where the program has no handler of its own.
    """
    command = [sys.executable, "-m", module, *arguments]
    with ExitStack() as stack:
        stack.enter_context(_sigterm_raises())
        meeting = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardflow-"))
        stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2))
        threads = max(1, _cpus() // mp)
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | ranks.own_environment(mp, Path(meeting))
        started: list[subprocess.Popen[bytes]] = []
        try:
            # A rank inherits the block and lifts it once it can end without a traceback from its imports.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for rank in range(mp):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    started.append(subprocess.Popen(command, env=environment | place, stdout=stdout, stderr=stderr))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            status = _wait(started, timeout)
        except KeyboardInterrupt:
            _interrupt(started)
            raise
        except RunError as error:
            _end(started)
            said = (_text(stderr) or "").splitlines()[-LAST_LINES:]
            raise RunError([*error.problems, *(f"the ranks' last words: {line}" for line in said)]) from error
        finally:
            _end(started)
        return subprocess.CompletedProcess(command, status, _text(stdout), _text(stderr))


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Have SIGTERM raise ``Terminated``, where it would end this process at once and leave its files behind."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def _cpus() -> int:
    """CPUs that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _wait(started: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> int:
    """0 once every rank is done, or the status of the first one found to have failed."""
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    while True:
        statuses = [rank.poll() for rank in started]
        failed = [status for status in statuses if status is not None and status > 0]
        if InputError.exit_status in failed:
            return InputError.exit_status
        killed = [(rank, -status) for rank, status in enumerate(statuses) if status is not None and status < 0]
        # Ranks that lose a peer fail with status 1, that of the error which names the peer.
        if killed and set(failed) <= {RunError.exit_status}:
            raise RunError(
                f"rank {rank} of {len(started)} was ended by {_name(number)}"
                + ("; did the host run out of memory?" if number == signal.SIGKILL else "")
                for rank, number in killed
            )
        if failed:
            return failed[0]
        if all(status == 0 for status in statuses):
            return 0
        if time.monotonic() > deadline:
            raise RunError(f"the {len(started)} ranks were not done after {timeout:g} s")
        time.sleep(0.02)


def _name(number: int) -> str:
    """SIGKILL and the like; real-time signals have no name."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def _interrupt(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send Ctrl-C on, which may have reached this process alone, and give the ranks time to end in order."""
    for rank in started:
        rank.send_signal(signal.SIGINT)
    _wait_quietly(started)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """No rank is left when this returns."""
    for rank in started:
        rank.terminate()
    _wait_quietly(started)
    for rank in started:
        rank.kill()
    for rank in started:
        rank.wait()


def _wait_quietly(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all ranks have ended, or the time of grace that they share is over."""
    deadline = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in started) and time.monotonic() < deadline:
        time.sleep(0.02)


def _text(file: IO[bytes] | None) -> str | None:
    if file is None:
        return None
    file.seek(0)
    return file.read().decode(errors="replace")
