import os
from pathlib import Path
from uuid import uuid4

import pytest
from prefect import flow

from model.checkpoint.convert import convert
from model.checkpoint.manifest import read_manifest
from model.errors import InputError, RunError
from tasks.launches import _output_of, reply, warm_up
from tasks.results import checkpoint_result
from tests.checkpoints import copy_checkpoint

ROOT = Path(__file__).parents[2]


@flow
def warmed(checkpoint, mp, timeout_s):
    return warm_up(result_of(checkpoint, mp), timeout_s)


@flow
def answered(checkpoint, mp, prompt):
    return reply(result_of(checkpoint, mp), prompt, 4, 120)


def result_of(directory, mp):
    result = checkpoint_result(directory, directory, read_manifest(directory), made_by=str(uuid4()))
    return result.model_copy(update={"mp": mp})


@flow
def said_by(module, arguments, mp, timeout_s):
    return _output_of(module, arguments, mp, timeout_s)


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("launches") / "out"
    convert(tiny, out, mp=2, weights="bf16")
    return out


@pytest.mark.usefixtures("prefect_server")
def test_the_ranks_own_errors_reach_the_flow(checkpoint, tmp_path):
    broken = copy_checkpoint(checkpoint, tmp_path / "broken")
    (broken / "model1-mp2.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model1-mp2.safetensors: 0 bytes are too few for a safetensors file"):
        warmed(broken, 2, 120)


@pytest.mark.usefixtures("prefect_server")
def test_a_wrong_number_of_ranks_is_refused(checkpoint):
    with pytest.raises(InputError, match=r"holds shards for 2 ranks \(mp = 2\), but 4 ranks were started"):
        warmed(checkpoint, 4, 120)


@pytest.mark.usefixtures("prefect_server")
def test_the_time_limit_is_hard(checkpoint):
    with pytest.raises(RunError, match=r"the 2 ranks were not done after 0.2 s"):
        warmed(checkpoint, 2, 0.2)


@pytest.mark.usefixtures("prefect_server")
def test_a_killed_rank_s_last_words_reach_the_flow(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    with pytest.raises(RunError, match=r"(?s)rank 1 of 2 was ended by SIGKILL.*the ranks' last words: on the brink"):
        said_by("tests.model.rank_script", ["die"], 2, 120)


@pytest.mark.usefixtures("prefect_server")
def test_a_prompt_that_does_not_fit_is_named(checkpoint):
    with pytest.raises(InputError, match=r"prompt 1: its \d+ tokens leave no room in the model's context of 512"):
        answered(checkpoint, 2, "again and " * 600)
