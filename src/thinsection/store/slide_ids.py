"""Table of slide ids in a results folder: `OUT/slide_ids.json` maps each id to a slide file.

A slide that is in the table keeps its id, however its path is typed and whatever slides are added
later. A slide is recognised by its resolved path. A slide that was moved or copied is recognised by
its name and content. The table is changed under a lock, so that several runs of one cohort can
assign ids at the same time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from thinsection.config import coerce
from thinsection.errors import SlideOpenError, StoreError
from thinsection.files.atomic import read_json, write_json
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.files.urls import is_url
from thinsection.slide.cohort import SlideEntry, give_slide_ids
from thinsection.slide.ids import SlideFile, file_key, folded, path_of_key, slide_stem
from thinsection.store.identity import fingerprint
from thinsection.store.ledger import FAILURE_NAME, SLIDES, SlideLedger, load_ledger
from thinsection.types import PlainValues, counted

# remedy for slides that moved
RELINK = "`thinsection relink RESULTS NEW_PLACE` finds slides that moved"
SLIDE_IDS_NAME = "slide_ids.json"
# key of a ledger's `source`: the fingerprint of the slide's file
FINGERPRINT = "samples"
# Number of moved slides that messages name one by one; the others are counted.
_SHOWN_MOVES = 3

OnMessage = Callable[[str], None]
FileById = Mapping[str, SlideFile]  # by slide id


def assign_stored_ids(
    out: Path, entries: Sequence[SlideEntry], on_message: OnMessage = lambda text: None
) -> tuple[SlideEntry, ...]:
    """Gives each slide of a run its id in this results folder.

    New slides get an id by `slide.ids.assign_ids`, and are added to the folder's table. The order
    of the entries stays.

    Memory: about 300 bytes per slide of the folder.

    Raises:
        StoreError: the table of ids is damaged.
        OutputError: the folder cannot be written.
    """
    entry_by_file = {entry.file: entry for entry in entries}
    table = read_slide_ids(out)
    if _is_complete(entry_by_file, table):
        return tuple(
            give_slide_ids(entry_by_file, _recognised_slides(out, table, entry_by_file))
        )
    with hold(out / SLIDES / LOCK_NAME, on_wait=on_message):
        # another run may have added slides meanwhile
        table = read_slide_ids(out)
        recognised = _recognised_slides(out, table, entry_by_file)
        moved = _find_moved(out, entry_by_file, recognised, table)
        _report_moves(out, moved, table, on_message)
        others = {
            slide_id: slide
            for slide_id, slide in table.items()
            if slide.file not in entry_by_file
        }
        entries_with_id = give_slide_ids(
            entry_by_file, others | recognised | moved, on_message
        )
        entry_with_id = dict(zip(entry_by_file, entries_with_id))
        _report_shared_names(entry_with_id, table, on_message)
        _add_entries(out, table, entry_with_id)
    # a slide whose former file still exists was copied, not moved
    gone = [slide_id for slide_id in moved if not _is_present(table[slide_id].file)]
    move_slides(
        out, {each: entry_by_file[moved[each].file].slide_path for each in gone}
    )
    return tuple(entry_with_id.values())


def read_slide_ids(out: Path) -> dict[str, SlideFile]:
    """Reads the file of each slide that has a folder under `OUT/slides`, by slide id.

    Slides that are missing in the table (results of earlier versions, or imported results) are
    added from their ledgers. In these, a relative path stays relative, because the folder of that
    run is not known.

    Raises:
        StoreError: the table is damaged.
    """
    folders = sorted(path.name for path in (out / SLIDES).glob("*") if path.is_dir())
    listed = _read_list(out / SLIDE_IDS_NAME)
    table = {}
    for slide_id in folders:
        slide = listed.get(slide_id) or _recorded_file(out, slide_id)
        if slide is not None:
            table[slide_id] = slide
    return table


def add_slide_ids(out: Path, table: FileById) -> None:
    """Adds slides whose results come from another folder; ids that are in the table stay.

    Raises:
        StoreError: the table of ids is damaged.
        OutputError: the folder cannot be written.
    """
    with hold(out / SLIDES / LOCK_NAME):
        listed = _read_list(out / SLIDE_IDS_NAME)
        _write_list(out, {**table, **listed}, listed)


def move_slides(out: Path, paths: Mapping[str, str]) -> None:
    """Writes the new path of each slide into its ledger, its failure and the table of ids.

    The times of the ledger files stay, because no result has changed.

    Raises OutputError: the folder cannot be written.
    """
    if not paths:
        return
    moved = {}
    for slide_id, path in paths.items():
        folder = out / SLIDES / slide_id
        with hold(folder / LOCK_NAME):
            ledger = load_ledger(out, slide_id)
            image = ledger.slide.get("image")
            if not ledger.slide:
                image = _failed_entry(folder / FAILURE_NAME).get("image")
            moved[slide_id] = SlideFile(file_key(path, image), slide_stem(path, image))
            if ledger.slide and ledger.slide.get("slide_path") != path:
                slide = ledger.slide | {"slide_path": path}
                replace(ledger, slide=slide).save(keep_time=True)
            _move_failure(folder / FAILURE_NAME, path)
    with hold(out / SLIDES / LOCK_NAME):
        listed = _read_list(out / SLIDE_IDS_NAME)
        _write_list(out, {**listed, **moved}, listed)


def _move_failure(failure: Path, file: str) -> None:
    """Writes the new path of a slide into the record of its failure, if there is a record."""
    if not failure.is_file():
        return
    # a damaged record contains no path
    with suppress(OSError, ValueError, KeyError, TypeError):
        document = read_json(failure)
        document["entry"]["slide_path"] = file
        write_json(failure, document)


def slide_place(ledger: SlideLedger) -> str:
    """Path or URL of a slide's file; '' if it is not recorded.

    A relative path is looked up in the current folder, beside the results folder, and in the table
    of ids.
    """
    path = str(ledger.slide.get("slide_path") or "")
    if not path or is_url(path) or Path(path).exists():
        return path
    beside = ledger.out.absolute().parent / path
    if beside.exists():
        return str(beside)
    if not Path(path).is_absolute():
        listed = _listed_file(ledger)
        if listed is not None and Path(path_of_key(listed.file)).exists():
            return path_of_key(listed.file)
    return path


def _listed_file(ledger: SlideLedger) -> SlideFile | None:
    """File of a slide in the table of ids; the table is read again only if it has changed."""
    path = ledger.out / SLIDE_IDS_NAME
    try:
        listed = _unchanged_list(path, path.stat().st_mtime_ns)
    except (OSError, StoreError):
        return None
    return listed.get(ledger.slide_id)


@lru_cache(maxsize=1)
def _unchanged_list(path: Path, changed_ns: int) -> FileById:
    return _read_list(path)


def check_slide_exists(slide_path: str, slide_id: str) -> None:
    """Raises SlideOpenError: the file of a slide is no longer at its path."""
    if not is_url(slide_path) and not Path(slide_path).exists():
        raise SlideOpenError(
            f"slide must be at its recorded path, got no file {slide_path!r} for {slide_id!r}; "
            f"{RELINK}"
        )


def _write_list(out: Path, table: FileById, listed: FileById) -> None:
    if table == listed:
        return
    document = {slide_id: asdict(slide) for slide_id, slide in sorted(table.items())}
    write_json(out / SLIDE_IDS_NAME, document)


def _read_list(path: Path) -> dict[str, SlideFile]:
    try:
        return coerce(read_json(path), dict[str, SlideFile], SLIDE_IDS_NAME)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StoreError(
            f"list of slide ids must be readable, got {error} in {str(path)!r}; remove it: the "
            "next run creates it again from the slides' ledgers"
        ) from None


def _recorded_file(out: Path, slide_id: str) -> SlideFile | None:
    """The file of a slide in its ledger or its failure record; None if neither has one."""
    facts: PlainValues = load_ledger(out, slide_id).slide
    if not facts.get("slide_path"):
        facts = _failed_entry(out / SLIDES / slide_id / FAILURE_NAME)
    path = str(facts.get("slide_path") or "")
    if not path:
        return None
    image = str(facts["image"]) if facts.get("image") else None
    is_relative = not is_url(path) and not Path(path).is_absolute()
    file = path if is_relative else file_key(path, image)
    return SlideFile(file, slide_stem(path, image))


def _failed_entry(failure: Path) -> PlainValues:
    """Path and image of a slide in the record of its failure; {} if it cannot be read."""
    try:
        entry = read_json(failure)["entry"]
        return {name: entry.get(name) for name in ("slide_path", "image")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_complete(entry_by_file: Mapping[str, SlideEntry], table: FileById) -> bool:
    """True if the table needs no change for these entries."""
    files = {slide.file for slide in table.values()}
    for file, entry in entry_by_file.items():
        if file not in files:
            return False
        listed = table.get(entry.slide_id)
        if entry.id_given and (listed is None or listed.file != file):
            return False
    return True


def _recognised_slides(
    out: Path, table: FileById, entry_by_file: Mapping[str, SlideEntry]
) -> dict[str, SlideFile]:
    """Slides of the run that the table has at the same path, by id: one id for each slide.

    If a file has several ids, the id with the most results is taken.
    """
    ids_by_file: dict[str, list[str]] = {}
    for slide_id, slide in table.items():
        if slide.file in entry_by_file:
            ids_by_file.setdefault(slide.file, []).append(slide_id)
    recognised = {}
    for ids in ids_by_file.values():
        slide_id = ids[0]
        if len(ids) > 1:
            slide_id = max(ids, key=lambda each: len(load_ledger(out, each).stages))
        recognised[slide_id] = table[slide_id]
    return recognised


def _find_moved(
    out: Path,
    entry_by_file: Mapping[str, SlideEntry],
    recognised: FileById,
    table: FileById,
) -> dict[str, SlideFile]:
    """Slides of the run that the table has at another path, with their new file, by id.

    A slide is taken for a moved one if name and content are equal and its former file is not
    itself part of the run. If several ids fit, the id whose former path has the longest common end
    with the new path is taken.
    """
    ids_by_name: dict[str, list[str]] = {}
    for slide_id, slide in table.items():
        if slide.file not in entry_by_file:
            ids_by_name.setdefault(folded(slide.name), []).append(slide_id)
    moved: dict[str, SlideFile] = {}
    recognised_files = {slide.file for slide in recognised.values()}
    for file, entry in sorted(entry_by_file.items()):
        if entry.id_given or file in recognised_files:
            continue
        stem = entry.stem
        candidates = ids_by_name.get(folded(stem), [])
        same = _same_slides(out, file, candidates, table)
        if not same:
            continue
        slide_id = max(same, key=lambda each: common_end(table[each].file, file))
        candidates.remove(slide_id)
        moved[slide_id] = SlideFile(file, stem)
    return moved


def _same_slides(
    out: Path, file: str, candidates: Sequence[str], table: FileById
) -> list[str]:
    """Candidates with the same content as this file.

    If there are none: the candidates that can be compared by name only.
    """
    if not candidates:
        return []
    content = _content_of(file)
    same = []
    same_name = []
    for slide_id in candidates:
        former = table[slide_id].file
        ledger = load_ledger(out, slide_id)
        recorded = ledger.source.get(FINGERPRINT, "")
        if ledger.damage and not _is_gone(former):
            # the ledger is damaged, but its slide file still exists and can be compared
            recorded = _content_of(former)
        if recorded and content:
            if recorded == content:
                same.append(slide_id)
        # no fingerprint to compare: the same name is enough if the recorded file is this one or no
        # longer exists
        elif file_key(former) == file or _is_gone(former):
            same_name.append(slide_id)
    return same or same_name


def _content_of(file: str) -> str:
    """Fingerprint of a file; '' if it is missing or cannot be read."""
    try:
        return fingerprint(path_of_key(file))
    except StoreError:
        return ""


def _is_gone(file: str) -> bool:
    """True if a local file is no longer at its path; False for a URL, which is not looked up.

    A relative path is looked up in the current folder. Not the opposite of `_is_present`.
    """
    return not is_url(file) and not Path(path_of_key(file)).exists()


def common_end(first: str, second: str) -> int:
    """Number of folder and file names at the end of two paths that are the same."""
    pairs = zip(reversed(Path(first).parts), reversed(Path(second).parts))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _report_moves(
    out: Path, moved: FileById, table: FileById, on_message: OnMessage
) -> None:
    """Reports which slides were found at another place."""
    elsewhere = [
        slide_id
        for slide_id, slide in moved.items()
        if file_key(table[slide_id].file) != slide.file
    ]
    for slide_id in elsewhere[:_SHOWN_MOVES]:
        former = table[slide_id].file
        damage = load_ledger(out, slide_id).damage
        reason = f"the name and content of {former!r}"
        if damage:
            reason = f"the name of {former!r}, whose {damage}"
        on_message(
            f"{moved[slide_id].file!r} has {reason}, so it is the slide {slide_id!r}"
        )
    num_more = len(elsewhere) - _SHOWN_MOVES
    if num_more > 0:
        on_message(f"{counted(num_more, 'more slide')} recognised by name and content")


def _report_shared_names(
    entry_with_id: Mapping[str, SlideEntry], table: FileById, on_message: OnMessage
) -> None:
    """Reports which new slides have the name of another slide of the folder."""
    id_by_name: dict[str, str] = {}
    for slide_id, slide in table.items():
        id_by_name.setdefault(folded(slide.name), slide_id)
    for file, entry in entry_with_id.items():
        other_id = id_by_name.get(folded(entry.stem))
        if other_id is None or entry.id_given or entry.slide_id in table:
            continue
        on_message(
            f"{file!r} gets the slide_id {entry.slide_id!r}, because another file with the same "
            f"name, {table[other_id].file!r}, is the slide {other_id!r}"
        )


def _add_entries(
    out: Path, table: FileById, entry_with_id: Mapping[str, SlideEntry]
) -> None:
    """Adds the run's slides to the table, and makes a folder for each slide."""
    updated = dict(table)
    for file, entry in entry_with_id.items():
        (out / SLIDES / entry.slide_id).mkdir(parents=True, exist_ok=True)
        former = updated.get(entry.slide_id)
        is_copy = (
            former is not None and former.file != file and _is_present(former.file)
        )
        if entry.id_given or not is_copy:
            updated[entry.slide_id] = SlideFile(file, entry.stem)
    _write_list(out, updated, _read_list(out / SLIDE_IDS_NAME))


def _is_present(file: str) -> bool:
    """True if a recorded file is known to be present: a URL, or an absolute path that exists.

    A relative path does not count as present. Not the opposite of `_is_gone`.
    """
    path = path_of_key(file)
    return is_url(file) or (Path(path).is_absolute() and Path(path).exists())


def equal_slides(ledgers: Iterable[SlideLedger]) -> list[tuple[str, ...]]:
    """Groups of two or more slides with the same fingerprint and the same image in the file."""
    ids_by_content: dict[tuple[str, str | None], list[str]] = {}
    for ledger in ledgers:
        content = ledger.source.get(FINGERPRINT)
        if content and ledger.stages:
            key = (content, ledger.slide.get("image"))
            ids_by_content.setdefault(key, []).append(ledger.slide_id)
    return [tuple(sorted(ids)) for ids in ids_by_content.values() if len(ids) > 1]
