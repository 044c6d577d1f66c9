"""Files known again by their stamps, and the hashes of weights that were computed of such files.

A file whose size, time stamps and inode are the same holds the same bytes: whoever writes to it
changes its ctime, which no program can set back. Stamps that are too young are not kept, since a
file may change twice within one tick of a file system's clock.
"""

import json
import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from thinsection.config import user_cache_dir
from thinsection.files.atomic import read_json, write_json

# name, size, mtime and ctime in ns, and inode of each file
Stamps = tuple[tuple[str, int, int, int, int], ...]
# age at which stamps count: the coarsest clock of a file system ticks every 2 s
_SETTLED_NS = 2_000_000_000
# packages that decide what a network makes of a file of weights
_PACKAGES = ("thinsection", "torch", "timm")


def read_stamps(files: Iterable[str | Path]) -> Stamps | None:
    """Stamps of the files; None if one is missing."""
    try:
        stats = [(str(file), Path(file).stat()) for file in files]
    except OSError:
        return None
    return tuple(
        (name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        for name, stat in stats
    )


def are_settled(stamps: Stamps) -> bool:
    """Tells whether the files still have their stamps, and these are old enough to count."""
    if stamps != read_stamps(stamp[0] for stamp in stamps):
        return False
    newest_ns = max(max(stamp[2:4]) for stamp in stamps)
    return time.time_ns() - newest_ns >= _SETTLED_NS


def keep_stamps(path: Path, stamps: Stamps | None, **facts: str) -> None:
    """Writes stamps that were read before the files' content, with what was found in them.

    Nothing is written if a file is missing, has changed since or is too young, or if the folder
    cannot be written: the files are then read again.
    """
    if stamps is None or not are_settled(stamps):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"stamps": stamps, **facts})
    except OSError:
        return


def kept_facts(path: Path, stamps: Stamps | None) -> dict[str, str] | None:
    """What `keep_stamps` wrote about files with these stamps; None if it wrote nothing."""
    if stamps is None:
        return None
    try:
        document = read_json(path)
        kept = document.pop("stamps")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    if kept != [list(stamp) for stamp in stamps]:
        return None
    return {str(name): str(value) for name, value in document.items()}


def known_hash(network: str, stamps: Stamps | None) -> str | None:
    """Hash of the network's weights from the files with these stamps, if it was computed before.

    Args:
        network: text that tells networks apart which the same file may fill.
        stamps: stamps of all files that decide the weights.
    """
    facts = kept_facts(_hash_path(network, stamps or ()), stamps)
    return None if facts is None else facts.get("weights_hash")


def keep_hash(network: str, stamps: Stamps | None, weights_hash: str) -> None:
    """Keeps a hash for `known_hash`, in the user's cache. See `keep_stamps`."""
    path = _hash_path(network, stamps or ())
    keep_stamps(path, stamps, weights_hash=weights_hash)


def _hash_path(network: str, stamps: Sequence[tuple[object, ...]]) -> Path:
    names = [stamp[0] for stamp in stamps]
    parts = [network, names, [installed_version(package) for package in _PACKAGES]]
    name = sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return user_cache_dir() / "weights" / f"{name}.json"


def installed_version(package: str) -> str:
    """Version of a package; '' if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
