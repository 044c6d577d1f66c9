"""Slides of a run: files, slides in folders and below URLs, and rows of cohort tables."""

import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from thinsection.errors import CohortError, naming_file
from thinsection.files.sources import RemoteFolder
from thinsection.files.tables import SUFFIXES as TABLE_SUFFIXES
from thinsection.files.tables import path_and_sheet
from thinsection.files.trust import allow_local_host, check_table_url
from thinsection.files.urls import hide_secret, is_url, public_url, without_secrets
from thinsection.slide.base import Slide
from thinsection.slide.cohort_table import (
    CohortRow,
    SlidesConfig,
    parse_mpp,
    path_columns,
    read_cohort_rows,
)
from thinsection.slide.dicom_series import SUFFIX, group_files, is_dicom_path, read_head
from thinsection.slide.ids import (
    SlideFile,
    assign_ids,
    file_key,
    folded,
    is_unsafe,
    slide_stem,
)
from thinsection.slide.look import Look
from thinsection.slide.open import open_slide
from thinsection.slide.readers import is_folder_slide, slide_suffixes
from thinsection.types import Mpp, counted, ignore_message


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideEntry:
    """One slide of a cohort: plain values that travel between processes.

    Attributes:
        slide_id: name of the slide's folder in the output; unique in a run.
        slide_path: file or URL.
        slide_mpp: (x, y) µm per level-0 px, in place of the resolution that the file states.
        look: rule that converts pixels to RGB; None does not change them.
        image: name or number of the picture of the file; None for the reader's choice.
        patient_id: the patient or case, from the table or the name pattern.
        label: value to be predicted.
        split: 'train', 'test' or the like.
        more: further columns of the table, by name.
        folder: folder of the table; paths in the table are relative to it.
        id_given: True if a table gives the slide_id; no rule changes such an id.
    """

    slide_id: str
    slide_path: str
    slide_mpp: Mpp | None = None
    look: Look | None = None
    image: str | None = None
    patient_id: str | None = None
    label: str | None = None
    split: str | None = None
    more: Mapping[str, str] = field(default_factory=dict, hash=False)
    folder: str = ""
    id_given: bool = False

    def open(self, reader: str) -> Slide:
        """Opens the slide with a reader, with the resolution, look and image of the entry."""
        return open_slide(
            self.slide_path,
            reader=reader,
            slide_mpp=self.slide_mpp,
            look=self.look,
            image=self.image,
        )

    @property
    def file(self) -> str:
        """Unique key of the slide's file and image; see `file_key`."""
        return file_key(self.slide_path, self.image)

    @property
    def stem(self) -> str:
        """Stem of the file name, of which the id is made."""
        return slide_stem(self.slide_path, self.image)


def load_cohort(
    slides: Sequence[str | Path],
    settings: SlidesConfig | None = None,
    on_message: Callable[[str], None] = ignore_message,
) -> tuple[SlideEntry, ...]:
    """Returns the slides that files, folders, URLs and cohort tables name, in a stable order.

    Folders and their subfolders are searched for files with a suffix of a reader. The .dcm files of
    one series are one slide, so only one of them is taken. A folder `x.zarr` is one slide. If a
    file has several names (links), the first is taken.

    The ids are those of a new results folder, see `ids.py`: the name of the file, with a hash of
    its path if several files have the same name. A file name that cannot name a folder on every
    system gets a safe id. An id of a table is used unchanged, or refused. `store/slide_ids.py`
    looks up the ids of an existing results folder.

    Args:
        slides: slide files, folders, URLs, and tables with a column `slide_path`.
        settings: resolution, picture and further columns for slides without them in a table; the
            rule that converts pixels to RGB; and whether a table may name URLs of this machine.
        on_message: takes a line for each slide whose name was changed or that was left out.

    Raises:
        CohortError: no slide was found, a path is missing, two slides have the same id, or an id
            cannot name a folder.
    """
    settings = settings or SlidesConfig()
    slide_mpp = settings.mpp
    look = settings.look
    all_entries: list[SlideEntry] = []
    tables: list[str] = []
    for item in map(str, slides):
        if is_table(item):
            tables.append(item)
            all_entries += _entries_of_table(
                Path(item), on_message, allow_local_urls=settings.allow_local_urls
            )
        else:
            for path in slides_at(item, on_message):
                all_entries.append(
                    SlideEntry(slide_id=slide_stem(path), slide_path=path)
                )
    if settings.image is not None:
        for number, entry in enumerate(all_entries):
            if entry.image is None:
                named = replace(entry, image=settings.image)
                if not entry.id_given:
                    named = replace(named, slide_id=named.stem)
                all_entries[number] = named
    with naming_file(*tables):
        entries = _unique(all_entries, on_message)
    if not entries:
        items = ", ".join(repr(str(item)) for item in slides) or "nothing"
        raise CohortError(
            f"slides must name at least one slide, got {items}; "
            f"known suffixes: {' '.join(slide_suffixes())}"
        )
    if settings.name_pattern:
        entries = [
            _with_path_columns(entry, settings.name_pattern, on_message)
            for entry in entries
        ]
    return tuple(
        replace(entry, slide_mpp=entry.slide_mpp or slide_mpp, look=look)
        for entry in entries
    )


