import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.headers import read_header
from model.checkpoint.reader import MAX_OPEN_FILES, TensorReader
from model.errors import RunError
from tests.opened_files import counted_open_files


@pytest.fixture
def three_files(tmp_path):
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"{number}.safetensors")
        save_file({f"m{number}": torch.randn(63, 17), f"v{number}": torch.randn(5).bfloat16()}, paths[-1])
    return paths


def test_ranges_equal_the_library_s(three_files):
    header = read_header(three_files[0])
    whole = load_file(three_files[0])
    with TensorReader([header]) as reader:
        assert torch.equal(reader.read(header.tensors["m0"]), whole["m0"])
        assert torch.equal(reader.read(header.tensors["m0"], (7, 40)), whole["m0"][7:40])
        assert torch.equal(reader.read(header.tensors["m0"], (7, 40), (3, 16)), whole["m0"][7:40, 3:16])
        assert torch.equal(reader.read(header.tensors["m0"], (5, 5)), whole["m0"][5:5])
        assert torch.equal(reader.read(header.tensors["v0"], (1, 4))[:, 0], whole["v0"][1:4])


def test_never_more_than_two_open_files(three_files, monkeypatch):
    headers = [read_header(path) for path in three_files]
    with counted_open_files(monkeypatch, three_files[0].parent) as files, TensorReader(headers) as reader:
        for number in (0, 1, 0, 2, 0, 1, 2):
            assert reader.read(headers[number].tensors[f"m{number}"]).shape == (63, 17)
    assert files.most == MAX_OPEN_FILES == 2
    assert not files.now


def test_a_file_that_changed_is_noticed(three_files):
    header = read_header(three_files[0])
    three_files[0].write_bytes(three_files[0].read_bytes()[:-4])
    with TensorReader([header]) as reader, pytest.raises(RunError, match="0.safetensors: changed during the run"):
        reader.read(header.tensors["m0"])


def test_a_file_cut_short_while_open_is_noticed(three_files):
    header = read_header(three_files[0])
    last = max(header.tensors.values(), key=lambda tensor: tensor.start)
    with TensorReader([header]) as reader:
        reader.read(last)
        os.truncate(three_files[0], header.size - 2)
        with pytest.raises(RunError, match=f"ended inside tensor '{last.name}'"):
            reader.read(last)
