"""The headers of a hub repository's files without their data: enough for a plan, in seconds instead of hours."""

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from model.checkpoint import hub
from model.checkpoint.headers import LENGTH_BYTES
from model.checkpoint.hub_errors import hub_errors
from model.checkpoint.source import INDEX

NEEDED = ("config.json", INDEX)
THREADS = 8


@contextmanager
def headers_of(repo: str, revision: str | None, *, endpoint: str | None = None) -> Iterator[Path]:
    """A temporary directory in the form of the repository: its config, its index, and its safetensors files as
    sparse ones, with true headers and holes for data. ``source.open_source`` takes it; nothing may read its tensors.

    Raises what ``hub.list_files`` raises.
    """
    commit = hub.resolve(repo, revision, endpoint=endpoint)
    names = [file.path for file in hub.list_files(repo, commit, endpoint=endpoint)]
    with tempfile.TemporaryDirectory(prefix="shardflow-plan-") as temporary:
        directory = Path(temporary)
        with hub_errors(repo, commit):
            for name in set(names) & set(NEEDED):
                hf_hub_download(repo, name, revision=commit, local_dir=directory, endpoint=endpoint)

        def fetch(name: str) -> None:
            with hub_errors(repo, commit, name):
                _write_sparse(repo, commit, name, directory, endpoint)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, [name for name in names if name.endswith(".safetensors")]))
        yield directory


def _write_sparse(repo: str, commit: str, name: str, directory: Path, endpoint: str | None) -> None:
    found = HfApi(endpoint=endpoint).parse_safetensors_file_metadata(repo, name, revision=commit)
    header = {
        tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": list(info.data_offsets)}
        for tensor, info in found.tensors.items()
    }
    text = json.dumps(header).encode()
    end = max((info.data_offsets[1] for info in found.tensors.values()), default=0)
    with (directory / name).open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(LENGTH_BYTES + len(text) + end)
