"""Checkpoints of every case, what transformers computes on them, and what the ranks compute: each made once a run."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint.convert import convert
from model.launch import start_ranks
from tests.model.oracle import CASES, TINY_V3, Expected, expected, save_dequantised, save_random

REPOSITORY = Path(__file__).parents[2]

WEIGHTS = {"tiny-v3": "bf16", "tiny-v3-fp8": "fp8"} | dict.fromkeys(CASES, "bf16")
"""Every case of the parity tests and the weights its shards hold."""


@dataclass(frozen=True)
class Computed:
    """What the ranks of one mp gave: logits and completions by ``<case>/<form>/<what>``."""

    logits: dict[str, torch.Tensor]
    completions: dict[str, list[list[int]]]


@pytest.fixture(scope="session", autouse=True)
def _environment_of_ranks():
    """Ranks are other processes: they import their part of the tests from the repository's root, and compute on
    one thread, since on so small tensors more threads only wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def one_thread():
    """The same for what this process computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def sources(one_thread, tmp_path_factory) -> dict[str, Path]:
    """The Hugging Face directory of each case, to convert from."""
    root = tmp_path_factory.mktemp("sources")
    for name in CASES:
        save_random(name, root / name)
    return {name: root / name for name in CASES} | {"tiny-v3": TINY_V3, "tiny-v3-fp8": TINY_V3}


@pytest.fixture(scope="session")
def shards(sources, tmp_path_factory) -> Callable[[str, int], Path]:
    """``shards(case, mp)``: the converted checkpoint, made when it is first asked for."""
    root = tmp_path_factory.mktemp("shards")

    def made(case: str, mp: int) -> Path:
        out = root / f"{case}-mp{mp}"
        if not out.exists():
            convert(sources[case], out, mp=mp, weights=WEIGHTS[case])
        return out

    return made


@pytest.fixture(scope="session")
def oracle_checkpoint(one_thread, tmp_path_factory) -> Path:
    """tiny-v3 as transformers can load it, exactly dequantised by a formula of the tests' own."""
    directory = tmp_path_factory.mktemp("dequantised") / "tiny-v3"
    save_dequantised(TINY_V3, directory)
    return directory


@pytest.fixture(scope="session")
def oracle(sources, oracle_checkpoint) -> dict[str, Expected]:
    """What transformers computes in float32 on each case's exactly dequantised weights."""
    tiny = expected(oracle_checkpoint)
    return {name: expected(sources[name]) for name in CASES} | {"tiny-v3": tiny, "tiny-v3-fp8": tiny}


@pytest.fixture(scope="session")
def computed(shards, oracle, tmp_path_factory) -> Callable[[int], Computed]:
    """``computed(mp)``: all cases through the model on ``mp`` ranks that were started once."""
    root = tmp_path_factory.mktemp("computed")
    results: dict[int, Computed] = {}

    def run(mp: int) -> Computed:
        if mp not in results:
            plan: list[dict[str, Any]] = [
                {"name": name, "checkpoint": str(shards(name, mp)), "tokens": case.tokens, "prompts": case.prompts}
                for name, case in oracle.items()
            ]
            plan_file, out = root / f"plan{mp}.json", root / f"mp{mp}.safetensors"
            plan_file.write_text(json.dumps(plan))
            done = start_ranks(
                "tests.model.parity_ranks", [str(plan_file), str(out), str(mp)], mp, timeout=200, capture=True
            )
            assert done.returncode == 0, done.stderr
            results[mp] = Computed(load_file(out), json.loads(out.with_suffix(".json").read_text()))
        return results[mp]

    return run
