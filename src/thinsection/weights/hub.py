"""Search for weights: a file, a folder, or the Hugging Face hub, at a commit.

The hub's cache is asked first, then the hub, with errors that say what to do. The token is
`HF_TOKEN` or the hub's own login, the cache is where `HF_HOME` says: both are read by
`huggingface_hub` itself.
"""

import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from thinsection.errors import WeightsError
from thinsection.weights.origin import COMMIT, INDEX, commit_of, shard_names
from thinsection.weights.placement import optional_package

# the library itself retries for 23 s before it says that there is no network
PROBE_TIMEOUT_S = 5.0


def hub_library() -> ModuleType:
    """Imports `huggingface_hub` with the submodules used here, which it does not import itself."""
    hub = optional_package("huggingface_hub")
    import_module("huggingface_hub.constants")
    import_module("huggingface_hub.errors")
    return hub


def cached_file(repo: str, filename: str, revision: str | None = None) -> Path | None:
    """Returns the path of the file in the hub's cache, if it is there."""
    path = hub_library().try_to_load_from_cache(repo, filename, revision=revision)
    return Path(path) if isinstance(path, str) else None


def has_token() -> bool:
    """Tells whether a token is configured; says nothing about what it opens."""
    return hub_library().get_token() is not None


def is_reachable(endpoint: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Tells whether the address answers at all, proxies of the environment respected."""
    head = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(head, timeout=timeout_s).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


def find_weights(
    source: str | Path, *, files: Sequence[str], revision: str | None = None
) -> Path:
    """Returns a local weights file.

    It is `source` itself, the first of `files` in that folder, or comes from the hub. A hub
    repository is `owner/name@COMMIT`, or `owner/name` at the commit `revision`: nothing comes from
    a moving branch.

    Raises:
        WeightsError: nothing is there, or the hub refuses.
        MissingDependencyError: `huggingface_hub` is not installed.
    """
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        for name in files:
            if (path / name).is_file():
                return path / name
        raise WeightsError(
            f"weights folder must contain {' or '.join(files)}, got {str(source)!r}"
        )
    if path.is_absolute() or str(source).count("/") != 1 or str(source).startswith("."):
        raise WeightsError(
            "weights must be an existing file or folder, or a hub repository 'owner/name', "
            f"got {str(source)!r}"
        )
    repo, _, commit = str(source).partition("@")
    commit = commit or revision or ""
    if not COMMIT.fullmatch(commit):
        raise WeightsError(
            f"weights from the hub must name a full commit, {repo}@COMMIT (40 hex digits), "
            f"got {commit!r}"
        )
    return hub_file(repo, files, revision=commit)


def hub_file(
    repo: str, filenames: Sequence[str], *, revision: str | None = None
) -> Path:
    """Fetches the first of these files that the repository has; with an index, its shards too.

    Returns: its local path. Warns (UserWarning) where `revision` is not a commit, and says which
    one it is today.

    Raises:
        WeightsError: offline, gated, no such repository or file; the message says what to do.
    """
    paths = (cached_file(repo, filename, revision) for filename in filenames)
    path = next(filter(None, paths), None)
    if path is None:
        path = _download_first(repo, filenames, revision)
    commit = commit_of(path)
    if not COMMIT.fullmatch(revision or ""):
        now = f"{revision or 'main'!r} is {commit or 'of an unknown commit'} now"
        warnings.warn(
            f"{repo!r} is not pinned to a commit and may change; {now}", stacklevel=2
        )
    if path.name.endswith(INDEX):
        for shard in shard_names(path):
            hub_file(repo, (shard,), revision=commit or revision)
    return path


def _download_first(repo: str, filenames: Sequence[str], revision: str | None) -> Path:
    """Downloads the first of these files that the repository has."""
    hub = hub_library()
    endpoint = hub.constants.ENDPOINT
    needed = f"weights of {repo!r} must be in the hub's cache"
    remedy = (
        "download it on a machine with a network: "
        f"{fetch_command(repo, filenames[0], revision)}"
    )
    if hub.constants.HF_HUB_OFFLINE:
        raise WeightsError(f"{needed} while HF_HUB_OFFLINE is set, got none; {remedy}")
    if not is_reachable(endpoint):
        raise WeightsError(
            f"{needed} or downloadable, got no answer from {endpoint}; {remedy}"
        )
    for filename in filenames:
        path = _download(hub, repo, filename, revision)
        if path is not None:
            return path
    names = ", ".join(filenames)
    raise WeightsError(
        f"repository {repo!r} must have one of {names}, got none of them"
    )


def fetch_command(repo: str, filename: str, revision: str | None) -> str:
    """Returns the command that fetches the file into the hub's cache, here or elsewhere."""
    option = f" --revision {revision}" if revision else ""
    return f"hf download {repo} {filename}{option}"


def _download(
    hub: ModuleType, repo: str, filename: str, revision: str | None
) -> Path | None:
    """Returns the downloaded file; None where the repository has no file of that name."""
    errors = hub.errors
    page = f"{hub.constants.ENDPOINT}/{repo}"
    weights = f"weights of {repo!r} must be"
    try:
        return Path(hub.hf_hub_download(repo, filename, revision=revision))
    # the hub's HTTP errors are OSErrors
    except (errors.EntryNotFoundError, OSError) as error:
        match error:
            case errors.GatedRepoError():
                remedy = (
                    f"accept the terms at {page} and set HF_TOKEN (or: hf auth login)"
                )
                message = f"{weights} granted to your account, got a refusal; {remedy}"
            case errors.RepositoryNotFoundError() | errors.RevisionNotFoundError():
                got = f"got {repo!r} at revision {revision or 'main'!r}"
                remedy = "check the name, and HF_TOKEN if it is private"
                message = f"repository must exist and be visible to your account, {got}; {remedy}"
            case errors.LocalEntryNotFoundError():
                message = f"{weights} downloadable, got a broken connection; try again"
            case errors.EntryNotFoundError():
                return None
            case _:
                message = (
                    f"{weights} downloadable, got {error}; try again, or check {page}"
                )
        raise WeightsError(message) from error
