"""Which slides a run takes: files, folders, or a cohort CSV."""

import csv
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinsection.config import nearest
from thinsection.errors import CohortError
from thinsection.files.sources import is_url
from thinsection.slide.geometry import positive_number
from thinsection.slide.readers import slide_suffixes
from thinsection.types import Mpp

_MAX_ID_BYTES = 200
_COLUMNS = ("slide_path", "slide_id", "slide_mpp", "patient_id", "label", "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideEntry:
    """One slide of a cohort: plain values that travel between processes."""

    slide_id: str  # names the slide's folder in the output; unique in a run
    slide_path: str  # file or URL
    slide_mpp: Mpp | None = None  # overrides what the file says
    patient_id: str | None = None
    label: str | None = None
    split: str | None = None


def load_cohort(
    slides: Sequence[str | Path], *, slide_mpp: Mpp | None = None
) -> tuple[SlideEntry, ...]:
    """The slides that files, folders, URLs and cohort CSVs name, in a stable order.

    Folders are searched for files of the readers' suffixes, subfolders too; of a folder of .dcm
    files one is taken, since they are the levels of one slide. Equal file names from different
    folders get a suffix made from their path, so that no result overwrites another.

    Args:
        slides: each a slide file, a folder, a URL or a `.csv` with a column `slide_path`.
        slide_mpp: (x, y) for every slide that the table gives none for.

    Raises:
        CohortError: nothing found, a path is missing, an id is doubled or not usable as a name.
    """
    entries = [entry for item in slides for entry in _expand(str(item))]
    if not entries:
        given = ", ".join(repr(str(s)) for s in slides) or "nothing"
        known = f"known suffixes: {' '.join(slide_suffixes())}"
        raise CohortError(f"slides must name at least one slide, got {given}; {known}")
    return tuple(replace(e, slide_mpp=e.slide_mpp or slide_mpp) for e in _unique(entries))


def parse_mpp(text: str, *, where: str) -> Mpp:
    """(x, y) from '0.25' or '0.25x0.26'; CohortError for what is not one or two numbers > 0."""
    x, *others = map(positive_number, text.lower().split("x"))
    y = others[0] if others else x
    if x is None or y is None or len(others) > 1:
        raise CohortError(f"slide_mpp must be '0.25' or '0.25x0.26', got {text!r} in {where}")
    return (x, y)


def _expand(item: str) -> list[SlideEntry]:
    path, url = Path(item), is_url(item)
    if not (url or path.is_file() or path.is_dir()):
        raise CohortError(f"slide must be an existing file, folder or URL, got {item!r}")
    if not url and path.is_file() and path.suffix.lower() == ".csv":
        return _read_csv(path)
    paths = _find(path) if not url and path.is_dir() else [item]
    return [SlideEntry(slide_id=_id_of(name), slide_path=name) for name in paths]


def _find(folder: Path) -> list[str]:
    found: dict[Path, str] = {}  # by the file, or by the folder of one slide's .dcm files
    suffixes = frozenset(slide_suffixes())
    for path in sorted(folder.rglob("*")):
        suffix = path.suffix.lower()
        if suffix in suffixes and path.is_file() and not path.name.startswith("."):
            found.setdefault(path.parent if suffix == ".dcm" else path, str(path))
    return list(found.values())


def _id_of(path: str) -> str:
    return Path(path.split("?", 1)[0]).stem


def _read_csv(path: Path) -> list[SlideEntry]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CohortError(f"cohort must be a UTF-8 CSV, got {str(path)!r}: {error}") from None
    header = list(rows[0]) if rows else []
    if "slide_path" not in header:
        got = f"{header} in {str(path)!r}{nearest('slide_path', header) if header else ''}"
        raise CohortError(f"cohort must have a column 'slide_path', got {got}")
    return [_entry(row, path, line) for line, row in enumerate(rows, start=2)]


def _entry(row: dict[str, str | None], cohort: Path, line: int) -> SlideEntry:
    where = f"line {line} of {str(cohort)!r}"
    path, slide_id, mpp, *others = ((row.get(name) or "").strip() for name in _COLUMNS)
    if not path:
        raise CohortError(f"slide_path must not be empty, got '' in {where}")
    if not is_url(path):
        path = str(cohort.parent / path)  # an absolute path stays as it is
    labels = {name: text or None for name, text in zip(_COLUMNS[3:], others, strict=True)}
    own_mpp, slide_id = parse_mpp(mpp, where=where) if mpp else None, slide_id or _id_of(path)
    return SlideEntry(slide_id=slide_id, slide_path=path, slide_mpp=own_mpp, **labels)


def _unique(entries: Iterable[SlideEntry]) -> list[SlideEntry]:
    """Ids made unique by a hash of the path; the same path twice is taken once."""
    by_path: dict[str, SlideEntry] = {}
    for entry in entries:
        path = entry.slide_path
        known = by_path.setdefault(path if is_url(path) else str(Path(path).resolve()), entry)
        if known.slide_id != entry.slide_id:
            got = f"{known.slide_id!r} and {entry.slide_id!r} for {path!r}"
            raise CohortError(f"slide_id must be one per slide, got {got}")
    counts = Counter(e.slide_id.casefold() for e in by_path.values())
    return [_named(entry, path, counts) for path, entry in by_path.items()]


def _named(entry: SlideEntry, path: str, counts: Counter[str]) -> SlideEntry:
    """An id becomes the name of a folder: no separators, no hidden names, no control characters."""
    name = entry.slide_id
    if counts[name.casefold()] > 1:
        name = f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:6]}"
    bad = not name or name.startswith(".") or any(c in '/\\:*?"<>|' or ord(c) < 32 for c in name)
    if bad or len(name.encode()) > _MAX_ID_BYTES:
        got = f"{name!r} for {entry.slide_path!r}; set a slide_id column in the cohort"
        raise CohortError(f"slide_id must be usable as a folder's name, got {got}")
    return replace(entry, slide_id=name)
