"""The real huggingface_hub client against `tests.hub_server`: every byte, every break, every refusal."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from model.checkpoint.download_record import RECORD_NAME, DownloadedFile, DownloadRecord, read_record
from model.checkpoint.hub import DamagedFileError, _silent_bar, download, list_files, resolve
from model.checkpoint.hub_errors import TransientError
from model.checkpoint.progress import Silent
from model.errors import InputError, RunError
from tests.hub_server import INFO, TREE, HubServer, quick_client, read_directory

TINY = Path(__file__).parents[2] / "assets" / "tiny-v3"
SHARD = "model-00003-of-000007.safetensors"
SMALL = {"config.json": b'{"model_type": "deepseek_v3"}', "model.safetensors": bytes(range(256)) * 2048}
ALWAYS = 10**6


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    server.reset()
    quick_client(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return server


class Told(Silent):
    """Notes the bytes that a download tells of."""

    def __init__(self, sizes):
        self.advance = sizes.append


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def contents(directory: Path) -> dict[str, bytes]:
    """All files but the record and huggingface_hub's own folder."""
    return {name: data for name, data in read_directory(directory).items() if not name.startswith(".")}


def test_download_brings_every_byte_and_records_it(hub, tmp_path):
    commit = hub.add("org/tiny", TINY)
    assert resolve("org/tiny", endpoint=hub.endpoint) == commit
    sizes = []
    record = download("org/tiny", commit, tmp_path / "tiny", progress=Told(sizes), endpoint=hub.endpoint)
    expected = contents(TINY)
    assert contents(tmp_path / "tiny") == expected
    assert [(file.name, file.size, file.sha256) for file in record.files] == [
        (name, len(data), sha256(data)) for name, data in sorted(expected.items())
    ]
    assert (record.repo, record.commit) == ("org/tiny", commit)
    assert len(hub.calls(TREE)) == 3  # 13 files in pages of 5
    assert sum(sizes) == sum(file.size for file in list_files("org/tiny", commit, endpoint=hub.endpoint))
    assert json.loads((tmp_path / "tiny" / RECORD_NAME).read_text()) == {
        "repo": "org/tiny",
        "commit": commit,
        "files": [
            {"name": file.name, "size": file.size, "sha256": file.sha256, "mtime_ns": file.mtime_ns}
            for file in record.files
        ],
    }
    assert read_record(tmp_path / "tiny") == record
    assert not list((tmp_path / "tiny").rglob("*.tmp"))


def test_finished_directory_costs_no_request_and_no_hash(hub, tmp_path, monkeypatch):
    commit = hub.add("org/small", SMALL)
    record = download("org/small", commit, tmp_path, endpoint=hub.endpoint)
    hub.clear()
    monkeypatch.setattr("model.checkpoint.hub._hash_file", None)  # a call would fail
    assert download("org/small", commit, tmp_path, endpoint=hub.endpoint) == record
    assert hub.log == []


def test_branch_tag_and_commit_resolve(hub):
    first = hub.add("org/small", SMALL, tag="v1")
    second = hub.add("org/small", SMALL | {"README.md": b"new"})
    assert first != second
    assert resolve("org/small", "main", endpoint=hub.endpoint) == second
    assert resolve("org/small", "v1", endpoint=hub.endpoint) == first
    hub.clear()
    assert resolve("org/small", first, endpoint=hub.endpoint) == first
    assert hub.log == []  # a commit stands for itself


def test_only_the_checkpoints_files_come(hub, tmp_path):
    wanted = """LICENSE-MODEL README.md chat_template.jinja additional_chat_templates/tool.jinja modeling.py
        tiktoken.model own.tiktoken merges.txt empty.json"""
    unwanted = """pytorch_model.bin pytorch_model.bin.index.json model.gguf model.pt x.pth onnx/model.onnx
        .gitattributes original/model.safetensors inference/convert.py figures/plot.png .shardflow-source.json"""
    wanted = SMALL | dict.fromkeys(wanted.split(), b"")
    unwanted = dict.fromkeys(unwanted.split(), b"x")
    commit = hub.add("org/mixed", wanted | unwanted)
    record = download("org/mixed", commit, tmp_path, endpoint=hub.endpoint)
    assert contents(tmp_path) == wanted
    assert [file.name for file in record.files] == sorted(wanted)


