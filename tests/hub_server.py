"""A small hub on loopback: what the real huggingface_hub client asks for, with faults on demand.

    with HubServer() as hub:
        commit = hub.add("org/tiny", Path("tests/assets/tiny-v3"))
        hub.fault("model-00001-of-000007.safetensors", drop_after=1000)
        download("org/tiny", commit, directory, endpoint=hub.endpoint)
        assert hub.sent("model-00001-of-000007.safetensors") > 0

It speaks model info, the tree in pages, and resolve (HEAD, GET, Range) over plain HTTP, without Xet and without a
redirect to another host. Safetensors files are LFS files (known by sha256), all others lie in git (by blob id).
"""

import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

INFO, TREE = "api:info", "api:tree"  # what `fault`, `calls` and `sent` call the two API requests
CHUNK = 16 * 1024


def quick_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the real client's retries immediate, and let it keep a broken file's bytes in steps of 64 KiB."""
    instant = SimpleNamespace(sleep=lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time", instant)
    monkeypatch.setattr("huggingface_hub.file_download.time", instant)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 64 * 1024)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def make_it_the_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What HF_ENDPOINT does when the client is imported."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@dataclass
class Call:
    """One request: what for (a file's name, `INFO` or `TREE`), its Range and Authorization, bytes of body sent."""

    method: str
    repo: str
    name: str
    range: str | None
    authorization: str | None
    sent: int = 0


@dataclass
class Fault:
    """What goes wrong with one name, on GET only or on every method."""

    drop_after: int | None = None  # close the connection after so many bytes, once
    status: int = 503
    failures: int = 0  # answer ``status`` so many times
    get_only: bool = False
    corrupt: bool = False  # flip a byte of the file, but list the hash of the right one


@dataclass
class Repo:
    """Commits by SHA, each file by name, and the branches and tags that point at them."""

    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)


