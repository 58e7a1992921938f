"""The word about another distribution of the name ``kernels``: said once, by whoever speaks for all ranks."""

import importlib.metadata

import pytest

from model import conflicts, ranks
from model.launch import run_command

SAID = "warning: the distribution 'kernels' 0.9 is installed"


@pytest.fixture(autouse=True)
def _other_kernels(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"kernels": "0.9"}[name])
    conflicts.say_conflict.cache_clear()
    yield
    conflicts.say_conflict.cache_clear()


def test_a_command_says_it_once_even_where_its_caller_has(tmp_path, capsys):
    conflicts.say_conflict()
    assert run_command("model.generate", [], tmp_path, lambda *_: None) == 2
    assert capsys.readouterr().err.count(SAID) == 1


def test_a_command_alone_says_it(tmp_path, capsys):
    assert run_command("model.generate", [], tmp_path, lambda *_: None) == 2
    assert capsys.readouterr().err.count(SAID) == 1


@pytest.mark.parametrize(
    ("rank", "parent", "times"), [("0", None, 1), ("1", None, 0), ("0", "1", 0), ("1", "1", 0)], ids=str
)
def test_of_torchrun_s_ranks_the_first_says_it_and_of_own_ones_none(rank, parent, times, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    if parent is None:
        monkeypatch.delenv(ranks.PARENT, raising=False)
    else:
        monkeypatch.setenv(ranks.PARENT, parent)

    def end(*_):
        raise SystemExit(0)  # the process ends there

    monkeypatch.setattr(ranks, "run_rank", end)
    with pytest.raises(SystemExit):
        run_command("model.generate", [], tmp_path, lambda *_: None)
    assert capsys.readouterr().err.count(SAID) == times