# slides of one argument


def slides_at(item: str, on_message: Callable[[str], None]) -> list[str]:
    """Returns the slides that a user names by a file, a folder or a URL.

    Raises:
        CohortError: there is no such file or folder.
    """
    if "\0" in item:
        raise CohortError(f"slide must be a path, got {item!r} with a NUL character")
    path = Path(item)
    if is_url(item):
        allow_local_host(item)  # the user typed this URL, so it may be on this machine
        return find_by_url(hide_secret(item))
    if path.is_file() or is_folder_slide(path):
        return [str(path)]
    if path.is_dir():
        return find_in_folder(path, on_message)
    raise CohortError.no_such_slide(item)


def is_table(item: str) -> bool:
    """True for the name of a table of slides, also one of a sheet."""
    if is_url(item) or "\0" in item:
        return False
    return path_and_sheet(Path(item))[0].suffix.lower() in TABLE_SUFFIXES


def _entries_of_table(
    path: Path, on_message: Callable[[str], None], *, allow_local_urls: bool
) -> list[SlideEntry]:
    """Returns the slides of a table.

    Raises:
        CohortError: two URLs differ only in a secret, so that they may be the same slide.
    """
    if not path_and_sheet(path)[0].is_file():
        raise CohortError.no_such_slide(str(path))
    rows = read_cohort_rows(path, on_message)
    row_by_url: dict[str, CohortRow] = {}
    for row in rows:
        url = row.columns["slide_path"]
        if not is_url(url):
            continue
        other = row_by_url.setdefault(public_url(url), row)
        if other.columns["slide_path"] != url:
            raise CohortError(
                "URLs of a table must differ in more than a password, a signature or a token, "
                f"got {public_url(url)!r} in {row.place} and in {other.place}; name each slide once"
            )
    return [
        _entry_of_row(row, path.parent, allow_local_urls=allow_local_urls)
        for row in rows
    ]


def _entry_of_row(
    row: CohortRow, folder: Path, *, allow_local_urls: bool
) -> SlideEntry:
    """Returns the slide of one row of a table; `folder` is the folder of the table."""
    columns = row.columns
    path = columns["slide_path"]
    if not path:
        raise CohortError(f"slide_path must not be empty, got '' in {row.place}")
    if is_url(path):
        check_table_url(path, row.place, allow_local=allow_local_urls)
        path = hide_secret(path)
    else:
        path = str(folder / path)  # does not change an absolute path
    mpp = columns["slide_mpp"]
    image = columns["image"] or None
    if image in (Path(path).name, slide_stem(path)):
        image = None  # in tables of other programs, 'image' is the name of the slide
    return SlideEntry(
        slide_id=columns["slide_id"] or slide_stem(path, image),
        slide_path=path,
        slide_mpp=parse_mpp(mpp, where=row.place) if mpp else None,
        image=image,
        patient_id=columns["patient_id"] or None,
        label=columns["label"] or None,
        split=columns["split"] or None,
        more={name: public_url(text) for name, text in row.more.items()},
        folder=str(folder),
        id_given=bool(columns["slide_id"]),
    )


