"""Failures of the hub and the network as one line each, sorted into those that may go away and those that stay."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx's or httpx2's, by version
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from model.errors import InputError, RunError


class TransientError(RunError):
    """A failure of the network or the hub that may go away: connection, time-out, 408, 429 or 5xx."""


_NO_HUB = "the answer is not one of a hub; check HF_ENDPOINT and the proxy"
_REFUSALS: tuple[tuple[type[Exception], str], ...] = (
    (GatedRepoError, "access is gated; accept its terms on the repository's page and log in with `hf auth login`"),
    (RepositoryNotFoundError, "no such model repository, or private; check the name or log in with `hf auth login`"),
    (RevisionNotFoundError, "no such revision; check the branch, tag or commit"),
    (HFValidationError, "not the name of a repository; write OWNER/NAME"),
    (OfflineModeIsEnabled, "HF_HUB_OFFLINE forbids the network; unset it, or give a local directory"),
    (FileMetadataError, _NO_HUB),
    (json.JSONDecodeError, _NO_HUB),
)


@contextmanager
def hub_errors(repo: str, revision: str | None, name: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises in the block into the project's errors, naming repository and file."""
    where = f"{repo}@{revision or constants.DEFAULT_REVISION}" + (f": {name}" if name else "")
    try:
        yield
    except (HTTPError, HFValidationError, json.JSONDecodeError, OSError) as error:
        # Not chained: the transport's messages can quote the request, token included.
        raise _translated(error, where) from None
    except RunError:
        raise
    except RuntimeError as error:  # all that hf_xet says of its network, its server and the disk
        raise TransientError(f"{where}: Xet storage failed; running again resumes the download") from error


def _translated(error: BaseException, where: str) -> InputError | RunError:
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _translated(error.__cause__, where)  # huggingface_hub's wrapper of a request that failed
    for kind, problem in _REFUSALS:
        if isinstance(error, kind):
            return InputError(f"{where}: {problem}")
    if isinstance(error, HfHubHTTPError):
        return _refused_status(error.response.status_code, where)
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        return RunError(f"{error.filename or where}: {os.strerror(error.errno)}; running again resumes the download")
    return TransientError(
        f"{where}: the connection failed ({type(error).__name__}); running again resumes the download"
    )


def _refused_status(status: int, where: str) -> InputError | RunError:
    if status in (401, 403):
        return InputError(f"{where}: the hub refuses access (HTTP {status}); log in with `hf auth login`")
    if status in (408, 429) or status >= 500:
        return TransientError(f"{where}: the hub answers HTTP {status}; running again later resumes the download")
    return RunError(f"{where}: the hub answers HTTP {status}")
