"""Which slides a run takes: files, folders, or a cohort CSV."""

import csv
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from thinsection.errors import CohortError, require
from thinsection.files.sources import RemoteFolder, is_url
from thinsection.slide.base import Slide
from thinsection.slide.geometry import positive_number
from thinsection.slide.look import Look
from thinsection.slide.open import open_slide
from thinsection.slide.readers import is_folder_slide, slide_suffixes
from thinsection.slide.slide_ids import (
    SlideFile,
    assign_ids,
    file_of,
    folded,
    is_odd,
    stem_of,
)
from thinsection.types import Mpp

_MPP_RANGE = (
    1e-4,
    1e4,
)  # µm/px: from an electron microscope to a photograph of the glass
# our columns, and what the tables of others call them: TRIDENT, CLAM, slide2vec, STAMP
_NAMES = {
    "slide_path": ("wsi", "image_path", "filename", "slide"),
    "slide_id": ("sample_id",),
    "slide_mpp": ("mpp", "spacing_at_level_0", "spacing"),
    "patient_id": ("case_id", "patient"),
    "label": ("target",),
    "split": (),
}
_COLUMNS = tuple(_NAMES)
# columns of our tables that no cohort's column may take the place of
_FACTS = (
    "status",
    "reader",
    "width",
    "height",
    "vendor",
    "grid",
    "stain",
    "warnings",
    "look",
)
_TAKEN = {
    *_COLUMNS,
    *_FACTS,
    *(name for names in _NAMES.values() for name in names),
} - {"case_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideEntry:
    """One slide of a cohort: plain values that travel between processes."""

    slide_id: str  # names the slide's folder in the output; unique in a run
    slide_path: str  # file or URL
    slide_mpp: Mpp | None = None  # overrides what the file says
    look: Look | None = None  # how its px become RGB; None as they are
    patient_id: str | None = None
    label: str | None = None
    split: str | None = None
    more: Mapping[str, str] = field(
        default_factory=dict, hash=False
    )  # further columns, by name
    folder: str = ""  # of the table, to which paths in it are relative
    id_given: bool = False  # by a table: no rule changes it

    def open(self, reader: str) -> Slide:
        """The slide, by that reader, as the entry says it is to be seen."""
        return open_slide(
            self.slide_path, reader=reader, slide_mpp=self.slide_mpp, look=self.look
        )


def load_cohort(
    slides: Sequence[str | Path],
    *,
    slide_mpp: Mpp | None = None,
    look: Look | None = None,
    name_pattern: str | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> tuple[SlideEntry, ...]:
    """The slides that files, folders, URLs and cohort CSVs name, in a stable order.

    Folders are searched for files of the readers' suffixes, subfolders too; of a folder of .dcm
    files one is taken, since they are the levels of one slide; a folder `x.zarr` is one slide.
    The ids are those of a new results folder, see `slide_ids`: the file's name, with a hash of its
    place where files of one name meet; `store/claims.py` looks up what a results folder knows.
    Of several names (links) of one file the first is taken; a file name that is no name for a
    folder on every system gets a safe id. A table's id is taken as it is, or refused.

    Args:
        slides: each a slide file, a folder, a URL or a `.csv` with a column `slide_path`.
        slide_mpp: (x, y) for every slide that the table gives none for.
        look: of every slide.
        name_pattern: see `path_columns`; what a table says wins.
        on_message: takes a line for each slide whose name was changed or that was left out.

    Raises CohortError: nothing found, a path is missing, an id is doubled or no usable name.
    """
    entries = _unique(
        (entry for item in slides for entry in _expand(str(item))), on_message
    )
    given = ", ".join(repr(str(s)) for s in slides) or "nothing"
    known = f"known suffixes: {' '.join(slide_suffixes())}"
    _require(entries, "slides must name at least one slide", f"{given}; {known}")
    told = [_told(entry, name_pattern, on_message) for entry in entries]
    return tuple(
        replace(e, slide_mpp=e.slide_mpp or slide_mpp, look=look) for e in told
    )


def _require(ok: object, rule: str, got: object) -> None:
    require(ok, rule, got, error=CohortError)


def _told(
    entry: SlideEntry, pattern: str | None, on_message: Callable[[str], None]
) -> SlideEntry:
    """The slide with what its path says of it."""
    said = path_columns(pattern, entry.slide_path) if pattern else {}
    if pattern and not said:
        on_message(
            f"name_pattern is not found in {entry.slide_path!r}: no columns of it"
        )
    own = {"patient_id": said.get("case_id"), **said}
    of_entry: dict[str, Any] = {
        n: getattr(entry, n) or own.get(n) for n in _COLUMNS[3:]
    }
    return replace(entry, **of_entry, more={**said, **entry.more})


def path_columns(pattern: str, path: str) -> dict[str, str]:
    """What the named groups of a regular expression find in a path; {} where it is not found.

    Raises CohortError: it is no such expression, names no group, or one of our own columns.
    """
    try:
        parsed = re.compile(pattern)
    except re.error as error:
        got = f"got {pattern!r}: {error}"
        raise CohortError(f"name_pattern must be a regular expression, {got}") from None
    rule = "name_pattern must name groups such as (?P<case_id>...), none of our own columns"
    own = set(parsed.groupindex) & {"slide_id", "slide_path", "slide_mpp", *_FACTS}
    _require(parsed.groupindex and not own, rule, repr(pattern))
    found = parsed.search(Path(path).as_posix() if not is_url(path) else path)
    return (
        {name: text for name, text in found.groupdict().items() if text}
        if found
        else {}
    )


def parse_mpp(text: str, *, where: str) -> Mpp:
    """(x, y) from '0.25' or '0.25x0.26'; CohortError: not one or two, or none that a slide has."""
    x, *others = map(positive_number, text.lower().split("x"))
    y = others[0] if others else x
    if x is None or y is None or len(others) > 1:
        raise CohortError(
            f"slide_mpp must be '0.25' or '0.25x0.26', got {text!r} in {where}"
        )
    (low, high), got = _MPP_RANGE, f"{text!r} in {where}"
    fits = low <= min(x, y) <= max(x, y) <= high
    _require(fits, f"slide_mpp must be in [{low:g}, {high:g}] µm/px", got)
    return (x, y)


def _expand(item: str) -> list[SlideEntry]:
    """The slides that one argument names."""
    if "\0" in item:
        raise CohortError(f"slide must be a path, got {item!r} with a NUL character")
    if is_url(item):
        paths = _find_by_url(item)
        return [SlideEntry(slide_id=stem_of(path), slide_path=path) for path in paths]
    path = Path(item)
    if not path.is_file() and not path.is_dir():
        raise CohortError(
            f"slide must be an existing file, folder or URL, got {item!r}"
        )
    if path.is_file() and path.suffix.lower() == ".csv":
        return _read_csv(path)
    paths = [str(path)]
    if path.is_dir() and not is_folder_slide(path):
        paths = _find(path)
    return [SlideEntry(slide_id=stem_of(path), slide_path=path) for path in paths]


def _find_by_url(url: str) -> list[str]:
    """The slides below the URL of a folder; of any other URL itself.

    A URL is a folder's where it ends with `/`, or where its name has no suffix and files lie below.
    """
    name = url.split("?", 1)[0]
    if name.lower().endswith(".csv"):
        rule = "cohort must be a local CSV, whose slide_path may hold URLs"
        raise CohortError(f"{rule}, got {url!r}; copy it here")
    is_folder = name.endswith("/") and not is_folder_slide(name.rstrip("/"))
    if Path(name).suffix and not is_folder:
        return [url]
    try:
        files = RemoteFolder(url).sizes()
    except Exception as error:  # each store has its own errors
        if not is_folder:
            return [url]
        rule = "folder by URL must be listed by its server"
        remedy = "name its slides, or list them in a cohort CSV"
        raise CohortError(f"{rule}, got {error!r} for {url!r}; {remedy}") from error
    slides = _slides_among(PurePosixPath(file) for file in files)
    if not slides and not is_folder:
        return [url]
    return [f"{url.rstrip('/')}/{slide}" for slide in slides]


def _slides_among(paths: Iterable[PurePosixPath]) -> list[str]:
    """The slides among the files of a remote folder, as `_find` takes them of a local one."""
    suffixes = frozenset(slide_suffixes())
    found: dict[PurePosixPath, str] = {}
    for path in sorted(paths):
        if path.name.startswith("."):
            continue
        outer = [one for one in reversed(path.parents) if _names_folder_slide(one)]
        if outer:
            found.setdefault(outer[0], str(outer[0]))
        elif path.suffix.lower() == ".dcm":
            found.setdefault(path.parent, str(path))
        elif path.suffix.lower() in suffixes:
            found.setdefault(path, str(path))
    return list(found.values())


def _names_folder_slide(path: PurePosixPath) -> bool:
    """Whether a remote folder is by its name one slide of many files."""
    return is_folder_slide(f"url://{path}")


def _find(folder: Path) -> list[str]:
    """The slides of a folder and its subfolders; one that is a slide is not looked into."""
    found: dict[
        Path, str
    ] = {}  # by the file, or by the folder of one slide's .dcm files
    inside, suffixes = list[Path](), frozenset(slide_suffixes())
    for parent, folders, files in os.walk(folder):
        inside += (Path(parent, name) for name in (*folders, *files))
        folders[:] = [
            name for name in folders if not is_folder_slide(Path(parent, name))
        ]
    for path in sorted(inside):
        suffix, is_slide = path.suffix.lower(), path.is_file() or is_folder_slide(path)
        if suffix in suffixes and is_slide and not path.name.startswith("."):
            found.setdefault(path.parent if suffix == ".dcm" else path, str(path))
    return list(found.values())


def _read_csv(path: Path) -> list[SlideEntry]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CohortError(
            f"cohort must be a UTF-8 CSV, got {str(path)!r}: {error}"
        ) from None
    header, named = list(rows[0]) if rows else [], [named_columns(row) for row in rows]
    for (
        row
    ) in named:  # of CLAM's lists a slide_id that is the name of a file is its path
        if not row["slide_path"] and row["slide_id"].lower().endswith(slide_suffixes()):
            row["slide_path"], row["slide_id"] = row["slide_id"], ""
    of_paths = {"slide_path", *_NAMES["slide_path"]} & {
        str(name).lower() for name in header
    }
    got = f"{header} in {str(path)!r}; also known: {', '.join(_NAMES['slide_path'])}"
    there = of_paths or any(row["slide_path"] for row in named)
    _require(there, "cohort must have a column 'slide_path'", got)
    return [
        _entry(row, own, path, n)
        for n, (row, own) in enumerate(zip(rows, named), start=2)
    ]


def named_columns(row: Mapping[Any, Any]) -> dict[str, str]:
    """A row of anybody's table under our names; what it lacks is ''."""
    told = (
        (name, text.strip())
        for name, text in row.items()
        if name and isinstance(text, str)
    )
    plain = {name.strip().lower(): text for name, text in told}
    known = {ours: (ours, *theirs) for ours, theirs in _NAMES.items()}
    return {
        ours: next(filter(None, map(plain.get, names)), "")
        for ours, names in known.items()
    }


def _entry(
    row: dict[str, str | None], own: Mapping[str, str], cohort: Path, line: int
) -> SlideEntry:
    where = f"line {line} of {str(cohort)!r}"
    path, slide_id, mpp = (own[name] for name in _COLUMNS[:3])
    _require(path, "slide_path must not be empty", f"'' in {where}")
    _require(
        "\0" not in path, "slide_path must be a path", f"a NUL character in {where}"
    )
    if not is_url(path):
        path = str(cohort.parent / path)  # an absolute path stays as it is
    told: dict[str, Any] = {name: own[name] or None for name in _COLUMNS[3:]}
    told["slide_mpp"] = parse_mpp(mpp, where=where) if mpp else None
    more = {
        n: text.strip() for n, text in row.items() if n and text and n not in _TAKEN
    }
    told |= {
        "slide_id": slide_id or stem_of(path),
        "more": more,
        "folder": str(cohort.parent),
    }
    return SlideEntry(slide_path=path, id_given=bool(slide_id), **told)


def _unique(
    entries: Iterable[SlideEntry], on_message: Callable[[str], None]
) -> list[SlideEntry]:
    """The slides with ids of their own; a file that is named twice is taken once."""
    by_file: dict[str, SlideEntry] = {}
    for entry in entries:
        file = file_of(entry.slide_path)
        first = by_file.setdefault(file, entry)
        if first is entry:
            continue
        by_file[file] = _one_of_two(first, entry, on_message)
    _check_given(by_file.values())
    return named(by_file, {}, on_message)


def _one_of_two(
    first: SlideEntry, again: SlideEntry, on_message: Callable[[str], None]
) -> SlideEntry:
    """Which of two entries of one file counts: the first, but a table's id wins."""
    if first.slide_id == again.slide_id and first.id_given >= again.id_given:
        return first
    if first.id_given and again.id_given:
        ids = f"{first.slide_id!r} and {again.slide_id!r}"
        rule = "slide_id must be one per slide"
        raise CohortError(f"{rule}, got {ids} for {again.slide_path!r}")
    if first.slide_path != again.slide_path:
        on_message(
            f"{again.slide_path!r} is the file {first.slide_path!r} again: taken once"
        )
    return again if again.id_given else first


def _check_given(entries: Iterable[SlideEntry]) -> None:
    """Refuses ids of tables that two slides share, or that no folder can be called."""
    owners: dict[str, SlideEntry] = {}
    for entry in entries:
        if not entry.id_given:
            continue
        got = f"{entry.slide_id!r} for {entry.slide_path!r}"
        owner = owners.setdefault(folded(entry.slide_id), entry)
        if owner is not entry:
            rule = "slide_id must be of one slide in a cohort"
            raise CohortError(f"{rule}, got {got} and {owner.slide_path!r}")
        if is_odd(entry.slide_id):
            remedy = "set a slide_id column in the cohort"
            rule = "slide_id must be usable as a folder's name"
            raise CohortError(f"{rule}, got {got}; {remedy}")


def named(
    by_file: Mapping[str, SlideEntry],
    known: Mapping[str, SlideFile],
    on_message: Callable[[str], None] = lambda text: None,
) -> list[SlideEntry]:
    """The slides, by file, with the ids that they have or get; in the same order.

    `known` are the files of slides that keep their id, by id: those of a results folder.
    """
    given = {
        entry.slide_id: SlideFile(file, stem_of(entry.slide_path))
        for file, entry in by_file.items()
        if entry.id_given
    }
    given_names = {folded(slide_id) for slide_id in given}
    kept = {
        slide_id: owner
        for slide_id, owner in known.items()
        if folded(slide_id) not in given_names
    }
    taken = kept | given  # a table's id wins over the same id of another file
    ids = {owner.file: slide_id for slide_id, owner in taken.items()}
    new = {
        file: stem_of(entry.slide_path)
        for file, entry in by_file.items()
        if file not in ids
    }
    assigned = assign_ids(new, taken)
    for file, slide_id in assigned.items():
        if is_odd(new[file]):
            rule = "is no name for a folder everywhere"
            on_message(f"{new[file]!r} {rule}: its slide_id is {slide_id!r}")
    ids |= assigned
    _tell_twins(by_file.values(), on_message)
    return [replace(entry, slide_id=ids[file]) for file, entry in by_file.items()]


def _tell_twins(
    entries: Iterable[SlideEntry], on_message: Callable[[str], None]
) -> None:
    """Names files whose names look the same and differ in Unicode form alone."""
    by_name: dict[str, list[str]] = {}
    for entry in entries:
        name = Path(entry.slide_path).name
        by_name.setdefault(unicodedata.normalize("NFC", name), []).append(name)
    for name, spellings in by_name.items():
        if len(set(spellings)) > 1:
            paths = ", ".join(ascii(spelling) for spelling in sorted(set(spellings)))
            on_message(
                f"{name!r} is the name of several files, which differ in their Unicode "
                f"form alone ({paths}): rename one, or give them a slide_id"
            )