def _with_path_columns(
    entry: SlideEntry, pattern: str, on_message: Callable[[str], None]
) -> SlideEntry:
    """Adds the columns that the name pattern finds in the slide's path; the table has priority."""
    columns = path_columns(pattern, entry.slide_path)
    if not columns:
        on_message(
            f"name_pattern does not match {entry.slide_path!r}, which gets no columns from it"
        )
    patient_id = columns.get("patient_id") or columns.get("case_id")
    return replace(
        entry,
        patient_id=entry.patient_id or patient_id,
        label=entry.label or columns.get("label"),
        split=entry.split or columns.get("split"),
        more={**columns, **entry.more},
    )


# one entry for each file, one id for each entry


def _unique(
    entries: Iterable[SlideEntry], on_message: Callable[[str], None]
) -> list[SlideEntry]:
    """Returns the slides with unique ids; a file that is named twice gives one slide."""
    by_file: dict[str, SlideEntry] = {}
    # first file of each image of each DICOM series of a folder
    series: dict[tuple[Path, str, str | None], str] = {}
    num_more = 0
    for entry in entries:
        file = entry.file
        slide_file = file_key(entry.slide_path)
        place = Path(slide_file)
        uid = ""
        if not is_url(slide_file) and is_dicom_path(place):
            head = read_head(place)
            if head is not None:
                uid = head.series
                place = place.parent
        first = series.setdefault((place, uid, entry.image), slide_file)
        if first != slide_file and not entry.id_given:
            num_more += 1
            continue
        if file in by_file:
            by_file[file] = _merge_entries(by_file[file], entry, on_message)
        else:
            by_file[file] = entry
    if num_more:
        on_message(
            f"{counted(num_more, '.dcm file')} left out of the list: another file "
            "already stands for the same slide"
        )
    _check_table_ids(by_file.values())
    return give_slide_ids(by_file, {}, on_message)


def _merge_entries(
    first: SlideEntry, second: SlideEntry, on_message: Callable[[str], None]
) -> SlideEntry:
    """Returns one of two entries of the same file: the first, or else the one with a table's id."""
    if first.slide_id == second.slide_id and first.id_given >= second.id_given:
        return first
    if first.id_given and second.id_given:
        raise CohortError(
            f"a slide must have one slide_id, got {first.slide_id!r} and {second.slide_id!r} "
            f"for {second.slide_path!r}"
        )
    if first.slide_path != second.slide_path:
        on_message(
            f"{second.slide_path!r} is the same file as {first.slide_path!r} and is used once"
        )
    return second if second.id_given else first


def _check_table_ids(entries: Iterable[SlideEntry]) -> None:
    """Refuses ids of tables that two slides share, and ids that cannot name a folder."""
    entry_by_id: dict[str, SlideEntry] = {}
    for entry in entries:
        if not entry.id_given:
            continue
        first = entry_by_id.setdefault(folded(entry.slide_id), entry)
        if first is not entry:
            raise CohortError(
                f"slide_id must belong to one slide of a cohort, got {entry.slide_id!r} for "
                f"{entry.slide_path!r} and {first.slide_path!r}"
            )
        if is_unsafe(entry.slide_id):
            raise CohortError(
                f"slide_id must be usable as the name of a folder, got {entry.slide_id!r} for "
                f"{entry.slide_path!r}; set a slide_id column in the cohort"
            )


def give_slide_ids(
    by_file: Mapping[str, SlideEntry],
    known: Mapping[str, SlideFile],
    on_message: Callable[[str], None] = ignore_message,
) -> list[SlideEntry]:
    """Returns the slides with their known ids, or with new ids, in the same order.

    Args:
        by_file: the slides, by `file_key`.
        known: files of slides that keep their id, by id; for example those of a results folder.
        on_message: takes a line for each slide whose name was changed.
    """
    table_ids = {
        entry.slide_id: SlideFile(file, entry.stem)
        for file, entry in by_file.items()
        if entry.id_given
    }
    folded_table_ids = {folded(slide_id) for slide_id in table_ids}
    # a table's id wins over the same id of another file
    taken = {
        slide_id: slide
        for slide_id, slide in known.items()
        if folded(slide_id) not in folded_table_ids
    }
    taken |= table_ids
    ids = {slide.file: slide_id for slide_id, slide in taken.items()}
    new_stems = {file: entry.stem for file, entry in by_file.items() if file not in ids}
    new_ids = assign_ids(new_stems, taken)
    for file, slide_id in new_ids.items():
        stem = new_stems[file]
        if is_unsafe(stem):
            on_message(
                f"{stem!r} is not a valid name for a folder on all systems; its slide_id is "
                f"{slide_id!r}"
            )
    ids |= new_ids
    # names that look the same, because they differ only in their Unicode form
    spellings_by_name: dict[str, set[str]] = {}
    for entry in by_file.values():
        spelling = Path(entry.slide_path).name
        name = unicodedata.normalize("NFC", spelling)
        spellings_by_name.setdefault(name, set()).add(spelling)
    for name, spellings in spellings_by_name.items():
        if len(spellings) > 1:
            paths = ", ".join(ascii(spelling) for spelling in sorted(spellings))
            on_message(
                f"{name!r} is the name of several files that differ only in their Unicode form "
                f"({paths}); rename one, or give them a slide_id"
            )
    return [replace(entry, slide_id=ids[file]) for file, entry in by_file.items()]


