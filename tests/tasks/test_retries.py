import pytest
from prefect.states import Failed

from model.checkpoint.hub import DamagedFileError
from model.checkpoint.hub_errors import TransientError
from model.errors import InputError, RunError
from tasks.publication import _publish, release_intermediates
from tasks.retries import may_go_away
from tasks.source import download, resolve_revision
from tasks.stages import convert, dequantize, plan, validate


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (TransientError("503"), True),
        (DamagedFileError("sha256"), False),
        (InputError("no such repository"), False),
        (RunError("disk"), False),
        (ValueError("a bug"), False),
    ],
)
def test_only_what_may_go_away_is_tried_again(error, again):
    assert may_go_away(download, None, Failed(data=error)) is again


def test_only_network_stages_retry():
    assert {task.name for task in (download, resolve_revision) if task.retries and task.retry_condition_fn} == {
        "download",
        "resolve_revision",
    }
    assert not any(task.retries for task in (plan, dequantize, convert, validate, _publish, release_intermediates))
