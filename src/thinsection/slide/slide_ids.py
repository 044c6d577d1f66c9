"""Ids of slides: the name of the file, and a hash of its place where names repeat.

The rule is pure: it reads no file, and the order in which files are named does not matter.
`store/claims.py` applies it to a results folder, which remembers the id of each file.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thinsection.files.url_secrets import public_url
from thinsection.files.urls import is_url

_MAX_ID_BYTES = 200
_IMAGE = "::image="  # between a file and one of its pictures
_HASH_BYTES = 65  # "-" and a whole SHA-256, the longest suffix
_HASH_DIGITS = (8, 16, 64)  # more only where fewer are another file's
# no folder or file of these can be made on every file system, or reads as one of ours
_ODD = re.compile(r"[/\\:*?\"<>|\x00-\x1f\x7f\ud800-\udfff]")
_RESERVED = ("run.json", "slide.json", "failure.json", "summary.csv", "failed.csv")


@dataclass(frozen=True, slots=True)
class SlideFile:
    """File that a slide id belongs to."""

    file: str  # see `file_of`
    name: str  # the stem that it was named by: of a link its own, not its target's


def file_of(slide_path: str, image: str | None = None) -> str:
    """Returns the one name of a slide: its absolute path or public URL, and its image."""
    if is_url(slide_path):
        file = public_url(slide_path).rstrip("/")
    else:
        file = os.path.realpath(slide_path)
    return file if image is None else f"{file}{_IMAGE}{image}"


def path_of(file: str) -> str:
    """Returns the path or URL in what `file_of` returned."""
    return file.partition(_IMAGE)[0]


def stem_of(slide_path: str, image: str | None = None) -> str:
    """Returns the name of a slide's file without its suffix, as it is written, and its image."""
    path = slide_path
    if is_url(slide_path):
        path = slide_path.split("?", 1)[0]
    stem = Path(path).stem
    return stem if image is None else f"{stem}-{image}"


def folded(name: str) -> str:
    """Folds a name, so that names are equal that a file system or a reader may take for one."""
    return unicodedata.normalize("NFC", name).casefold()


def is_odd(name: str) -> bool:
    """Tells whether an id is no folder's name: separators, hidden names, control characters."""
    if not name or name.startswith(".") or name.lower() in _RESERVED:
        return True
    if len(name.encode(errors="surrogateescape")) > _MAX_ID_BYTES:
        return True
    return _ODD.search(name) is not None


def assign_ids(
    new: Mapping[str, str], taken: Mapping[str, SlideFile]
) -> dict[str, str]:
    """Returns the slide id of each new file.

    The id is the stem. Where another file, new or known, has the same stem, or where the stem is no
    folder's name, a hash of the file's place follows it.

    Args:
        new: stem by file (see `file_of`), of files that have no id yet.
        taken: files of the slides that keep their id, by that id.
    """
    files_by_stem = Counter(folded(stem) for stem in new.values())
    names = {owner.file: owner.name for owner in taken.values()}
    files_by_stem.update(folded(name) for name in names.values())
    used = {folded(slide_id) for slide_id in taken}
    ids = {}
    for file, stem in sorted(new.items()):
        is_shared = files_by_stem[folded(stem)] > 1 or folded(stem) in used
        slide_id = stem
        if is_shared or is_odd(stem):
            slide_id = _hashed(stem, file, used)
        used.add(folded(slide_id))
        ids[file] = slide_id
    return ids


def _hashed(stem: str, file: str, used: set[str]) -> str:
    """Returns the stem as a folder's name, with the shortest free hash of the file's place."""
    safe = stem
    if is_odd(stem) or len(stem.encode()) > _MAX_ID_BYTES - _HASH_BYTES:
        plain = _ODD.sub("_", stem).lstrip(".").encode()
        safe = plain[: _MAX_ID_BYTES - _HASH_BYTES].decode(errors="ignore") or "slide"
    digest = hashlib.sha256(file.encode(errors="surrogateescape")).hexdigest()
    names = [f"{safe}-{digest[:digits]}" for digits in _HASH_DIGITS]
    free = (name for name in names if folded(name) not in used)
    return next(free, names[-1])
