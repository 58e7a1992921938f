"""The small files beside the weights: what is copied along, and how ``config.json`` is rewritten."""

import fnmatch
import hashlib
import shutil
from pathlib import Path
from typing import Any

from model.checkpoint.digest import sha256_of
from model.checkpoint.download_record import read_record
from model.checkpoint.manifest import FileRecord, SourceRecord
from model.checkpoint.progress import Progress
from model.checkpoint.source import INDEX, Source, escaping_link, read_json, shortened
from model.checkpoint.storage import (
    TEMPORARY_SUFFIX,
    json_bytes,
    publish_file,
    reading,
    storage_errors,
    write_atomically,
)
from model.errors import InputError, RunError

REWRITTEN = ("config.json", INDEX, "manifest.json", "dequantized.json", "model_args.json", "evaluation.json")
"""Files that every stage writes itself, or that describe another directory than the one being written."""

OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")

TEMPLATES = "additional_chat_templates"
"""The one folder of sidecars that transformers knows."""

BESIDE_SHARDS = (
    "generation_config.json", "*token*", "chat_template*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.py",
    "*.jinja",
)  # fmt: skip
"""What a shard directory takes along: generation config, tokenizer (its code too, copied and never run), template."""


def find_sidecars(directory: Path, patterns: tuple[str, ...] | None = None) -> tuple[Path, ...]:
    """Files in ``directory`` beside the weights that match ``patterns``, by name; without any, all but ``REWRITTEN``.

    Raises ``InputError`` for a link that leads nowhere or out of the directory, for a directory that bears a
    tokenizer's name, and for a name that is not UTF-8.
    """
    with reading(directory):
        listed = sorted([*directory.iterdir(), *(directory / TEMPLATES).glob("*.jinja")])
    found = [
        path
        for path in listed
        if not path.name.startswith(".") and path.name != TEMPLATES and not _matches(path.name, OTHER_WEIGHTS)
        if (path.name not in REWRITTEN if patterns is None else _matches(path.name, patterns))
    ]
    problems = [f"{directory}: {problem}" for path in found if (problem := _unfit(path))]
    if problems:
        raise InputError(shortened(problems))
    return tuple(path for path in found if path.is_file())


def _unfit(path: Path) -> str | None:
    if not path.exists():
        return f"{path.name!r} is a link that leads nowhere; fetch the file again"
    if path.is_dir():
        tokenizer = fnmatch.fnmatchcase(path.name, "*token*")
        return f"{path.name!r} is a directory where a tokenizer's file is expected; move it away" if tokenizer else None
    if not path.name.isprintable() or path.name.encode(errors="replace").decode() != path.name:
        return f"{path.name!r} is not a printable UTF-8 name; rename the file"
    return escaping_link(path)


def copy_sidecars(
    paths: tuple[Path, ...], directory: Path, source: SourceRecord | None = None
) -> tuple[FileRecord, ...]:
    """Copy ``paths`` into ``directory`` and return their records.

    Raises ``RunError`` where a file is no longer the one that ``source`` records.
    """
    recorded = {file.name: file.sha256 for file in source.files} if source else {}
    records = []
    for path in paths:
        name = f"{TEMPLATES}/{path.name}" if path.parent.name == TEMPLATES else path.name
        target = directory / name
        with storage_errors(target):
            target.parent.mkdir(exist_ok=True)
            temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
            shutil.copyfile(path, temporary)
            record = FileRecord(name, temporary.stat().st_size, sha256_of(temporary))
            if recorded.get(path.name, record.sha256) != record.sha256:
                raise RunError(f"{path}: changed during the run; run again")
            publish_file(temporary, target)
        records.append(record)
    return tuple(records)


def write_sidecar(path: Path, data: bytes) -> FileRecord:
    """Write one small file, whole or not at all, and return its record."""
    with storage_errors(path):
        write_atomically(path, data)
    return FileRecord(path.name, len(data), hashlib.sha256(data).hexdigest())


def written_config(source: Source, weights: str, mtp_layers: int) -> bytes:
    """``config.json`` for what is written: without ``quantization_config`` where weights are BF16.

    ``num_nextn_predict_layers`` says what is there: transformers takes 1 where the field is absent.
    """
    config: dict[str, Any] = dict(source.config)
    if weights == "bf16":
        config.pop("quantization_config", None)
    if weights == "bf16" and source.weights == "fp8":
        # Both spellings: transformers 5 reads dtype, older releases and other loaders torch_dtype.
        config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    if "num_nextn_predict_layers" in config or source.config.get("model_type") != "deepseek_v2":
        config["num_nextn_predict_layers"] = mtp_layers
    return json_bytes(config)


def source_record(source: Source, progress: Progress) -> SourceRecord:
    """Every file of the source with its digest: from the download's record, or hashed once in a counted pass.

    Repository and commit are claimed only where the files are still those that were recorded with them.
    """
    known = read_record(source.directory)
    digests = {file.name: file.sha256 for file in known.files} if known else {}
    names = [name for name in ("config.json", INDEX) if (source.directory / name).exists()]
    small = [*(source.directory / name for name in names), *find_sidecars(source.directory, BESIDE_SHARDS)]
    paths: list[Path] = sorted([*(header.path for header in source.headers), *small])
    counts = {header.path: len(header.tensors) for header in source.headers}
    files = []
    with reading(source.directory):
        progress.phase("hash source", sum(path.stat().st_size for path in paths))
        for path in paths:
            size, name = path.stat().st_size, path.relative_to(source.directory).as_posix()
            if name in digests:
                progress.advance(size)
            sha256 = digests.get(name) or sha256_of(path, progress.advance)
            files.append(FileRecord(name, size, sha256, counts.get(path)))
    record = SourceRecord(None, None, tuple(files))
    repo, commit = (known.repo, known.commit) if known else _dequantized_from(source.directory, record)
    return SourceRecord(repo, commit, record.files)


def _dequantized_from(directory: Path, record: SourceRecord) -> tuple[str | None, str | None]:
    """Where the FP8 original of a dequantised directory came from, if its weights are still those written then."""
    path = directory / "dequantized.json"
    if not path.exists():
        return None, None
    fields = read_json(path)
    written = {file.get("name"): file.get("sha256") for file in fields.get("files", []) if file.get("tensors")}
    here = {file.name: file.sha256 for file in record.files if file.tensors is not None}
    origin = fields.get("source") or {}
    return (origin.get("repo"), origin.get("commit")) if written == here else (None, None)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
