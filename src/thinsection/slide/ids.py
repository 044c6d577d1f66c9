"""Ids of slides: how a run assigns them, and which known id a user's text means.

The id of a slide is the name of its file, with a hash of its path if several files have the same
name. This rule is pure: it reads no file, and the order of the files does not matter.
`store/slide_ids.py` applies it to a results folder, which stores the id of each file.

Users write the ids of slides, cases and patients in several ways. Two spellings mean the same id if
only their form differs: the folder and the suffix of a file, outer and doubled spaces, non-breaking
spaces, the Unicode form, and Excel's '1007.0' for 1007. Spellings that differ in capital letters,
'_' for '-', or leading zeros may be different ids: the user is asked, and they are never joined.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from thinsection.errors import InvalidInputError
from thinsection.files.urls import is_url, public_url
from thinsection.slide.readers import slide_suffixes

_MAX_ID_BYTES = 200
_IMAGE = "::image="  # between the path of a file and the name of one of its pictures
_HASH_BYTES = 65  # "-" and a whole SHA-256, the longest suffix
_HASH_DIGITS = (8, 16, 64)  # tried in this order, until the id is free
# signs that a folder's name cannot have on every file system
_UNSAFE_SIGNS = re.compile(r"[/\\:*?\"<>|\x00-\x1f\x7f\ud800-\udfff]")
# names of files of a results folder
_RESERVED = ("run.json", "slide.json", "failure.json", "summary.csv", "failed.csv")


@dataclass(frozen=True, slots=True)
class SlideFile:
    """File of a slide id."""

    file: str  # see `file_key`
    name: str  # the stem that the id was made of: for a link the link's name, not its target's


def file_key(slide_path: str, image: str | None = None) -> str:
    """Returns the unique name of a slide: its absolute path or public URL, and its image."""
    if is_url(slide_path):
        file = public_url(slide_path).rstrip("/")
    else:
        file = os.path.realpath(slide_path)
    return file if image is None else f"{file}{_IMAGE}{image}"


def path_of_key(file: str) -> str:
    """Returns the path or URL of a slide from its `file_key`."""
    return file.partition(_IMAGE)[0]


def slide_stem(slide_path: str, image: str | None = None) -> str:
    """Returns the file name of a slide without its suffix, followed by its image if there is one.

    The name of a link is that of the link, not of its target.
    """
    path = slide_path
    if is_url(slide_path):
        path = slide_path.split("?", 1)[0]
    stem = Path(path).stem
    return stem if image is None else f"{stem}-{image}"


def folded(name: str) -> str:
    """Folds case and Unicode form, so that names that a file system may confuse become equal."""
    return unicodedata.normalize("NFC", name).casefold()


def is_unsafe(name: str) -> bool:
    """Tells whether an id cannot name a folder: separators, hidden names, control characters."""
    if not name or name.startswith(".") or name.lower() in _RESERVED:
        return True
    if len(name.encode(errors="surrogateescape")) > _MAX_ID_BYTES:
        return True
    return _UNSAFE_SIGNS.search(name) is not None


def assign_ids(
    new: Mapping[str, str], taken: Mapping[str, SlideFile]
) -> dict[str, str]:
    """Returns the slide id of each new file.

    The id is the stem. If another file, new or known, has the same stem, or if the stem cannot name
    a folder, a hash of the file's path follows it.

    Args:
        new: stem of each file that has no id yet, by file (see `file_key`).
        taken: file of each slide that keeps its id, by id.
    """
    files_by_stem = Counter(folded(stem) for stem in new.values())
    names = {slide.file: slide.name for slide in taken.values()}
    files_by_stem.update(folded(name) for name in names.values())
    used = {folded(slide_id) for slide_id in taken}
    ids = {}
    for file, stem in sorted(new.items()):
        is_shared = files_by_stem[folded(stem)] > 1 or folded(stem) in used
        slide_id = stem
        if is_shared or is_unsafe(stem):
            # the stem without unsafe signs, with the shortest hash that makes a free id
            safe = stem
            room = _MAX_ID_BYTES - _HASH_BYTES
            if is_unsafe(stem) or len(stem.encode()) > room:
                plain = _UNSAFE_SIGNS.sub("_", stem).lstrip(".").encode()
                safe = plain[:room].decode(errors="ignore") or "slide"
            place = file.encode(errors="surrogateescape")
            digest = hashlib.sha256(place).hexdigest()
            for digits in _HASH_DIGITS:
                slide_id = f"{safe}-{digest[:digits]}"
                if folded(slide_id) not in used:
                    break
        used.add(folded(slide_id))
        ids[file] = slide_id
    return ids


# suffixes of slides that no reader of ours opens, of pictures, and of embeddings
_OTHER_SUFFIXES = (
    ".qptiff", ".vsi", ".isyntax", ".kfb", ".sdpc", ".lif", ".jp2", ".bmp", ".h5", ".hdf5", ".pt",
    ".npy", ".geojson",
)  # fmt: skip
_OME = ".ome"
_ROOT = re.compile(r"(?:[A-Za-z]:)?[\\/]|\.{1,2}[\\/]|~[\\/]|[a-z][a-z0-9+]*://")
_EXCEL_NUMBER = re.compile(r"(-?\d+)\.0+")
_SEPARATORS = re.compile(r"[\s_\-.]+")
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")


def plain_id(text: str) -> str:
    """Returns an id without differences of form; see the head of this file."""
    # zero-width signs and byte order marks are of the category Cf
    visible = (sign for sign in text if unicodedata.category(sign) != "Cf")
    name = " ".join(unicodedata.normalize("NFC", "".join(visible)).split())
    file_name = re.split(r"[\\/]", name.rstrip("\\/"))[-1].strip()
    stem = without_suffix(file_name)
    # '12/345' may be the number of a block: it is a path if it has a root or a file's suffix
    if file_name and (stem != file_name or _ROOT.match(name)):
        name = stem
    number = _EXCEL_NUMBER.fullmatch(name)
    return number[1] if number else name


def without_suffix(file_name: str) -> str:
    """Returns the name of a slide's or an embedding's file without its suffix, `.ome` included."""
    stem = file_name
    for suffix in (*slide_suffixes(), *_OTHER_SUFFIXES):
        if file_name.lower().endswith(suffix):
            stem = file_name[: -len(suffix)]
            break
    # the id of x.ome.tiff is 'x.ome'
    if stem.lower().endswith(_OME):
        stem = stem[: -len(_OME)]
    return stem or file_name


def loose_id(text: str) -> str:
    """Returns an id without capitals, separators and leading zeros, to find possible mistakes."""
    base = PurePosixPath(plain_id(text).replace("\\", "/")).name
    return _LEADING_ZEROS.sub("", _SEPARATORS.sub("", base.casefold()))


class KnownIds:
    """Known ids, and a search for the id that a user's text means.

    Memory: some 300 bytes an id.
    """

    def __init__(self, ids: Iterable[str], kind: str = "slide_id"):
        """Takes the ids; `kind` is their name in messages."""
        self._kind = kind
        self._ids = frozenset(ids)
        self._by_plain = _grouped(self._ids, plain_id)
        self._by_loose: Mapping[str, Sequence[str]] | None = None

    def find(self, text: str) -> str | None:
        """Returns the id that a text means; None if it means no known id.

        Raises:
            InvalidInputError: the text may mean two of the ids.
        """
        if text in self._ids:
            return text
        meant = self._by_plain.get(plain_id(text), ())
        if len(meant) > 1:
            raise InvalidInputError(
                f"{self._kind} must match one name only, got {text!r}, which may mean "
                f"{meant[0]!r} or {meant[1]!r}; write the full name"
            )
        return meant[0] if meant else None

    def similar(self, text: str) -> str | None:
        """Returns an id that differs from a text in capitals, separators or leading zeros."""
        if self._by_loose is None:
            self._by_loose = _grouped(self._ids, loose_id)
        alike = self._by_loose.get(loose_id(text), ())
        return alike[0] if alike else None

    def words(self, text: str) -> str:
        """Returns an unknown text, with a similar known id as a suggestion if there is one."""
        similar = self.similar(text)
        return text if similar is None else f"{text} (did you mean {similar}?)"

    def match(self, texts: Iterable[str], where: str) -> dict[str, str]:
        """Returns the id of each text that means a known id.

        Raises:
            InvalidInputError: a text may mean two ids, or two texts mean one id.
        """
        ids: dict[str, str] = {}
        text_by_id: dict[str, str] = {}
        for text in dict.fromkeys(texts):
            found = self.find(text)
            if found is None:
                continue
            other = text_by_id.setdefault(found, text)
            if other != text:
                raise InvalidInputError(
                    f"{self._kind} must be written in one way, got {other!r} and {text!r} for "
                    f"{found!r} in {where}; write both in the same way, or give different slides "
                    "different names"
                )
            ids[text] = found
        return ids


def _grouped(ids: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    """Returns the sorted ids in groups, by the result of `key`."""
    groups: dict[str, list[str]] = {}
    for name in sorted(ids):
        groups.setdefault(key(name), []).append(name)
    return groups
