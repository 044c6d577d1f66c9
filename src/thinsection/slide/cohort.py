"""Which slides a run takes: files, folders, or a cohort CSV."""

import csv
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinsection.errors import CohortError, require
from thinsection.files.sources import is_url
from thinsection.slide.base import Slide
from thinsection.slide.geometry import positive_number
from thinsection.slide.look import Look
from thinsection.slide.open import open_slide
from thinsection.slide.readers import is_folder_slide, slide_suffixes
from thinsection.types import Mpp

_MAX_ID_BYTES = 200
_MPP_RANGE = (1e-4, 1e4)  # µm/px: from an electron microscope to a photograph of the glass
# no folder or file of these can be made on every file system, or reads as one of ours
_ODD = re.compile(r"[/\\:*?\"<>|\x00-\x1f\x7f\ud800-\udfff]")
_RESERVED = ("run.json", "slide.json", "failure.json", "summary.csv", "failed.csv")
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
_FACTS = ("status", "reader", "width", "height", "vendor", "grid", "stain", "warnings", "look")
_TAKEN = {*_COLUMNS, *_FACTS, *(name for names in _NAMES.values() for name in names)} - {"case_id"}


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
    more: Mapping[str, str] = field(default_factory=dict, hash=False)  # further columns, by name
    folder: str = ""  # of the table, to which paths in it are relative

    def open(self, reader: str) -> Slide:
        """The slide, by that reader, as the entry says it is to be seen."""
        return open_slide(self.slide_path, reader=reader, slide_mpp=self.slide_mpp, look=self.look)


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
    Equal file names from different folders get a suffix made from their path, so that no result
    overwrites another. Of several names (links) of one file the first is taken; a file name that is
    no name for a folder on every system gets a safe id. A table's id is taken as it is, or refused.

    Args:
        slides: each a slide file, a folder, a URL or a `.csv` with a column `slide_path`.
        slide_mpp: (x, y) for every slide that the table gives none for.
        look: of every slide.
        name_pattern: see `path_columns`; what a table says wins.
        on_message: takes a line for each slide whose name was changed or that was left out.

    Raises CohortError: nothing found, a path is missing, an id is doubled or no usable name.
    """
    entries = _unique((given for item in slides for given in _expand(str(item))), on_message)
    given = ", ".join(repr(str(s)) for s in slides) or "nothing"
    known = f"known suffixes: {' '.join(slide_suffixes())}"
    _require(entries, "slides must name at least one slide", f"{given}; {known}")
    told = [_told(entry, name_pattern, on_message) for entry in entries]
    return tuple(replace(e, slide_mpp=e.slide_mpp or slide_mpp, look=look) for e in told)


def _require(ok: object, rule: str, got: object) -> None:
    require(ok, rule, got, error=CohortError)


def _told(entry: SlideEntry, pattern: str | None, on_message: Callable[[str], None]) -> SlideEntry:
    """The slide with what its path says of it."""
    said = path_columns(pattern, entry.slide_path) if pattern else {}
    if pattern and not said:
        on_message(f"name_pattern is not found in {entry.slide_path!r}: no columns of it")
    own = {"patient_id": said.get("case_id"), **said}
    of_entry: dict[str, Any] = {n: getattr(entry, n) or own.get(n) for n in _COLUMNS[3:]}
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
    return {name: text for name, text in found.groupdict().items() if text} if found else {}


def parse_mpp(text: str, *, where: str) -> Mpp:
    """(x, y) from '0.25' or '0.25x0.26'; CohortError: not one or two, or none that a slide has."""
    x, *others = map(positive_number, text.lower().split("x"))
    y = others[0] if others else x
    if x is None or y is None or len(others) > 1:
        raise CohortError(f"slide_mpp must be '0.25' or '0.25x0.26', got {text!r} in {where}")
    (low, high), got = _MPP_RANGE, f"{text!r} in {where}"
    fits = low <= min(x, y) <= max(x, y) <= high
    _require(fits, f"slide_mpp must be in [{low:g}, {high:g}] µm/px", got)
    return (x, y)


_Given = tuple[SlideEntry, bool]  # with whether a table gives its id


def _expand(item: str) -> list[_Given]:
    _require("\0" not in item, "slide must be a path", f"{item!r} with a NUL character")
    path, url = Path(item), is_url(item)
    there = url or path.is_file() or path.is_dir()
    _require(there, "slide must be an existing file, folder or URL", repr(item))
    if not url and path.is_file() and path.suffix.lower() == ".csv":
        return _read_csv(path)
    searched = not url and path.is_dir() and not is_folder_slide(path)
    paths = _find(path) if searched else [item if url else str(path)]
    return [(SlideEntry(slide_id=_id_of(name), slide_path=name), False) for name in paths]


def _find(folder: Path) -> list[str]:
    """The slides of a folder and its subfolders; one that is a slide is not looked into."""
    found: dict[Path, str] = {}  # by the file, or by the folder of one slide's .dcm files
    inside, suffixes = list[Path](), frozenset(slide_suffixes())
    for parent, folders, files in os.walk(folder):
        inside += (Path(parent, name) for name in (*folders, *files))
        folders[:] = [name for name in folders if not is_folder_slide(Path(parent, name))]
    for path in sorted(inside):
        suffix, is_slide = path.suffix.lower(), path.is_file() or is_folder_slide(path)
        if suffix in suffixes and is_slide and not path.name.startswith("."):
            found.setdefault(path.parent if suffix == ".dcm" else path, str(path))
    return list(found.values())


def _id_of(path: str) -> str:
    return Path(path.split("?", 1)[0]).stem


def _read_csv(path: Path) -> list[_Given]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CohortError(f"cohort must be a UTF-8 CSV, got {str(path)!r}: {error}") from None
    header, named = list(rows[0]) if rows else [], [named_columns(row) for row in rows]
    for row in named:  # of CLAM's lists a slide_id that is the name of a file is its path
        if not row["slide_path"] and row["slide_id"].lower().endswith(slide_suffixes()):
            row["slide_path"], row["slide_id"] = row["slide_id"], ""
    of_paths = {"slide_path", *_NAMES["slide_path"]} & {str(name).lower() for name in header}
    got = f"{header} in {str(path)!r}; also known: {', '.join(_NAMES['slide_path'])}"
    there = of_paths or any(row["slide_path"] for row in named)
    _require(there, "cohort must have a column 'slide_path'", got)
    return [_entry(row, own, path, n) for n, (row, own) in enumerate(zip(rows, named), start=2)]


def named_columns(row: Mapping[Any, Any]) -> dict[str, str]:
    """A row of anybody's table under our names; what it lacks is ''."""
    told = ((name, text.strip()) for name, text in row.items() if name and isinstance(text, str))
    plain = {name.strip().lower(): text for name, text in told}
    known = {ours: (ours, *theirs) for ours, theirs in _NAMES.items()}
    return {ours: next(filter(None, map(plain.get, names)), "") for ours, names in known.items()}


