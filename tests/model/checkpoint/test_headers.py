import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint.headers import read_header
from model.errors import InputError


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_agrees_with_the_safetensors_library(tmp_path):
    tensors = {
        "matrix": torch.randn(63, 5),
        "codes": torch.randn(7, 3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert header.size == len(raw)
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert raw[info.start : info.start + info.size] == tensor.view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([2], 0, 8)}, b"\0" * 7, "is truncated: "),
        ({"a": entry([2], 0, 8)}, b"\0" * 9, "followed by foreign bytes"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12, "tensor 'b' overlaps the tensor before it"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, b"\0" * 20, "tensor 'b' leaves a hole before it"),
        ({"a": entry([2], 4, 12)}, b"\0" * 12, "tensor 'a' leaves a hole before it"),
        ({"a": entry([3], 0, 8)}, b"\0" * 8, "tensor 'a': F32 of shape [3] needs 12 bytes, its data_offsets give 8"),
        ({"a": entry([2], 8, 0)}, b"\0" * 8, "tensor 'a': data_offsets [8, 0] are not a beginning and an end"),
        ({"a": entry([2], 0, 8, "I2")}, b"\0" * 8, "tensor 'a': dtype 'I2' is unknown"),
        ({"a": entry([-2], 0, 8)}, b"\0" * 8, "tensor 'a': shape [-2] is not a list of sizes"),
        ({"a": entry([2.0], 0, 8)}, b"\0" * 8, "tensor 'a': shape [2.0] is not a list of sizes"),
        ({"a": entry([True], 0, 4)}, b"\0" * 4, "tensor 'a': shape [True] is not a list of sizes"),
        ({"a": {"dtype": "F32"}}, b"", "tensor 'a': header entry lacks dtype, shape or data_offsets"),
        ({"a": 7}, b"", "tensor 'a': header entry lacks"),
        ([1], b"", "header is not a JSON object"),
        (b"{nonsense", b"", "header is not valid JSON"),
        (b"\xff\xfe{}", b"", "header is not valid JSON"),
        (b"[" * 20000, b"", "header is not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", "header names 'a' twice"),
    ],
)
def test_malformed_header_names_the_culprit(tmp_path, header, data, message):
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_header_longer_than_the_file(tmp_path):
    path = write(tmp_path / "bad.safetensors", b"{}", length=1 << 40)
    with pytest.raises(InputError, match=r"states a header of 1099511627776 bytes in a file of 10"):
        read_header(path)


def test_lfs_pointer(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match="is a Git LFS pointer"):
        read_header(path)


def test_too_short_and_absent(tmp_path):
    (tmp_path / "short.safetensors").write_bytes(b"1234")
    with pytest.raises(InputError, match="4 bytes are too few"):
        read_header(tmp_path / "short.safetensors")
    with pytest.raises(InputError, match="No such file"):
        read_header(tmp_path / "absent.safetensors")
