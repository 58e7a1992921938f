"""The source of a conversion: a hub repository's commit, downloaded, or a local directory as it is."""

from pathlib import Path

from prefect import task

from model.checkpoint import hub
from model.checkpoint.fingerprint import fingerprint
from model.checkpoint.locate import download_directory, local_directory
from tasks.caching import OnDisk, this_run
from tasks.progress import StageProgress
from tasks.results import FileResult, SourceResult
from tasks.retries import DELAYS, JITTER, RETRIES, may_go_away


@task(
    retries=RETRIES, retry_delay_seconds=DELAYS, retry_jitter_factor=JITTER, retry_condition_fn=may_go_away,
    persist_result=False,
)  # fmt: skip
def resolve_revision(repo: str, revision: str | None) -> str:
    """The commit that a branch, tag or commit of ``repo`` stands for now."""
    return hub.resolve(repo, revision)


@task(
    retries=RETRIES, retry_delay_seconds=DELAYS, retry_jitter_factor=JITTER, retry_condition_fn=may_go_away,
    cache_policy=OnDisk(stage="download", ignored=("purpose",)), result_serializer="json",
    task_run_name="download {repo}",
)  # fmt: skip
def download(repo: str, commit: str, downloads: Path, purpose: str) -> SourceResult:
    """Bring one commit's files below ``downloads``, resumed and checked; see ``hub.download``.

    ``purpose`` tells which released download counts as present, see ``model.checkpoint.released``.
    """
    directory = download_directory(downloads, repo, commit)
    with StageProgress("download") as progress:
        record = hub.download(repo, commit, directory, progress=progress)
    return SourceResult(
        directory=directory,
        repo=repo,
        commit=commit,
        size=sum(file.size for file in record.files),
        files=tuple(FileResult(name=file.name, size=file.size, sha256=file.sha256) for file in record.files),
        made_by=this_run(),
    )


def local_source(source: str) -> SourceResult:
    """A local directory, as it is. Raises ``InputError`` where it is none."""
    directory = local_directory(source).absolute()
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return SourceResult(directory=directory, size=size, fingerprint=fingerprint(directory))
