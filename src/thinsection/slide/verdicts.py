"""What pixels of a slide said when they were compared, known again by the stamps of its file.

Two comparisons read pixels: that with OpenSlide, and that of the levels of a file with each other.
Each takes some 30 ms. Verdicts count for the same file and the same versions of the packages that
decode it. They are in the user's cache, in at most `_SHARDS` files with `_MOST` verdicts each:
some 4 MB in all.
"""

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from thinsection.config import user_cache_dir
from thinsection.files.atomic import read_json, write_json
from thinsection.types import Json, Mpp
from thinsection.weights.stamps import (
    Stamps,
    are_settled,
    installed_version,
    read_stamps,
)

_SHARDS = 256
_MOST = 128
_LEVELS = "levels"  # subject of verdicts on levels
_MOST_LEVELS = 64  # verdicts on levels that are kept of one file
# packages that decide which pixels the two readers see
_PACKAGES = (
    "thinsection",
    "tifffile",
    "imagecodecs",
    "simplejpeg",
    "openslide-python",
    "openslide-bin",
)


def slide_stamps(path: str) -> Stamps | None:
    """Returns the stamps of a slide that is one file; None if it is missing."""
    return read_stamps([Path(path).absolute()])


def known_levels(stamps: Stamps | None) -> dict[tuple[int, int], str]:
    """Returns what earlier comparisons of this file's levels found, by two offsets in the file.

    Args:
        stamps: `slide_stamps` of the file.
    """
    if stamps is None:
        return {}
    key = _key(stamps, _LEVELS)
    value = _read_verdicts(key).get(key)
    if not isinstance(value, list) or value[:1] != [_value(stamps)]:
        return {}
    return {(base, page): str(verdict) for base, page, verdict in value[1:]}


def keep_levels(stamps: Stamps | None, verdicts: Mapping[tuple[int, int], str]) -> None:
    """Keeps what comparisons of a file's levels found, as `keep_agreement` does."""
    if stamps is None or len(verdicts) > _MOST_LEVELS:
        return
    rows = [[base, page, verdict] for (base, page), verdict in verdicts.items()]
    _keep(stamps, _LEVELS, [_value(stamps), *rows])


def is_known_to_agree(stamps: Stamps | None, slide_mpp: Mpp | None) -> bool:
    """Tells whether an earlier comparison of this file found no difference.

    Args:
        stamps: `slide_stamps` of the file.
        slide_mpp: the resolution that was given in place of the file's.
    """
    if stamps is None:
        return False
    key = _key(stamps, slide_mpp)
    return _read_verdicts(key).get(key) == _value(stamps)


def keep_agreement(stamps: Stamps | None, slide_mpp: Mpp | None) -> None:
    """Keeps that a comparison found no difference.

    Nothing is kept if the file has changed since its stamps were read or is too young, or if the
    cache cannot be written: the slide is then compared again.
    """
    if stamps is not None:
        _keep(stamps, slide_mpp, _value(stamps))


def _keep(stamps: Stamps, subject: Mpp | str | None, value: Json) -> None:
    """Keeps a verdict on a subject, where the file is old enough."""
    if not are_settled(stamps):
        return
    key = _key(stamps, subject)
    verdicts = _read_verdicts(key)
    verdicts.pop(key, None)
    newest = list(verdicts.items())[1 - _MOST :]
    try:
        path = _shard(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # another process may write in between: its verdict is lost, and found again
        write_json(path, {**dict(newest), key: value})
    except (OSError, RuntimeError):
        return


def _key(stamps: Stamps, subject: Mpp | str | None) -> str:
    """Returns the key of a file and of what was compared: resolution, or its levels."""
    parts = [stamps[0][0], subject, _versions()]
    return sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def _versions() -> tuple[str, ...]:
    return tuple(installed_version(package) for package in _PACKAGES)


def _value(stamps: Stamps) -> str:
    """Returns size, time stamps and inode; the name is in the key."""
    return " ".join(map(str, stamps[0][1:]))


def _shard(key: str) -> Path:
    """Returns the file that keeps a key; RuntimeError: the user has no home folder."""
    number = int(key[:8], 16) % _SHARDS
    return user_cache_dir() / "compared" / f"{number:02x}.json"


def _read_verdicts(key: str) -> dict[str, Json]:
    """Returns the verdicts in the file that keeps a key; none if it is not readable."""
    try:
        verdicts = read_json(_shard(key))
    except (OSError, ValueError, RuntimeError):
        return {}
    return verdicts if isinstance(verdicts, dict) else {}
