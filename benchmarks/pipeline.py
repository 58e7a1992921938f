"""What an unchanged re-run of the pipeline costs: ``python -m benchmarks.pipeline DIRECTORY [--files 168]``.

Converts a small FP8 checkpoint of 163 files, as DeepSeek-V3 has, on a temporary Prefect server, staged, and
runs the same again: every stage looks at the disk, finds its files and is taken from the cache.
"""

import argparse
import os
import platform
import shutil
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from flows.run import PREFECT_SETTINGS
from tests.random_checkpoints import small_family, write_random

RERUNS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to work; a few megabytes")
    parser.add_argument("--files", type=int, default=168, help="about so many; 168 gives 163")
    options = parser.parse_args()
    directory: Path = options.directory.absolute()
    shutil.rmtree(directory, ignore_errors=True)
    source = write_random(small_family(files=options.files, n_routed_experts=96), directory / "source")
    os.environ.update(PREFECT_SETTINGS)
    os.environ["PREFECT_HOME"] = str(directory / "prefect")
    os.environ["PREFECT_LOGGING_LEVEL"] = "ERROR"
    from prefect.testing.utilities import prefect_test_harness

    from flows.parameters import PipelineParameters
    from flows.pipeline import checkpoint_pipeline

    params = PipelineParameters(source=str(source), out=directory / "out", mp=2, weights="bf16")
    with prefect_test_harness(server_startup_timeout=120):
        first = _seconds(lambda: checkpoint_pipeline(params))
        again = sorted(_seconds(lambda: checkpoint_pipeline(params)) for _ in range(RERUNS))
    count = len(list(source.glob("*.safetensors")))
    print(f"{platform.machine()}, {os.cpu_count()} cores, {date.today()}: {count} files")
    median, longest = again[RERUNS // 2], again[-1]
    print(f"first run {first:.2f} s; unchanged re-run {median:.2f} s (median of {RERUNS}, {longest:.2f} at most)")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