def _entry(row: dict[str, str | None], own: Mapping[str, str], cohort: Path, line: int) -> _Given:
    where = f"line {line} of {str(cohort)!r}"
    path, slide_id, mpp = (own[name] for name in _COLUMNS[:3])
    _require(path, "slide_path must not be empty", f"'' in {where}")
    _require("\0" not in path, "slide_path must be a path", f"a NUL character in {where}")
    if not is_url(path):
        path = str(cohort.parent / path)  # an absolute path stays as it is
    told: dict[str, Any] = {name: own[name] or None for name in _COLUMNS[3:]}
    told["slide_mpp"] = parse_mpp(mpp, where=where) if mpp else None
    more = {n: text.strip() for n, text in row.items() if n and text and n not in _TAKEN}
    told |= {"slide_id": slide_id or _id_of(path), "more": more, "folder": str(cohort.parent)}
    return SlideEntry(slide_path=path, **told), bool(slide_id)


def _unique(found: Iterable[_Given], on_message: Callable[[str], None]) -> list[SlideEntry]:
    """Ids made unique by a hash of the path; the same file twice is taken once."""
    by_path: dict[str, _Given] = {}
    for entry, given in found:
        path = entry.slide_path
        key = path if is_url(path) else str(Path(path).resolve())
        known, known_given = by_path.setdefault(key, (entry, given))
        if known.slide_id == entry.slide_id:
            continue
        got = f"{known.slide_id!r} and {entry.slide_id!r} for {path!r}"
        _require(not (given and known_given), "slide_id must be one per slide", got)
        if given:  # a table knows better than a file's name
            by_path[key] = entry, given
        on_message(f"{path!r} is the file {known.slide_path!r} again: taken once")
    counts = Counter(entry.slide_id.casefold() for entry, _ in by_path.values())
    twice = {e.slide_id.casefold(): e for e, given in reversed(by_path.values()) if given}
    for entry, given in by_path.values():
        other = twice.get(entry.slide_id.casefold(), entry)
        got = f"{entry.slide_id!r} for {entry.slide_path!r} and {other.slide_path!r}"
        _require(not given or other is entry, "slide_id must be of one slide in a cohort", got)
    entries = [e if given else _named(e, counts, on_message) for e, given in by_path.values()]
    for entry in entries:
        got = f"{entry.slide_id!r} for {entry.slide_path!r}; set a slide_id column in the cohort"
        _require(not _is_odd(entry.slide_id), "slide_id must be usable as a folder's name", got)
    return entries


def _named(entry: SlideEntry, counts: Counter[str], say: Callable[[str], None]) -> SlideEntry:
    """The slide with an id that is its own and a folder's name, made from its file's name."""
    name = safe = entry.slide_id
    if odd := _is_odd(name):
        cut = _ODD.sub("_", name).lstrip(".").encode()[: _MAX_ID_BYTES - 16]
        safe = cut.decode(errors="ignore")
    if odd or counts[name.casefold()] > 1:
        digest = hashlib.sha256(entry.slide_path.encode(errors="surrogateescape")).hexdigest()
        safe = f"{safe or 'slide'}-{digest[:6]}"
    if odd:
        say(f"{name!r} is no name for a folder everywhere: its slide_id is {safe!r}")
    return replace(entry, slide_id=safe)


def _is_odd(name: str) -> bool:
    """Whether an id is no folder's name: separators, hidden names, control characters."""
    bad = not name or name.startswith(".") or _ODD.search(name) or name.lower() in _RESERVED
    return bool(bad) or len(name.encode()) > _MAX_ID_BYTES