def test_dropped_connection_resumes_inside_the_file(hub, tmp_path):
    commit = hub.add("org/tiny", TINY)
    size = (TINY / SHARD).stat().st_size
    hub.fault(SHARD, drop_after=size // 2)
    sizes = []
    record = download("org/tiny", commit, tmp_path, progress=Told(sizes), endpoint=hub.endpoint)
    assert contents(tmp_path) == contents(TINY)
    first, second = hub.calls(SHARD)
    assert first.range is None
    assert size // 2 <= first.sent < size
    start = int(second.range.removeprefix("bytes=").removesuffix("-"))
    assert 0 < start <= first.sent
    assert second.sent == size - start
    assert hub.sent(SHARD) < 1.1 * size
    assert sum(sizes) == sum(file.size for file in record.files)


def test_finished_files_survive_a_break(hub, tmp_path):
    commit = hub.add("org/tiny", TINY)
    hub.fault(SHARD, failures=ALWAYS)
    with pytest.raises(TransientError, match=rf"^org/tiny@{commit}: {SHARD}: the hub answers HTTP 503; .*resumes"):
        download("org/tiny", commit, tmp_path, workers=1, endpoint=hub.endpoint)
    finished = set(contents(tmp_path))
    assert "model-00002-of-000007.safetensors" in finished
    assert SHARD not in finished
    assert read_record(tmp_path) is None
    hub.heal()
    hub.clear()
    sizes = []
    record = download("org/tiny", commit, tmp_path, progress=Told(sizes), endpoint=hub.endpoint)
    assert hub.fetched() == set(contents(TINY)) - finished
    assert contents(tmp_path) == contents(TINY)
    assert sum(sizes) == sum(file.size for file in record.files)


def test_no_further_file_is_started_after_a_failure(hub, tmp_path):
    commit = hub.add("org/many", {"a.safetensors": b"x"} | {f"b{i:03}.json": b"{}" for i in range(99)})
    hub.fault("a.safetensors", failures=ALWAYS)
    with pytest.raises(TransientError, match=r"a\.safetensors"):
        download("org/many", commit, tmp_path, workers=1, endpoint=hub.endpoint)
    assert len(hub.fetched()) < 99


def test_a_503_that_goes_away_is_retried(hub, tmp_path):
    commit = hub.add("org/small", SMALL)
    hub.fault("model.safetensors", failures=2)
    hub.fault(TREE, failures=2)
    download("org/small", commit, tmp_path, endpoint=hub.endpoint)
    assert contents(tmp_path) == SMALL
    assert len(hub.calls("model.safetensors", "HEAD")) == 3
    assert len(hub.calls(TREE)) == 3


@pytest.mark.parametrize("status", [408, 429, 500, 503, 504])
@pytest.mark.parametrize("name", [INFO, TREE, "model.safetensors"])
def test_lasting_server_errors_are_transient(hub, tmp_path, name, status):
    commit = hub.add("org/small", SMALL)
    hub.fault(name, failures=ALWAYS, status=status, get_only=name not in (INFO, TREE))
    with pytest.raises(TransientError, match=rf"^org/small@.*HTTP {status}") as caught:
        download("org/small", resolve("org/small", endpoint=hub.endpoint), tmp_path, endpoint=hub.endpoint)
    assert isinstance(caught.value, RunError)
    assert len(caught.value.problems) == 1
    assert not (tmp_path / RECORD_NAME).exists()
    hub.heal()
    download("org/small", commit, tmp_path, endpoint=hub.endpoint)
    assert contents(tmp_path) == SMALL


def test_nobody_listening_is_transient(hub, tmp_path):
    with HubServer() as gone:
        pass
    with pytest.raises(TransientError, match=r"^org/small@main: the connection failed \(ConnectError\)"):
        resolve("org/small", endpoint=gone.endpoint)
    with pytest.raises(TransientError, match=r"the connection failed \(ConnectError\)"):
        download("org/small", "0" * 40, tmp_path, endpoint=gone.endpoint)


def test_other_statuses_are_not_transient(hub):
    hub.add("org/small", SMALL)
    hub.fault(INFO, failures=1, status=418)
    with pytest.raises(RunError, match=r"^org/small@main: the hub answers HTTP 418$") as caught:
        resolve("org/small", endpoint=hub.endpoint)
    assert not isinstance(caught.value, TransientError)


def test_damaged_files_are_named_removed_and_fetched_alone(hub, tmp_path):
    commit = hub.add("org/tiny", TINY)
    hub.fault(SHARD, corrupt=True)
    hub.fault("config.json", corrupt=True)
    with pytest.raises(DamagedFileError) as caught:
        download("org/tiny", commit, tmp_path, endpoint=hub.endpoint)
    config, shard = caught.value.problems
    right = (TINY / SHARD).read_bytes()
    wrong = bytes([right[0] ^ 0xFF]) + right[1:]
    assert shard == (
        f"{tmp_path / SHARD}: expected {len(right)} bytes with sha256 {sha256(right)}, "
        f"got {len(right)} bytes with sha256 {sha256(wrong)}; "
        "the file was removed, so running again fetches only it"
    )
    assert config.startswith(f"{tmp_path / 'config.json'}: expected 1434 bytes with git blob id ")
    assert caught.value.exit_status == 2
    assert set(contents(tmp_path)) == set(contents(TINY)) - {SHARD, "config.json"}
    assert read_record(tmp_path) is None
    hub.heal()
    hub.clear()
    download("org/tiny", commit, tmp_path, endpoint=hub.endpoint)
    assert hub.fetched() == {SHARD, "config.json"}
    assert contents(tmp_path) == contents(TINY)


def test_unknown_names_are_refused(hub, tmp_path):
    hub.add("org/small", SMALL)
    absent = "f" * 40
    with pytest.raises(InputError, match=r"^org/none@main: no such model repository.*`hf auth login`$"):
        resolve("org/none", endpoint=hub.endpoint)
    with pytest.raises(InputError, match=r"^org/small@v9: no such revision; check the branch, tag or commit$"):
        resolve("org/small", "v9", endpoint=hub.endpoint)
    with pytest.raises(InputError, match=rf"^org/small@{absent}: no such revision"):
        download("org/small", absent, tmp_path, endpoint=hub.endpoint)
    with pytest.raises(InputError, match=r"^a/b/c@main: not the name of a repository; write OWNER/NAME$"):
        resolve("a/b/c", endpoint=hub.endpoint)
    assert list(tmp_path.glob("*")) == []


def test_login_is_asked_for(hub, tmp_path, monkeypatch):
    commit = hub.add("org/gated", SMALL, gated=True)
    with pytest.raises(InputError, match=r"^org/gated@.*access is gated; .*`hf auth login`$"):
        download("org/gated", commit, tmp_path, endpoint=hub.endpoint)
    hub.fault(INFO, failures=1, status=403)
    with pytest.raises(InputError, match=r"the hub refuses access \(HTTP 403\); log in with `hf auth login`$"):
        resolve("org/gated", endpoint=hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_granted")
    download("org/gated", commit, tmp_path, endpoint=hub.endpoint)
    assert contents(tmp_path) == SMALL


def test_token_is_in_no_message_and_no_file(hub, tmp_path, monkeypatch, caplog):
    token = "hf_secretsecretsecret"
    monkeypatch.setenv("HF_TOKEN", token)
    caplog.set_level(logging.DEBUG)
    hub.add("org/small", SMALL)
    texts = []
    for name in (INFO, TREE, "model.safetensors"):
        for status in (401, 403, 418, 503):
            hub.fault(name, failures=ALWAYS, status=status)
            with pytest.raises((InputError, RunError)) as caught:
                download("org/small", resolve("org/small", endpoint=hub.endpoint), tmp_path, endpoint=hub.endpoint)
            texts.append("".join(traceback.format_exception(caught.value)))
            hub.heal()
    texts.append(caplog.text)
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HF_TOKEN", token + "\v.")  # the transport refuses the header and quotes it
    with pytest.raises(RunError) as caught:
        resolve("org/small", endpoint=hub.endpoint)
    texts.append("".join(traceback.format_exception(caught.value)))
    assert token in str(caught.value.__context__)  # so the transport's own words must not be shown
    monkeypatch.setenv("HF_TOKEN", token)
    download("org/small", resolve("org/small", endpoint=hub.endpoint), tmp_path, endpoint=hub.endpoint)
    assert {call.authorization for call in hub.log} == {f"Bearer {token}"}
    files = [data.decode("latin-1") for data in read_directory(tmp_path).values()]
    assert not [text for text in [*texts, *files] if token in text]


@pytest.mark.parametrize(
    "name", ["../x.json", "/etc/x.json", "a/../../x.json", "./x.json", "a//x.json", "..\\x.json", "C:x.json"]
)
def test_names_that_leave_the_directory_are_refused(hub, tmp_path, name):
    commit = hub.add("org/evil", SMALL | {name: b"{}"})
    with pytest.raises(InputError) as caught:
        download("org/evil", commit, tmp_path / "a" / "b", endpoint=hub.endpoint)
    assert caught.value.problems == (f"org/evil@{commit}: refused, file name {name!r} is not a plain relative path",)
    assert hub.fetched() == set()
    assert list(tmp_path.glob("*")) == []


def test_repository_without_safetensors_is_refused(hub, tmp_path):
    commit = hub.add("org/pickle", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(InputError, match=rf"^org/pickle@{commit}: holds no \*\.safetensors file"):
        download("org/pickle", commit, tmp_path, endpoint=hub.endpoint)
    assert hub.fetched() == set()


def test_changed_file_no_longer_counts_and_is_brought_back(hub, tmp_path):
    commit = hub.add("org/small", SMALL)
    record = download("org/small", commit, tmp_path, endpoint=hub.endpoint)
    (tmp_path / "config.json").write_bytes(b"{}")
    weights = record.files[1]
    assert read_record(tmp_path) == DownloadRecord(None, None, (weights,))
    hub.clear()
    assert download("org/small", commit, tmp_path, endpoint=hub.endpoint).files[1] == weights
    assert hub.fetched() == {"config.json"}
    assert contents(tmp_path) == SMALL


def test_same_size_and_new_time_no_longer_counts(hub, tmp_path):
    commit = hub.add("org/small", SMALL)
    weights = download("org/small", commit, tmp_path, endpoint=hub.endpoint).files[1]
    os.utime(tmp_path / weights.name, ns=(weights.mtime_ns, weights.mtime_ns + 1))
    assert [file.name for file in read_record(tmp_path).files] == ["config.json"]
    hub.clear()
    again = download("org/small", commit, tmp_path, endpoint=hub.endpoint).files[1]
    assert again == DownloadedFile(weights.name, weights.size, weights.sha256, weights.mtime_ns + 1)
    assert hub.fetched() == set()  # hashed, found right, kept


def test_files_that_are_there_are_checked_and_kept(hub, tmp_path):
    commit = hub.add("org/small", SMALL)
    (tmp_path / "config.json").write_bytes(SMALL["config.json"])
    (tmp_path / "model.safetensors").write_bytes(SMALL["model.safetensors"][:-1] + b"?")
    download("org/small", commit, tmp_path, endpoint=hub.endpoint)
    assert hub.fetched() == {"model.safetensors"}
    assert contents(tmp_path) == SMALL


def test_new_commit_fetches_what_changed_and_removes_what_went(hub, tmp_path):
    first = hub.add("org/small", SMALL | {"old.json": b"old"})
    download("org/small", first, tmp_path, endpoint=hub.endpoint)
    (tmp_path / "mine.json").write_bytes(b"not the hub's")
    second = hub.add("org/small", SMALL | {"config.json": b"new", "LICENSE": b"MIT"})
    hub.clear()
    record = download("org/small", second, tmp_path, endpoint=hub.endpoint)
    assert hub.fetched() == {"config.json", "LICENSE"}
    assert contents(tmp_path) == SMALL | {"config.json": b"new", "LICENSE": b"MIT", "mine.json": b"not the hub's"}
    assert (record.commit, read_record(tmp_path)) == (second, record)


def test_directory_of_another_repository_is_refused(hub, tmp_path):
    download("org/small", hub.add("org/small", SMALL), tmp_path, endpoint=hub.endpoint)
    other = hub.add("org/other", SMALL | {"config.json": b"other"})
    with pytest.raises(InputError, match=r"holds org/small, not org/other; choose another directory$"):
        download("org/other", other, tmp_path, endpoint=hub.endpoint)
    assert contents(tmp_path) == SMALL


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"repo": "a/b", "commit": null, "files": [{"name": "x"}]}'])
def test_unreadable_record_vouches_for_nothing(tmp_path, text):
    assert read_record(tmp_path) is None
    (tmp_path / RECORD_NAME).write_text(text)
    assert read_record(tmp_path) is None


def test_local_failures_are_named(hub, tmp_path):
    commit = hub.add("org/small", SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"(File exists|Not a directory)") as caught:
        download("org/small", commit, tmp_path / "file", endpoint=hub.endpoint)
    assert not isinstance(caught.value, TransientError)


def test_full_disk_is_told_before_anything_is_fetched(hub, tmp_path, monkeypatch):
    commit = hub.add("org/small", SMALL)
    (tmp_path / "config.json").write_bytes(SMALL["config.json"])
    size = len(SMALL["model.safetensors"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=size - 1))
    with pytest.raises(RunError, match=rf": {size} bytes are to be downloaded, {size - 1} are free"):
        download("org/small", commit, tmp_path, endpoint=hub.endpoint)
    assert hub.fetched() == set()


def test_failing_xet_storage_is_transient(hub, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Task error: CAS Client Error")  # what hf_xet raises where its server is not reached

    commit = hub.add("org/small", SMALL)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    with pytest.raises(TransientError, match=r"^org/small@\w+: (config\.json|model\.safetensors): Xet storage failed"):
        download("org/small", commit, tmp_path, endpoint=hub.endpoint)


def test_endpoint_that_is_no_hub_is_refused(hub):
    hub.add("org/site", {"page.html": b"<html></html>"})
    with pytest.raises(InputError, match=r"^org/small@main: the answer is not one of a hub; check HF_ENDPOINT"):
        resolve("org/small", endpoint=f"{hub.endpoint}/org/site/resolve/main/page.html?")


def test_environment_names_the_hub(hub, tmp_path):
    commit = hub.add("org/small", SMALL)
    program = """import sys; from pathlib import Path; from model.checkpoint.hub import download, resolve
print(download("org/small", resolve("org/small"), Path(sys.argv[1])).commit)"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        env=os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / ".home"), "HF_HUB_OFFLINE": "0"},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == f"{commit}\n"
    assert contents(tmp_path) == SMALL


def test_xet_bytes_are_counted_once():
    counts = []
    reporter = XetDownloadProgressReporter(
        reconstruction_desc="", total=100, log_level=logging.WARNING, tqdm_class=_silent_bar(counts.append)
    )
    with reporter:
        for written, received in ((0, 30), (40, 60), (100, 80)):
            reporter.update_progress(
                SimpleNamespace(
                    total_bytes=100,
                    total_bytes_completed=written,
                    total_transfer_bytes_completed=received,
                    total_bytes_completion_rate=1.0,
                    total_transfer_bytes_completion_rate=1.0,
                )
            )
    assert counts == [40, 60]
