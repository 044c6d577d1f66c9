"""Folders of converted and compiled networks in the user's cache, named by a hash of their making.

A folder is whole or does not count: it is written beside its place, with a manifest of the digest
of each file, and then renamed. So a process that is killed leaves nothing that is taken for a
graph. Callers hold a lock: of several processes one makes the graph, and the others wait for it.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path

from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.atomic import TMP_MARK, write_json
from thinsection.weights.origin import keep_stamps, kept_facts, read_stamps

_MANIFEST = "manifest.json"
_STAMPS = "stamps.json"  # of the files whose bytes were compared with the manifest
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def is_whole(folder: Path, files: tuple[str, ...]) -> bool:
    """True if a graph exists with the bytes that were written.

    They are read and compared once, and known again by the stamps of their files.
    """
    stamps = read_stamps(folder / name for name in (_MANIFEST, *files))
    if kept_facts(folder / _STAMPS, stamps) is not None:
        return True
    try:
        written = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        has_these_bytes = bool(written == _manifest(folder, files))
    except (OSError, ValueError):
        return False
    if has_these_bytes:
        keep_stamps(folder / _STAMPS, stamps)
    return has_these_bytes


def write_graph(
    folder: Path, files: tuple[str, ...], write: Callable[[Path], None], *, remedy: str
) -> None:
    """Write the complete graph or nothing, in place of a damaged one.

    Args:
        folder: place of the graph.
        files: names of the files that make it.
        write: writes them into the folder that it is given.
        remedy: what to do where the disk refuses them.

    Raises StoreError: the disk refuses the files.
    """
    unfinished = folder.with_name(f"{folder.name}{TMP_MARK}")
    # left by a process that was killed
    shutil.rmtree(unfinished, ignore_errors=True)
    # it may be damaged, or not exist
    shutil.rmtree(folder, ignore_errors=True)
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        # private whatever the umask: a compiled network is code
        unfinished.mkdir(mode=0o700)
        write(unfinished)
        write_json(unfinished / _MANIFEST, _manifest(unfinished, files))
        unfinished.rename(folder)
    except OSError as error:
        raise StoreError(
            f"the network must be saved to {str(folder)!r}, got {error}; free some space, or "
            f"{remedy}"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_private(folder: Path) -> None:
    """Refuses a folder from which code must not be loaded.

    Raises InvalidInputError: it is a link, of another user, or one that others may write.
    """
    if not hasattr(os, "getuid"):
        return
    found = folder.lstat()
    owner_is_user = found.st_uid == os.getuid()
    is_own_folder = stat.S_ISDIR(found.st_mode) and owner_is_user
    if not is_own_folder or found.st_mode & _WRITABLE_BY_OTHERS:
        raise InvalidInputError(
            "folder of compiled networks must belong to this user, and nobody else may write it, "
            f"got {str(folder)!r} of user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}; delete it, or run: chmod go-w {folder}"
        )


def _manifest(folder: Path, files: tuple[str, ...]) -> dict[str, str]:
    """Digest of each file of a graph."""
    digests = {}
    for name in files:
        with (folder / name).open("rb") as file:
            digests[name] = file_digest(file, "sha256").hexdigest()
    return digests
