"""Claims of slide ids in a results folder: `OUT/slide_ids.json` maps ids to files.

A file that the folder knows keeps its id, however its path is typed and whatever is added
later. A file is recognised by its resolved path; one that was moved or copied, by its
name and content. The list is changed under a lock, so that several runs may name one
cohort at once.
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
from thinsection.slide.ids import SlideFile, file_of, folded, path_of, stem_of
from thinsection.store.identity import fingerprint
from thinsection.store.ledger import FAILURE_NAME, SLIDES, SlideLedger, load_ledger
from thinsection.types import PlainValues, counted

# remedy for slides that moved
RELINK = "`thinsection relink RESULTS NEW_PLACE` finds slides that moved"
CLAIMS_NAME = "slide_ids.json"
# Slides that are named one by one, before the others are counted.
_SHOWN_MOVES = 3

OnMessage = Callable[[str], None]
Claims = Mapping[str, SlideFile]  # by slide id


def assign_stored_ids(
    out: Path, entries: Sequence[SlideEntry], on_message: OnMessage = lambda text: None
) -> tuple[SlideEntry, ...]:
    """Gives the slides of a run the ids that they have in this results folder.

    New slides get theirs by `slide.ids.assign_ids`, and the folder remembers them. The
    order of the entries stays.

    Memory: about 300 bytes per slide of the folder.

    Raises:
        StoreError: the list of ids is damaged.
        OutputError: the folder cannot be written.
    """
    entry_by_file = {entry.file: entry for entry in entries}
    claims = read_claims(out)
    if _all_claimed(entry_by_file, claims):
        return tuple(
            give_slide_ids(entry_by_file, _own_claims(out, claims, entry_by_file))
        )
    with hold(out / SLIDES / LOCK_NAME, on_wait=on_message):
        # another run may have added slides meanwhile
        claims = read_claims(out)
        own = _own_claims(out, claims, entry_by_file)
        moved = _find_moved(out, entry_by_file, own, claims)
        _report_moves(out, moved, claims, on_message)
        others = {
            slide_id: owner
            for slide_id, owner in claims.items()
            if owner.file not in entry_by_file
        }
        named_entries = give_slide_ids(entry_by_file, others | own | moved, on_message)
        named_by_file = dict(zip(entry_by_file, named_entries))
        _report_shared_names(named_by_file, claims, on_message)
        _write_claims(out, claims, named_by_file)
    # a slide whose former file is still there was copied
    gone = [slide_id for slide_id in moved if not _is_there(claims[slide_id].file)]
    move_slides(out, {one: entry_by_file[moved[one].file].slide_path for one in gone})
    return tuple(named_by_file.values())


def read_claims(out: Path) -> dict[str, SlideFile]:
    """Reads the file of each slide that has a folder under `OUT/slides`, by slide id.

    Slides that the list lacks (results of earlier versions, or imported ones) are added
    from their ledgers; there the file of a slide that was typed as a relative path stays
    as it was typed.

    Raises:
        StoreError: the list is damaged.
    """
    folders = sorted(path.name for path in (out / SLIDES).glob("*") if path.is_dir())
    listed = _read_list(out / CLAIMS_NAME)
    claims = {}
    for slide_id in folders:
        owner = listed.get(slide_id) or _recorded_file(out, slide_id)
        if owner is not None:
            claims[slide_id] = owner
    return claims


def add_claims(out: Path, claims: Claims) -> None:
    """Adds the files of slides whose results are brought from elsewhere; known ids stay.

    Raises:
        StoreError: the list of ids is damaged.
        OutputError: the folder cannot be written.
    """
    with hold(out / SLIDES / LOCK_NAME):
        listed = _read_list(out / CLAIMS_NAME)
        _write_list(out, {**claims, **listed}, listed)


def move_slides(out: Path, paths: Mapping[str, str]) -> None:
    """Writes the new path of each slide into its ledger, its failure and the list of ids.

    Times of ledgers stay, because no result has changed.

    Raises OutputError: the folder cannot be written.
    """
    if not paths:
        return
    owners = {}
    for slide_id, path in paths.items():
        folder = out / SLIDES / slide_id
        with hold(folder / LOCK_NAME):
            ledger = load_ledger(out, slide_id)
            image = ledger.slide.get("image")
            if not ledger.slide:
                image = _failed_entry(folder / FAILURE_NAME).get("image")
            owners[slide_id] = SlideFile(file_of(path, image), stem_of(path, image))
            if ledger.slide and ledger.slide.get("slide_path") != path:
                slide = ledger.slide | {"slide_path": path}
                replace(ledger, slide=slide).save(keep_time=True)
            _move_failure(folder / FAILURE_NAME, path)
    with hold(out / SLIDES / LOCK_NAME):
        listed = _read_list(out / CLAIMS_NAME)
        _write_list(out, {**listed, **owners}, listed)


def _move_failure(failure: Path, file: str) -> None:
    """Writes the new place of a slide into the record of its failure, if there is one."""
    if not failure.is_file():
        return
    # a damaged record names no slide
    with suppress(OSError, ValueError, KeyError, TypeError):
        document = read_json(failure)
        document["entry"]["slide_path"] = file
        write_json(failure, document)


def slide_place(ledger: SlideLedger) -> str:
    """Path or URL of a slide's file; '' if nobody knows it.

    A path that was typed relative to the folder of its run is looked up there, beside the results
    folder, and in the list of ids.
    """
    path = str(ledger.slide.get("slide_path") or "")
    if not path or is_url(path) or Path(path).exists():
        return path
    beside = ledger.out.absolute().parent / path
    if beside.exists():
        return str(beside)
    if not Path(path).is_absolute():
        owner = _listed_owner(ledger)
        if owner is not None and Path(path_of(owner.file)).exists():
            return path_of(owner.file)
    return path


def _listed_owner(ledger: SlideLedger) -> SlideFile | None:
    """File of a slide by the list of ids, which is read once while it stays as it is."""
    path = ledger.out / CLAIMS_NAME
    try:
        listed = _unchanged_list(path, path.stat().st_mtime_ns)
    except (OSError, StoreError):
        return None
    return listed.get(ledger.slide_id)


@lru_cache(maxsize=1)
def _unchanged_list(path: Path, changed_ns: int) -> Claims:
    return _read_list(path)


def check_slide_exists(slide_path: str, slide_id: str) -> None:
    """Raises SlideOpenError: the file of a slide is not at its place any more."""
    if not is_url(slide_path) and not Path(slide_path).exists():
        raise SlideOpenError(
            f"slide must be at its recorded path, got no file {slide_path!r} for {slide_id!r}; "
            f"{RELINK}"
        )


def _write_list(out: Path, claims: Claims, listed: Claims) -> None:
    if claims == listed:
        return
    document = {slide_id: asdict(owner) for slide_id, owner in sorted(claims.items())}
    write_json(out / CLAIMS_NAME, document)


def _read_list(path: Path) -> dict[str, SlideFile]:
    try:
        return coerce(read_json(path), dict[str, SlideFile], CLAIMS_NAME)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StoreError(
            f"list of slide ids must be readable, got {error} in {str(path)!r}; remove it: the "
            "next run creates it again from the slides' ledgers"
        ) from None


def _recorded_file(out: Path, slide_id: str) -> SlideFile | None:
    """The file of a slide by its ledger or its failure; None where neither names one."""
    facts: PlainValues = load_ledger(out, slide_id).slide
    if not facts.get("slide_path"):
        facts = _failed_entry(out / SLIDES / slide_id / FAILURE_NAME)
    path = str(facts.get("slide_path") or "")
    if not path:
        return None
    image = str(facts["image"]) if facts.get("image") else None
    is_relative = not is_url(path) and not Path(path).is_absolute()
    file = path if is_relative else file_of(path, image)
    return SlideFile(file, stem_of(path, image))


def _failed_entry(failure: Path) -> PlainValues:
    """Path and image of a slide that failed; {} where they cannot be read."""
    try:
        entry = read_json(failure)["entry"]
        return {name: entry.get(name) for name in ("slide_path", "image")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _all_claimed(entry_by_file: Mapping[str, SlideEntry], claims: Claims) -> bool:
    """True where the list needs no change."""
    files = {owner.file for owner in claims.values()}
    for file, entry in entry_by_file.items():
        if file not in files:
            return False
        owner = claims.get(entry.slide_id)
        if entry.id_given and (owner is None or owner.file != file):
            return False
    return True


def _own_claims(
    out: Path, claims: Claims, entry_by_file: Mapping[str, SlideEntry]
) -> dict[str, SlideFile]:
    """Claims of the run's slides that are recognised by their place: one for each.

    If a file has several ids, the one with the most results is taken.
    """
    ids_by_file: dict[str, list[str]] = {}
    for slide_id, owner in claims.items():
        if owner.file in entry_by_file:
            ids_by_file.setdefault(owner.file, []).append(slide_id)
    own = {}
    for ids in ids_by_file.values():
        slide_id = ids[0]
        if len(ids) > 1:
            slide_id = max(ids, key=lambda one: len(load_ledger(out, one).stages))
        own[slide_id] = claims[slide_id]
    return own


def _find_moved(
    out: Path,
    entry_by_file: Mapping[str, SlideEntry],
    own: Claims,
    claims: Claims,
) -> dict[str, SlideFile]:
    """Claims of the run's slides that lie elsewhere than the list says, by id.

    A slide is the same one if name and content are equal and its former file is not
    itself part of the run. If several fit, the one whose path has the longest common end
    is taken.
    """
    ids_by_name: dict[str, list[str]] = {}
    for slide_id, owner in claims.items():
        if owner.file not in entry_by_file:
            ids_by_name.setdefault(folded(owner.name), []).append(slide_id)
    moved: dict[str, SlideFile] = {}
    own_files = {owner.file for owner in own.values()}
    for file, entry in sorted(entry_by_file.items()):
        if entry.id_given or file in own_files:
            continue
        stem = entry.stem
        candidates = ids_by_name.get(folded(stem), [])
        same = _same_slides(out, file, candidates, claims)
        if not same:
            continue
        slide_id = max(same, key=lambda one: common_end(claims[one].file, file))
        candidates.remove(slide_id)
        moved[slide_id] = SlideFile(file, stem)
    return moved


def _same_slides(
    out: Path, file: str, candidates: Sequence[str], claims: Claims
) -> list[str]:
    """Candidates whose content this file holds; else those that only the name tells."""
    if not candidates:
        return []
    content = _content_of(file)
    same = []
    same_name = []
    for slide_id in candidates:
        former = claims[slide_id].file
        ledger = load_ledger(out, slide_id)
        recorded = ledger.source.get("samples", "")
        if ledger.damage and not _is_gone(former):
            # the ledger cannot tell, but the file that it was made from can
            recorded = _content_of(former)
        if recorded and content:
            if recorded == content:
                same.append(slide_id)
        # nothing was read so far: the name decides, if no other file has it
        elif file_of(former) == file or _is_gone(former):
            same_name.append(slide_id)
    return same or same_name


def _content_of(file: str) -> str:
    """Fingerprint of a file; '' where it is missing or cannot be read."""
    try:
        return fingerprint(path_of(file))
    except StoreError:
        return ""


def _is_gone(file: str) -> bool:
    """True where a local file is no longer at its place; nobody looks at a URL."""
    return not is_url(file) and not Path(path_of(file)).exists()


def common_end(first: str, second: str) -> int:
    """Number of parts that the ends of two paths share."""
    pairs = zip(reversed(Path(first).parts), reversed(Path(second).parts))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _report_moves(
    out: Path, moved: Claims, claims: Claims, on_message: OnMessage
) -> None:
    """Reports which slides were found at another place."""
    elsewhere = [
        slide_id
        for slide_id, owner in moved.items()
        if file_of(claims[slide_id].file) != owner.file
    ]
    for slide_id in elsewhere[:_SHOWN_MOVES]:
        former = claims[slide_id].file
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
    named_by_file: Mapping[str, SlideEntry], claims: Claims, on_message: OnMessage
) -> None:
    """Reports which new slides have the name of another slide of the folder."""
    owners: dict[str, str] = {}
    for slide_id, owner in claims.items():
        owners.setdefault(folded(owner.name), slide_id)
    for file, entry in named_by_file.items():
        owner_id = owners.get(folded(entry.stem))
        if owner_id is None or entry.id_given or entry.slide_id in claims:
            continue
        on_message(
            f"{file!r} gets the slide_id {entry.slide_id!r}, because another file with the same "
            f"name, {claims[owner_id].file!r}, is the slide {owner_id!r}"
        )


def _write_claims(
    out: Path, claims: Claims, named_by_file: Mapping[str, SlideEntry]
) -> None:
    """Adds the run's slides to the list, and makes the folders that claims need."""
    updated = dict(claims)
    for file, entry in named_by_file.items():
        (out / SLIDES / entry.slide_id).mkdir(parents=True, exist_ok=True)
        former = updated.get(entry.slide_id)
        is_copy = former is not None and former.file != file and _is_there(former.file)
        if entry.id_given or not is_copy:
            updated[entry.slide_id] = SlideFile(file, entry.stem)
    _write_list(out, updated, _read_list(out / CLAIMS_NAME))


def _is_there(file: str) -> bool:
    """True where a recorded file, an absolute path or a URL, still counts as present."""
    path = path_of(file)
    return is_url(file) or (Path(path).is_absolute() and Path(path).exists())


def equal_slides(ledgers: Iterable[SlideLedger]) -> list[tuple[str, ...]]:
    """Groups of two and more slides whose files have the same sampled content, and one image."""
    ids_by_content: dict[tuple[str, str | None], list[str]] = {}
    for ledger in ledgers:
        content = ledger.source.get("samples")
        if content and ledger.stages:
            key = (content, ledger.slide.get("image"))
            ids_by_content.setdefault(key, []).append(ledger.slide_id)
    return [tuple(sorted(ids)) for ids in ids_by_content.values() if len(ids) > 1]
