import pytest

from model.checkpoint.locate import is_hub_id, locate
from model.errors import InputError
from tests.checkpoints import tree_bytes
from tests.hub_server import HubServer, make_it_the_hub, quick_client


def test_what_is_a_hub_id(tmp_path, monkeypatch):
    assert is_hub_id("deepseek-ai/DeepSeek-V3")
    assert not is_hub_id("a/b/c")
    assert not is_hub_id("/data/v3")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "v3").mkdir(parents=True)
    assert not is_hub_id("data/v3")


def test_directories_and_refusals(tmp_path):
    assert locate(str(tmp_path), None, tmp_path) == tmp_path
    with pytest.raises(InputError, match="which has no revisions"):
        locate(str(tmp_path), "main", tmp_path)
    with pytest.raises(InputError, match="is neither a directory nor a hub id"):
        locate(str(tmp_path / "none"), None, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is not a directory"):
        locate(str(tmp_path / "file"), None, tmp_path)


def test_a_hub_id_is_downloaded_below_its_commit(tiny, tmp_path, monkeypatch):
    with HubServer() as hub:
        quick_client(monkeypatch)
        make_it_the_hub(monkeypatch, hub.endpoint)
        commit = hub.add("org/tiny", tiny)
        found = locate("org/tiny", "main", tmp_path)
    assert found == tmp_path / "org--tiny" / commit
    downloaded = tree_bytes(found)
    assert all(downloaded[path.name] == path.read_bytes() for path in tiny.iterdir())
