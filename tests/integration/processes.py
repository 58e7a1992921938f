"""A real Prefect server and worker on loopback, and every process that comes of them, ended by id in the end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).parents[2]
POOL = "shardflow"
MARK = "SHARDFLOW_TEST_RUN"
"""An environment variable that every process of one `Prefect` inherits, and by which those left over are found."""

HEARTBEAT_S = 30
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Prefect:
    """A server with its own database, home and results below ``place``; workers; and what tests ask of them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = uuid.uuid4().hex
        foreign = ("PREFECT_", "RANK", "WORLD_SIZE")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | {
            "PREFECT_HOME": str(place / "home"),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_API_PORT": str(self.port),
            "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(place / "results"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
            "CHECKPOINTS": str(place / "checkpoints"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            MARK: self.mark,
        }
        self.client = httpx.Client(base_url=f"{self.url}/api", timeout=30)

    # Processes

    def start_server(self, command: list[str]) -> None:
        """Start the server by ``command`` and wait until it answers."""
        server = self._start("server", command)

        def healthy() -> bool:
            assert server.poll() is None, self.log("server")
            with contextlib.suppress(httpx.TransportError):
                return self.client.get("/health").status_code == 200
            return False

        wait_for(healthy, 120, "the server answers")

    def start_worker(self, name: str, command: list[str]) -> None:
        """Start a worker by ``command``, ``self.worker`` from then on, and wait until the server knows it."""

        def known() -> set[str]:
            return {worker["name"] for worker in self.post(f"/work_pools/{POOL}/workers/filter", {})}

        before = known()
        self.worker = self._start(name, command)
        wait_for(lambda: known() - before or self.worker.poll() is not None, 60, f"{name} is known")
        assert self.worker.poll() is None, self.log(name)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.place / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=REPOSITORY, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def processes(self, having: str = "") -> dict[int, str]:
        """Command lines, by id, of all that run with this mark and hold ``having``; zombies have none."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (place / "cmdline").read_text(errors="replace").replace("\0", " ")
                if command and having in command and f"{MARK}={self.mark}" in _environment(int(place.name)):
                    found[int(place.name)] = command
        return found

    def flow_process(self, run: str) -> int:
        """Id of the process in which the worker runs a flow run, once there is one."""

        def ids() -> list[int]:
            return [pid for pid in self.processes("prefect") if f"PREFECT__FLOW_RUN_ID={run}" in _environment(pid)]

        return min(wait_for(ids, 60, f"flow run {run} has a process"))

    def end(self) -> None:
        """End everything: SIGTERM, and SIGKILL for what is left after ten seconds."""
        self.client.close()
        for number, grace in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + grace
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.2)

    def log(self, name: str) -> str:
        """The last lines that the server or a worker wrote."""
        return "\n".join((self.place / f"{name}.log").read_text(errors="replace").splitlines()[-40:])

    # The command line

    def cli(self, *arguments: str) -> str:
        """Output of ``prefect arguments…``; fails the test where its status is not 0."""
        return self.run([sys.executable, "-m", "prefect", *arguments])

    def run(self, command: list[str]) -> str:
        """Output of a command in the repository, in this server's environment."""
        done = subprocess.run(
            command, check=False, cwd=REPOSITORY, env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def lose_patience(self) -> None:
        """Let the zombie automation of docs/operating.md wait no longer than the heartbeat needs."""
        self.run([sys.executable, "-m", "flows.zombies", "--within", str(HEARTBEAT_S + 5)])

    # The API

    def get(self, path: str) -> Any:
        """What the API holds at ``path``."""
        return self._ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What the API answers to ``body``."""
        return self._ask("POST", path, body)

    def patch(self, path: str, body: dict[str, Any]) -> None:
        """Change what the API holds at ``path``."""
        self._ask("PATCH", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """503 is asked again, as Prefect's own client does: SQLite writes one at a time."""
        response = wait_for(
            lambda: (answer := self.client.request(method, path, json=body)).status_code != 503 and answer,
            30, f"{method} {path} is served",
        )  # fmt: skip
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json() if response.content else None

    def start_run(self, deployment: str, params: dict[str, Any], env: dict[str, str] | None = None) -> str:
        """Start a run of ``flow/name`` with these ``params``, and ``env`` in its environment; returns its id."""
        found = self.get(f"/deployments/name/{deployment}")["id"]
        body = {"parameters": {"params": params}, "job_variables": {"env": env or {}}}
        return self.post(f"/deployments/{found}/create_flow_run", body)["id"]

    def state(self, run: str) -> str:
        """Type of a flow run's state."""
        return self.get(f"/flow_runs/{run}")["state_type"]

    def wait(self, run: str, timeout: float = 120, want: str = "COMPLETED") -> None:
        """Wait until a flow run has ended, and fail unless it did so in the state ``want``."""
        wait_for(lambda: self.state(run) in FINAL, timeout, f"flow run {run} ends")
        assert self.state(run) == want, f"{self.get(f'/flow_runs/{run}')['state']}\n{self.run_log(run)}"

    def run_log(self, run: str) -> str:
        """The log of a flow run."""
        body = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
        return "\n".join(entry["message"] for entry in self.post("/logs/filter", body))

    def task_states(self, run: str) -> dict[str, str]:
        """Names of the states of a flow run's tasks, by the task's name without its number."""
        body = {"flow_runs": {"id": {"any_": [run]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return {task["name"].rpartition("-")[0]: task["state_name"] for task in self.post("/task_runs/filter", body)}

    def runs_of(self, flow: str) -> list[dict[str, Any]]:
        """All runs of a flow, oldest first."""
        return self.post("/flow_runs/filter", {"flows": {"name": {"any_": [flow]}}, "sort": "START_TIME_ASC"})

    def events(self, prefix: str) -> list[dict[str, Any]]:
        """All events whose name begins with ``prefix``, oldest first."""
        body = {"filter": {"event": {"prefix": [prefix]}, "order": "ASC"}, "limit": 50}
        return self.post("/events/filter", body)["events"]


@contextlib.contextmanager
def prefect(place: Path) -> Iterator[Prefect]:
    """A `Prefect` with nothing started; whatever happens, nothing that comes of it is left in the end."""
    running = Prefect(place)
    try:
        yield running
    finally:
        running.end()


def wait_for(condition: Callable[[], Any], timeout: float, what: str, every: float = 0.2) -> Any:
    """The first true value of ``condition``; fails after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(every)
    return value


def _environment(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return []
