"""Keys hold what decides a result; a remembered result counts only while it can be read and its files are there."""

from pathlib import Path

import pytest
from prefect import flow, task
from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings

from tasks.caching import STAGE_VERSIONS, OnDisk, stage_key, this_run
from tasks.results import ReleaseResult, Result, SourceResult

SOURCE = SourceResult(directory=Path("a"), fingerprint="f" * 64)


class Written(Result):
    """A file that a task of these tests wrote."""

    path: Path

    def is_there(self, inputs):
        return self.path.exists()


def test_a_key_changes_with_whatever_decides_the_result(monkeypatch):
    inputs = {"source": SOURCE, "out": Path("out"), "mp": 2}
    key = stage_key("convert", inputs)
    assert key == stage_key("convert", dict(inputs))
    assert key != stage_key("validate", inputs)
    assert key != stage_key("convert", inputs | {"mp": 4})
    assert key != stage_key("convert", inputs | {"out": Path("other")})
    assert key != stage_key("convert", inputs | {"source": SOURCE.model_copy(update={"fingerprint": "0" * 64})})
    assert key != stage_key("convert", inputs | {"source": SOURCE.model_copy(update={"made_by": "another run"})})
    monkeypatch.setitem(STAGE_VERSIONS, "convert", STAGE_VERSIONS["convert"] + 1)
    assert key != stage_key("convert", inputs)


def test_a_key_is_the_same_whatever_does_not_decide_it():
    moved = SOURCE.model_copy(update={"directory": Path("b"), "size": 5})
    assert stage_key("plan", {"source": SOURCE, "workers": 1}, ("workers",)) == stage_key(
        "plan", {"source": moved, "workers": 8}, ("workers",)
    )


@pytest.mark.usefixtures("prefect_server")
class TestOnAServer:
    @pytest.fixture(autouse=True)
    def results(self, tmp_path):
        with temporary_settings({PREFECT_RESULTS_LOCAL_STORAGE_PATH: tmp_path / "results"}):
            yield tmp_path / "results"

    @pytest.fixture
    def write(self):
        """A flow that runs a cached task, directly and in a thread, and tells what happened."""

        @task(cache_policy=OnDisk(stage="plan"), result_serializer="json")
        def write(path: Path) -> Written:
            path.write_text("done")
            return Written(path=path, made_by=this_run())

        @flow
        def writing(path: Path) -> tuple[str, str]:
            state = write(path, return_state=True)
            again = write.submit(path, return_state=True)
            assert isinstance(state.result(), Written)
            assert again.result() == state.result()
            return state.name, again.name

        return writing

    def test_a_lost_file_is_no_success(self, write, tmp_path):
        assert write(tmp_path / "file") == ("Completed", "Cached")
        assert write(tmp_path / "file") == ("Cached", "Cached")
        (tmp_path / "file").unlink()
        assert write(tmp_path / "file") == ("Completed", "Cached")
        assert (tmp_path / "file").read_text() == "done"

    @pytest.mark.parametrize("damage", ["", "{", '{"result": "x"}'])
    def test_a_record_that_cannot_be_read_is_no_success(self, write, results, tmp_path, damage):
        write(tmp_path / "file")
        for record in results.iterdir():
            record.write_text(damage)
        assert write(tmp_path / "file") == ("Completed", "Cached")

    def test_a_result_of_a_class_that_is_gone_is_no_success(self, write, results, tmp_path):
        write(tmp_path / "file")
        for record in results.iterdir():
            record.write_text(record.read_text().replace("Written", "NoLongerThere"))
        assert write(tmp_path / "file") == ("Completed", "Cached")


def test_a_released_directory_that_came_back_is_released_again(tmp_path):
    result = ReleaseResult(released=(tmp_path / "bf16",))
    assert result.is_there({})
    (tmp_path / "bf16").mkdir()
    assert not result.is_there({})
