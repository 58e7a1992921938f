"""The source of a conversion: a hub repository's commit, downloaded, or a local directory as it is."""

from pathlib import Path

from prefect import task

from model.checkpoint import hub
from model.checkpoint.locate import download_directory, local_directory
from tasks.progress import StageProgress
from tasks.results import SourceResult
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
    persist_result=False, task_run_name="download {repo}",
)  # fmt: skip
def download(repo: str, commit: str, downloads: Path) -> SourceResult:
    """Bring one commit's files below ``downloads``, resumed and checked; see ``hub.download``."""
    directory = download_directory(downloads, repo, commit)
    with StageProgress("download") as progress:
        record = hub.download(repo, commit, directory, progress=progress)
    return SourceResult(directory=directory, repo=repo, commit=commit, size=sum(file.size for file in record.files))


@task(persist_result=False)
def take_local(source: str) -> SourceResult:
    """A local directory, as it is. Raises ``InputError`` where it is none."""
    directory = local_directory(source).absolute()
    return SourceResult(directory=directory, size=sum(f.stat().st_size for f in directory.glob("*.safetensors")))