def find_in_folder(
    folder: Path, on_message: Callable[[str], None] | None = None
) -> list[str]:
    """Returns the slides of a folder and its subfolders; a folder that is a slide is not searched.

    Args:
        folder: the folder.
        on_message: takes a line for each folder whose .dcm files are several slides.
    """
    candidates: list[Path] = []
    for parent, folders, files in os.walk(folder):
        candidates += [Path(parent, name) for name in (*folders, *files)]
        # os.walk enters the folders that remain in this list
        folders[:] = [
            name for name in folders if not is_folder_slide(Path(parent, name))
        ]
    suffixes = frozenset(slide_suffixes())
    slides: list[Path] = []
    dicom_files: dict[Path, list[Path]] = {}  # by folder
    for path in candidates:
        suffix = path.suffix.lower()
        if suffix not in suffixes or path.name.startswith("."):
            continue
        if suffix == SUFFIX and path.is_file():
            dicom_files.setdefault(path.parent, []).append(path)
        elif path.is_file() or is_folder_slide(path):
            slides.append(path)
    for place, paths in sorted(dicom_files.items()):
        found = group_files(paths)
        slides += found.first_files
        if found.note() and on_message is not None:
            on_message(f"{place.name!r}: {found.note()}")
    return [str(path) for path in sorted(slides)]


def find_by_url(url: str) -> list[str]:
    """Returns the slides below the URL of a folder; any other URL is a slide itself.

    A URL is a folder if it ends with `/`, or if its name has no suffix and files lie below it.
    """
    name = url.split("?", 1)[0]
    if name.lower().endswith(".csv"):
        raise CohortError(
            f"cohort must be a local CSV (its slide_path may contain URLs), got {url!r}; copy "
            "it here"
        )
    is_folder = name.endswith("/") and not is_folder_slide(name.rstrip("/"))
    if Path(name).suffix and not is_folder:
        return [url]
    try:
        files = RemoteFolder(url).sizes()
    except Exception as error:  # each store has its own errors
        if not is_folder:
            return [url]
        raise CohortError(
            f"folder by URL must be listed by its server, got "
            f"{without_secrets(repr(error))} for {url!r}; pass the "
            "slides one by one, or list them in a cohort CSV"
        ) from error
    slides = _slides_among(PurePosixPath(file) for file in files)
    if not slides and not is_folder:
        return [url]
    return [f"{url.rstrip('/')}/{slide}" for slide in slides]


def _slides_among(paths: Iterable[PurePosixPath]) -> list[str]:
    """Returns the slides among the files of a remote folder, by the rules of a local one."""
    suffixes = frozenset(slide_suffixes())
    slides: dict[PurePosixPath, str] = {}
    for path in sorted(paths):
        if path.name.startswith("."):
            continue
        suffix = path.suffix.lower()
        # decided by the name, because the files of the folder are remote
        folder_slides = [
            parent for parent in path.parents if is_folder_slide(f"url://{parent}")
        ]
        if folder_slides:
            outermost = folder_slides[-1]
            slides.setdefault(outermost, str(outermost))
        elif suffix == SUFFIX:
            # the heads of remote files are not read: all files of a folder count as one slide
            slides.setdefault(path.parent, str(path))
        elif suffix in suffixes:
            slides.setdefault(path, str(path))
    return list(slides.values())
