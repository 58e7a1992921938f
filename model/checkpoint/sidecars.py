"""The small files beside the weights: what is copied along, and how ``config.json`` is rewritten."""

import fnmatch
from pathlib import Path
from typing import Any

from model.checkpoint.digest import sha256_of
from model.checkpoint.download_record import read_record
from model.checkpoint.manifest import FileRecord, SourceRecord
from model.checkpoint.progress import Progress
from model.checkpoint.source import INDEX, Source, escaping_link, read_json, shortened
from model.checkpoint.storage import json_bytes, storage_errors, write_atomically
from model.errors import InputError

REWRITTEN = ("config.json", INDEX, "manifest.json", "dequantized.json", "model_args.json", "evaluation.json")
"""Files that every stage writes itself, or that describe another directory than the one being written."""

OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")

BESIDE_SHARDS = (
    "generation_config.json", "*token*", "chat_template*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.py",
)  # fmt: skip
"""What a shard directory takes along: generation config, tokenizer (its code too, copied and never run), template."""


def find_sidecars(directory: Path, patterns: tuple[str, ...] | None = None) -> tuple[Path, ...]:
    """Files in ``directory`` beside the weights that match ``patterns``, by name; without any, all but ``REWRITTEN``.

    Raises ``InputError`` for a link that leaves the directory.
    """
    found = [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.startswith(".") and not _matches(path.name, OTHER_WEIGHTS)
        if (path.name not in REWRITTEN if patterns is None else _matches(path.name, patterns))
    ]
    problems = [f"{directory}: {problem}" for path in found if (problem := escaping_link(path))]
    if problems:
        raise InputError(shortened(problems))
    return tuple(found)


def copy_sidecars(paths: tuple[Path, ...], directory: Path) -> tuple[FileRecord, ...]:
    """Copy ``paths`` into ``directory`` and return their records."""
    return tuple(write_sidecar(directory / path.name, path.read_bytes()) for path in paths)


def write_sidecar(path: Path, data: bytes) -> FileRecord:
    """Write one small file, whole or not at all, and return its record."""
    with storage_errors(path):
        write_atomically(path, data)
        return FileRecord(path.name, len(data), sha256_of(path))


def written_config(source: Source, weights: str, mtp_layers: int) -> bytes:
    """``config.json`` for what is written: without ``quantization_config`` where weights are BF16.

    ``num_nextn_predict_layers`` says what is there: transformers takes 1 where the field is absent.
    """
    config: dict[str, Any] = dict(source.config)
    if weights == "bf16" and source.weights == "fp8":
        config.pop("quantization_config", None)
        # Both spellings: transformers 5 reads dtype, older releases and other loaders torch_dtype.
        config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    if "num_nextn_predict_layers" in config or source.config.get("model_type") != "deepseek_v2":
        config["num_nextn_predict_layers"] = mtp_layers
    return json_bytes(config)


def source_record(source: Source, progress: Progress) -> SourceRecord:
    """Every file of the source with its digest: from the download's record, or hashed once in a counted pass."""
    known = read_record(source.directory)
    digests = {file.name: file.sha256 for file in known.files} if known else {}
    origin = _dequantized_from(source.directory)
    names = [name for name in ("config.json", INDEX) if (source.directory / name).exists()]
    small = [*(source.directory / name for name in names), *find_sidecars(source.directory, BESIDE_SHARDS)]
    paths: list[Path] = sorted([*(header.path for header in source.headers), *small])
    counts = {header.path: len(header.tensors) for header in source.headers}
    progress.phase("hash source", sum(path.stat().st_size for path in paths))
    files = []
    for path in paths:
        size = path.stat().st_size
        if path.name in digests:
            progress.advance(size)
        sha256 = digests.get(path.name) or sha256_of(path, progress.advance)
        files.append(FileRecord(path.name, size, sha256, counts.get(path)))
    repo, commit = (known.repo, known.commit) if known else origin
    return SourceRecord(repo, commit, tuple(files))


def _dequantized_from(directory: Path) -> tuple[str | None, str | None]:
    path = directory / "dequantized.json"
    source = read_json(path).get("source", {}) if path.exists() else {}
    return source.get("repo"), source.get("commit")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