class HubServer:
    """A hub in a thread of this process. ``log`` holds every `Call` since the start or the last `clear`."""

    def __init__(self, page_size: int = 5) -> None:
        self.page_size = page_size
        self.log: list[Call] = []
        self._repos: dict[str, Repo] = {}
        self._faults: dict[str, Fault] = {}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for an ACK
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self._app(), log_level="critical", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()  # requests wait in the socket's backlog until the server is up
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    # What tests say

    def add(self, repo: str, files: Path | Mapping[str, bytes], *, tag: str | None = None, gated: bool = False) -> str:
        """Push a directory (or contents by name) as the next commit of ``repo``'s main branch; returns the commit."""
        contents = dict(files) if isinstance(files, Mapping) else read_directory(files)
        target = self._repos.setdefault(repo, Repo())
        target.gated = gated
        history = [target.refs.get("main"), {name: blob_id(data) for name, data in sorted(contents.items())}]
        commit = hashlib.sha1(json.dumps(history).encode()).hexdigest()
        target.commits[commit] = contents
        target.refs |= {"main": commit} | ({tag: commit} if tag else {})
        return commit

    def fault(self, name: str, **faults: Any) -> None:
        """From now on something goes wrong with ``name``: the fields of `Fault`."""
        self._faults[name] = Fault(**faults)

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self._faults.clear()

    def clear(self) -> None:
        """Forget the calls so far."""
        self.log.clear()

    def reset(self) -> None:
        """Be like new: no repository, no fault, no call."""
        self._repos.clear()
        self.heal()
        self.clear()

    def calls(self, name: str, method: str = "GET") -> list[Call]:
        """The requests for ``name``, in order."""
        return [call for call in self.log if (call.name, call.method) == (name, method)]

    def fetched(self) -> set[str]:
        """The names of all files of which a body was asked for."""
        return {call.name for call in self.log if call.method == "GET"} - {INFO, TREE}

    def sent(self, name: str) -> int:
        """Bytes of ``name``'s body that were sent, over all requests."""
        return sum(call.sent for call in self.calls(name))

    # What the client asks

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_api_route("/api/models/{repo:path}/revision/{revision}", self._info)
        app.add_api_route("/api/models/{repo:path}/tree/{revision}", self._tree)
        app.add_api_route("/{repo:path}/resolve/{revision}/{name:path}", self._file, methods=["GET", "HEAD"])
        app.add_api_route("/api/models/{repo:path}", self._info)
        return app

    async def _info(self, request: Request, repo: str, revision: str = "main") -> Response:
        commit = self._commit(repo, revision)
        refusal = self._refusal(self._record(request, repo, INFO), commit)
        return refusal or JSONResponse({"id": repo, "sha": commit, "siblings": []})

    async def _tree(self, request: Request, repo: str, revision: str, cursor: int = 0) -> Response:
        commit = self._commit(repo, revision)
        if refusal := self._refusal(self._record(request, repo, TREE), commit):
            return refusal
        files = sorted(self._repos[repo].commits[commit].items())
        page = [tree_entry(name, data) for name, data in files[cursor : cursor + self.page_size]]
        following = request.url.include_query_params(cursor=cursor + self.page_size)
        more = cursor + self.page_size < len(files)
        return JSONResponse(page, headers={"Link": f'<{following}>; rel="next"'} if more else None)

    async def _file(self, request: Request, repo: str, revision: str, name: str) -> Response:
        call, commit = self._record(request, repo, name), self._commit(repo, revision)
        if refusal := self._refusal(call, commit):
            return refusal
        data = self._repos[repo].commits[commit].get(name)
        if data is None:
            return error(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(data)}"', "Accept-Ranges": "bytes"}
        if is_lfs(name):
            headers |= {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        first, _, last = (call.range or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data)) + 1, len(data))
        if call.range:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        headers["Content-Length"] = str(end - start)
        if call.method == "HEAD":
            return Response(headers=headers)
        return StreamingResponse(
            self._body(call, data[:end], start), status_code=206 if call.range else 200, headers=headers
        )

    def _body(self, call: Call, data: bytes, start: int) -> Iterator[bytes]:
        fault = self._faults.get(call.name, Fault())
        if fault.corrupt:
            data = bytes([data[0] ^ 0xFF]) + data[1:]
        stop, fault.drop_after = fault.drop_after, None
        for begin in range(start, len(data), CHUNK):
            if stop is not None and begin - start >= stop:
                return  # fewer bytes than the header promised: the server closes the connection
            chunk = data[begin : begin + CHUNK]
            call.sent += len(chunk)
            yield chunk

    def _record(self, request: Request, repo: str, name: str) -> Call:
        header = request.headers.get
        self.log.append(Call(request.method, repo, name, header("range"), header("authorization")))
        return self.log[-1]

    def _commit(self, repo: str, revision: str) -> str:
        """The commit of a revision, empty where it has none."""
        target = self._repos.get(repo, Repo())
        commit = target.refs.get(revision, revision)
        return commit if commit in target.commits else ""

    def _refusal(self, call: Call, commit: str) -> Response | None:
        fault = self._faults.get(call.name, Fault())
        if fault.failures and (call.method == "GET" or not fault.get_only):
            fault.failures -= 1
            return error(fault.status)
        if call.repo not in self._repos:
            return error(401, "RepoNotFound")
        if not commit:
            return error(404, "RevisionNotFound")
        if self._repos[call.repo].gated and call.name not in (INFO, TREE) and call.authorization is None:
            return error(401, "GatedRepo")
        return None


def error(status: int, code: str | None = None) -> Response:
    return JSONResponse({"error": code}, status, headers={"X-Error-Code": code} if code else None)


def is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def blob_id(data: bytes) -> str:
    """git's id of a file's contents."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def tree_entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
    if is_lfs(name):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def read_directory(directory: Path) -> dict[str, bytes]:
    """The contents of a directory's files by name relative to it."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
