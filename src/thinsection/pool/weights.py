"""State dicts: read without pickle's powers, checked by name and shape, identified by a hash."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from thinsection.errors import MissingDependencyError, WeightsError

SAFETENSORS = ".safetensors"
COMMIT = re.compile("[0-9a-f]{40}")


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors, or of a torch file read with `weights_only=True`.

    A torch file that holds one dict of tensors under `model` or `state_dict` is unwrapped.

    Memory: the tensors themselves (the file is mapped, not copied, where torch can).

    Raises:
        WeightsError: the file is missing, damaged, or holds anything but named tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"weights must be an existing file, got {str(path)!r}")
    if path.suffix == SAFETENSORS:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise WeightsError(f"weights must be safetensors, got {str(path)!r}: {error}") from None
    import pickle

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "convert it to safetensors"
        message = f"weights must be plain tensors, got {str(path)!r}: {first}; {remedy}"
        raise WeightsError(message) from None
    for key in ("model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in loaded.items()
    ):
        raise WeightsError(f"weights must be a dict of named tensors, got {str(path)!r}")
    return dict(loaded)


Download = Callable[[str, str, str], Path | None]  # repository, file, revision -> path


def hub_download(repository: str, name: str, revision: str) -> Path | None:
    """The hub's file in the local cache, or None where the repository has no such file.

    Raises:
        WeightsError: the hub refuses (a gated repository needs a login) or cannot be reached.
        MissingDependencyError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
        )
    except ImportError:
        remedy = "pip install 'thinsection[hub]', or pass a local file"
        raise MissingDependencyError(f"huggingface_hub is not installed; {remedy}") from None
    failures = (LocalEntryNotFoundError, HfHubHTTPError, OSError)
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except failures as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        remedy = "ask for access, log in with `hf auth login`, or pass a local file"
        message = f"weights of {repository!r} at {revision[:12]} cannot be fetched"
        raise WeightsError(f"{message}: {type(error).__name__}; {remedy}") from error


def find_weights(
    source: str | Path,
    *,
    files: tuple[str, ...],
    revision: str | None,
    download: Download = hub_download,
) -> Path:
    """A local weights file: `source` itself, one of `files` in that folder, or from the hub.

    Args:
        source: a file, a folder, or a hub repository `owner/name` or `owner/name@COMMIT`.
        files: file names to look for, the preferred one first.
        revision: commit on the hub where `source` names none; nothing comes from a moving branch.
        download: how the hub is asked.

    Raises:
        WeightsError: nothing is there, or the hub refuses.
        MissingDependencyError: a hub repository, and huggingface_hub is not installed.
    """
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        for name in files:
            if (path / name).is_file():
                return path / name
        raise WeightsError(f"weights folder must hold {' or '.join(files)}, got {str(source)!r}")
    if path.is_absolute() or str(source).count("/") != 1 or str(source).startswith("."):
        rule = "be an existing file or folder, or a hub repository 'owner/name'"
        raise WeightsError(f"weights must {rule}, got {str(source)!r}")
    repository, _, commit = str(source).partition("@")
    commit = commit or revision or ""
    if not COMMIT.fullmatch(commit):
        rule = f"name a full commit, {repository}@COMMIT (40 hex digits)"
        raise WeightsError(f"weights from the hub must {rule}, got {commit!r}")
    for name in files:
        found = download(repository, name, commit)
        if found is not None:
            return found
    message = f"weights of {repository!r} at {commit[:12]} must hold {' or '.join(files)}"
    raise WeightsError(f"{message}, got none of them")


def check_names(
    state_dict: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Size], *, model: str
) -> None:
    """Nothing, if names and shapes are exactly the wanted ones.

    Raises:
        WeightsError: listing missing and unexpected names, or the first wrong shape.
    """
    missing, extra = sorted(set(wanted) - set(state_dict)), sorted(set(state_dict) - set(wanted))
    if missing or extra:
        parts = [f"missing {_listed(missing)}"] if missing else []
        parts += [f"unexpected {_listed(extra)}"] if extra else []
        raise WeightsError(f"{model} state dict must fit exactly, got {'; '.join(parts)}")
    for name, shape in wanted.items():
        if state_dict[name].shape != shape:
            got = tuple(state_dict[name].shape)
            raise WeightsError(f"{model} {name} must be of shape {tuple(shape)}, got {got}")


def state_dict_hash(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over names, shapes, dtypes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        value = state_dict[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
