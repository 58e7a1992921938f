"""The benchmark runs, and its JSON holds what its table says."""

import json

import pytest
import torch

from benchmarks import kernels as benchmark


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_cpu_s_figures_are_written_as_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "WEIGHTS", [(192, 576)])
    threads = torch.get_num_threads()
    file = tmp_path / "figures.json"
    benchmark.main(["--json", str(file)])
    written = json.loads(file.read_text())
    assert written["machine"]["torch"] == torch.__version__
    assert [(row["kernel"], row["shape"], row["threads"]) for row in written["rows"]] == [
        ("weight_dequant", "192x576", count) for count in sorted({1, threads})
    ]
    assert all(row["GB/s read"] > 0 for row in written["rows"])
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    assert out.count("kernel weight_dequant   shape 192x576") == len(written["rows"])


def test_a_kernel_that_leaves_elements_unwritten_is_no_fast_kernel():
    with pytest.raises(SystemExit, match="left elements of its output unwritten"):
        benchmark.require_every_element_written(lambda: torch.empty(3, 5))
    benchmark.require_every_element_written(lambda: (torch.zeros(3), torch.ones(2)))
