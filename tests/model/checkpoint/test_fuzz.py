"""Mutated headers, indexes and configs: the project's own error or a right reading, never another, never an output."""

import json
import random
import shutil

import pytest

from model.checkpoint.convert import convert
from model.checkpoint.headers import read_header
from model.checkpoint.source import open_source
from model.errors import InputError
from model.hf_config import from_hf
from tests.checkpoints import copy_checkpoint
from tests.random_checkpoints import small_family, write_random

VALUES = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -0.0, float("nan"), float("inf"), "", "x", "\ud800",
    "../x", "/etc/passwd", [], [0], [0, 0], [8, 0], [-1, 8], [0, 10**30], {}, {"a": 1}, "F32", "F8_E4M3", [[]], "\0",
]  # fmt: skip


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bits flipped, bytes replaced, a slice cut out, doubled or appended."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        kind, place = rng.randrange(6), rng.randrange(max(1, len(result)))
        if kind == 0 and result:
            result[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and result:
            result[place] = rng.randrange(256)
        elif kind == 2:
            del result[place : place + rng.randint(1, 64)]
        elif kind == 3:
            result[place:place] = result[place : place + rng.randint(1, 64)]
        elif kind == 4:
            result += rng.randbytes(rng.randint(1, 16))
        else:
            result[:8] = rng.choice([0, 1, 2**20, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
    return bytes(result)


def mutated_json(value: object, rng: random.Random) -> object:
    """One place of a JSON value replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        action = rng.randrange(4)
        if action == 0:
            return {key: inner for key, inner in value.items() if key != name}
        if action == 1:
            return value | {rng.choice(["x", "model.norm.weight", "__metadata__", "..", ""]): rng.choice(VALUES)}
        return value | {name: mutated_json(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mutated_json(value[place], rng), *value[place + 1 :]]
    return rng.choice(VALUES)


def header_file(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_headers(tmp_path):
    """15,000 files: half with a mutated header value, half with mutated bytes."""
    source = write_random(small_family(files=1), tmp_path / "source")
    original = next(source.glob("*.safetensors")).read_bytes()
    length = int.from_bytes(original[:8], "little")
    header, data = json.loads(original[8 : 8 + length]), original[8 + length :]
    path, rng, refused = tmp_path / "mutated.safetensors", random.Random(1), 0
    for number in range(15_000):
        if number % 2:
            path.write_bytes(header_file(mutated_json(header, rng), data))
        else:
            path.write_bytes(mutated_bytes(original[: 8 + length], rng) + data)
        try:
            read = read_header(path)
            assert sum(tensor.size for tensor in read.tensors.values()) <= read.size
        except InputError as error:
            refused += 1
            assert all(str(path) in problem for problem in error.problems)
    assert refused > 10_000


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_indexes_and_configs_through_convert(tmp_path):
    """4,000 directories whose index or config is mutated: refused, or converted as if nothing were wrong with them."""
    pristine = write_random(small_family(files=2), tmp_path / "pristine")
    source = copy_checkpoint(pristine, tmp_path / "source")
    rng, refused = random.Random(2), 0
    for _ in range(4_000):
        name = rng.choice(["model.safetensors.index.json", "config.json"])
        text = (pristine / name).read_bytes()
        value = mutated_json(json.loads(text), rng)
        as_text = json.dumps(value).encode("utf-8", "surrogatepass")
        (source / name).write_bytes(as_text if rng.random() < 0.8 else mutated_bytes(text, rng))
        try:
            convert(source, tmp_path / "out", mp=1)
            shutil.rmtree(tmp_path / "out")
        except InputError:
            refused += 1
            assert sorted(path.name for path in tmp_path.iterdir()) == ["pristine", "source"]
        shutil.copy(pristine / name, source / name)
    assert refused > 2_000


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_configs_alone(tiny):
    """4,000 configs: arguments that can be written down and read again, or the project's own error."""
    from model.args import ModelArgs

    config, rng, refused = json.loads((tiny / "config.json").read_text()), random.Random(3), 0
    for _ in range(4_000):
        mutated = mutated_json(config, rng)
        if not isinstance(mutated, dict):
            continue
        try:
            args = from_hf(mutated)
            assert ModelArgs.from_json(json.loads(json.dumps(args.to_json()))) == args
        except InputError as error:
            refused += 1
            assert all(problem.startswith("config.json: ") for problem in error.problems)
    assert refused > 1_000


def test_a_quick_sample(tmp_path):
    """The same on 300 headers, in every run of the quick tests."""
    source = write_random(small_family(files=1), tmp_path / "source")
    path = next(source.glob("*.safetensors"))
    original = path.read_bytes()
    rng, refused = random.Random(4), 0
    for _ in range(300):
        path.write_bytes(mutated_bytes(original[:4000], rng) + original[4000:])
        try:
            open_source(source)
        except InputError:
            refused += 1
    assert refused > 100
