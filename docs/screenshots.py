"""The pictures of docs/operating.md: ``python docs/screenshots.py``, with Chromium on the path.

Starts a server and a worker of its own on loopback, runs the bundled checkpoint through the pipeline, and lets
headless Chromium draw the pages of its UI into docs/images. Everything it started is ended by id.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.integration.guide import blocks  # noqa: E402
from tests.integration.processes import Prefect, prefect, wait_for  # noqa: E402

IMAGES = REPOSITORY / "docs" / "images"
DRAWING_MS = 20_000
"""Time that a page gets, in its own clock, to fetch what it shows and to come to rest."""


def take(url: str, to: Path, width: int, height: int, chromium: str) -> None:
    """Draw ``url`` into the file ``to``."""
    to.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={profile}", f"--virtual-time-budget={DRAWING_MS}",
                f"--window-size={width},{height}", f"--screenshot={to}", url,
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    print(f"{to.relative_to(REPOSITORY)}: {to.stat().st_size:,} bytes")


def run_pipeline(server: Prefect) -> str:
    """Set everything up as docs/operating.md does, run its first run, and return that run's id."""
    serve, set_up, work, first_run, _ = blocks()
    server.start_server(serve.command)
    server.run(set_up.command)
    server.start_worker("worker", work.command)
    server.run(first_run.command)
    wait_for(lambda: any(run["state_type"] == "COMPLETED" for run in server.runs_of("evaluate")), 120, "an evaluation")
    (run,) = server.runs_of("checkpoint-pipeline")
    return run["id"]


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    chromium = parser.parse_args().chromium
    if chromium is None:
        sys.exit("error: no chromium on the path; install it or name it with --chromium")
    with tempfile.TemporaryDirectory(prefix="shardflow-") as place, prefect(Path(place)) as server:
        run = run_pipeline(server)
        (evaluation,) = server.post("/artifacts/filter", {"artifacts": {"key": {"any_": ["evaluation"]}}})
        nightly = server.get("/deployments/name/reconvert/nightly")["id"]
        pages = {
            "flow-run": (f"/v2/runs/flow-run/{run}?tab=TaskRuns", 1400, 1150),
            "artifacts": ("/v2/artifacts", 1400, 1080),
            "evaluation": (f"/v2/artifacts/artifact/{evaluation['id']}", 1400, 1500),
            "parameters": (f"/v2/deployments/deployment/{nightly}/run", 1100, 1400),
        }
        for name, (page, width, height) in pages.items():
            take(f"{server.url}{page}", IMAGES / f"{name}.png", width, height, chromium)


if __name__ == "__main__":
    main()
