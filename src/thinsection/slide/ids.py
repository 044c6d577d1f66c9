"""Ids of slides: how a run assigns them, and which known id a text of people means.

Assigned is the name of the file, with a hash of its place where names repeat. That rule is pure: it
reads no file, and the order in which files are named does not matter. `store/claims.py` applies it
to a results folder, which remembers the id of each file.

Ids of slides, cases and patients as people write them: two spellings mean one id where only the
form differs: the folder and the suffix of a file, outer and doubled spaces, non-breaking spaces,
the Unicode form, and Excel's '1007.0' for 1007. Capital letters, '_' for '-', and leading zeros may
be other ids: these are asked back, never joined.
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
            # the stem as a folder's name, with the shortest free hash of the file's place
            safe = stem
            room = _MAX_ID_BYTES - _HASH_BYTES
            if is_odd(stem) or len(stem.encode()) > room:
                plain = _ODD.sub("_", stem).lstrip(".").encode()
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


# files of slides that no reader of ours opens, of pictures, and of embeddings
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
    """Returns an id without what is its form alone: see the head of this file."""
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
    """Returns an id without capitals, separators and leading zeros: what may be a mistake."""
    base = PurePosixPath(plain_id(text).replace("\\", "/")).name
    return _LEADING_ZEROS.sub("", _SEPARATORS.sub("", base.casefold()))


class KnownIds:
    """Ids that are known, and which of them a text means.

    Memory: some 300 bytes an id.
    """

    def __init__(self, ids: Iterable[str], kind: str = "slide_id"):
        """Takes the ids; `kind` is their name in messages."""
        self._kind = kind
        self._ids = frozenset(ids)
        self._by_plain = _grouped(self._ids, plain_id)
        self._by_loose: Mapping[str, Sequence[str]] | None = None

    def find(self, text: str) -> str | None:
        """Returns the id that a text means, None if it means none.

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
        """Returns a text that means no id, with the id that it may be meant for."""
        similar = self.similar(text)
        return text if similar is None else f"{text} (did you mean {similar}?)"

    def match(self, texts: Iterable[str], where: str) -> dict[str, str]:
        """Returns the id of each text that means one.

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
                    f"{found!r} in {where}; write both alike, or give two slides two names"
                )
            ids[text] = found
        return ids


def _grouped(ids: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    """Returns the ids, sorted, by what a function makes of them."""
    groups: dict[str, list[str]] = {}
    for name in sorted(ids):
        groups.setdefault(key(name), []).append(name)
    return groups
