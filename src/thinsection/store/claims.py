"""Which file each slide id of a results folder belongs to: `OUT/slide_ids.json`.

A file that the folder knows keeps its id, however it is typed and whatever is added later. A file
is known by its resolved path; one that was moved or copied, by its name and content. The list is
changed under a lock, so that several runs may name one cohort at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

from thinsection.config import coerce
from thinsection.errors import StoreError
from thinsection.files.atomic import write_json
from thinsection.files.json_text import read_json
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.files.sources import is_url
from thinsection.slide.cohort import SlideEntry, named
from thinsection.slide.slide_ids import SlideFile, file_of, folded, stem_of
from thinsection.store.identity import fingerprint
from thinsection.store.ledger import FAILURE_NAME, SLIDES, SlideLedger, load_ledger

CLAIMS_NAME = "slide_ids.json"
_SHOWN_MOVES = 3  # slides that are named one by one, before the rest is counted

OnMessage = Callable[[str], None]


def claim_ids(
    out: Path, entries: Sequence[SlideEntry], on_message: OnMessage = lambda text: None
) -> tuple[SlideEntry, ...]:
    """The slides of a run with the ids that they have in this results folder, in the same order.

    New slides get theirs by `slide_ids.assign_ids`, and the folder remembers them.

    Memory: about 300 bytes per slide of the folder.

    Raises StoreError: the list of ids is damaged. OutputError: the folder cannot be written.
    """
    by_file = {file_of(entry.slide_path): entry for entry in entries}
    known = read_claims(out)
    if _all_known(by_file, known):
        return tuple(named(by_file, _own_ids(out, known, by_file)))
    with hold(out / SLIDES / LOCK_NAME, on_wait=on_message):
        known = read_claims(out)  # another run may have added slides meanwhile
        kept = _own_ids(out, known, by_file)
        moved = _find_moved(out, by_file, kept, known)
        _tell_moves(moved, known, on_message)
        others = {
            slide_id: owner
            for slide_id, owner in known.items()
            if owner.file not in by_file
        }
        found = dict(zip(by_file, named(by_file, others | kept | moved, on_message)))
        _tell_shared(found, known, on_message)
        _write_claims(out, known, found)
    return tuple(found.values())


def read_claims(out: Path) -> dict[str, SlideFile]:
    """The file of each slide that has a folder under `OUT/slides`, by slide id.

    Slides that the list lacks (results of earlier versions, or imported ones) are added from their
    ledgers; there the file of a slide that was typed as a relative path stays as it was typed.

    Raises StoreError: the list is damaged.
    """
    folders = sorted(path.name for path in (out / SLIDES).glob("*") if path.is_dir())
    listed = _read_list(out / CLAIMS_NAME)
    known = {}
    for slide_id in folders:
        owner = listed.get(slide_id) or _recorded_file(out, slide_id)
        if owner is not None:
            known[slide_id] = owner
    return known


def _read_list(path: Path) -> dict[str, SlideFile]:
    try:
        document = read_json(path)
        listed: dict[str, SlideFile] = coerce(
            document, dict[str, SlideFile], CLAIMS_NAME
        )
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        remedy = "remove it: it is made again from the slides' ledgers"
        rule = "list of slide ids must be readable"
        raise StoreError(f"{rule}, got {error} in {str(path)!r}; {remedy}") from None
    return listed


def _recorded_file(out: Path, slide_id: str) -> SlideFile | None:
    """The file of a slide by its ledger or its failure; None where neither tells."""
    path = load_ledger(out, slide_id).slide.get("slide_path")
    if not path:
        path = _failed_path(out / SLIDES / slide_id / FAILURE_NAME)
    if not path:
        return None
    is_relative = not is_url(path) and not Path(path).is_absolute()
    return SlideFile(path if is_relative else file_of(path), stem_of(path))


def _failed_path(failure: Path) -> str:
    try:
        document = read_json(failure)
        return str(document["entry"]["slide_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _all_known(
    by_file: Mapping[str, SlideEntry], known: Mapping[str, SlideFile]
) -> bool:
    """Whether the list needs no change."""
    files = {owner.file for owner in known.values()}
    for file, entry in by_file.items():
        if file not in files:
            return False
        if entry.id_given and (
            entry.slide_id not in known or known[entry.slide_id].file != file
        ):
            return False
    return True


def _own_ids(
    out: Path, known: Mapping[str, SlideFile], by_file: Mapping[str, SlideEntry]
) -> dict[str, SlideFile]:
    """The run's slides that are known by their place: one id for each.

    Of several ids of one file the one with the most results is taken.
    """
    ids_by_file: dict[str, list[str]] = {}
    for slide_id, owner in known.items():
        if owner.file in by_file:
            ids_by_file.setdefault(owner.file, []).append(slide_id)
    own = {}
    for ids in ids_by_file.values():
        slide_id = ids[0]
        if len(ids) > 1:
            slide_id = max(ids, key=lambda one: len(load_ledger(out, one).stages))
        own[slide_id] = known[slide_id]
    return own


def _find_moved(
    out: Path,
    by_file: Mapping[str, SlideEntry],
    kept: Mapping[str, SlideFile],
    known: Mapping[str, SlideFile],
) -> dict[str, SlideFile]:
    """The slides of the run that lie elsewhere than the list says, by id.

    A slide is the same one where name and content are, and where its former file is not itself part
    of the run. Of several that fit, the one whose path has the longest common end is taken.
    """
    ids_by_name: dict[str, list[str]] = {}
    for slide_id, owner in known.items():
        if owner.file not in by_file:
            ids_by_name.setdefault(folded(owner.name), []).append(slide_id)
    moved: dict[str, SlideFile] = {}
    placed = {owner.file for owner in kept.values()}
    for file, entry in sorted(by_file.items()):
        if entry.id_given or file in placed:
            continue
        stem = stem_of(entry.slide_path)
        candidates = ids_by_name.get(folded(stem), [])
        same = _same_slides(out, file, candidates, known)
        if not same:
            continue
        slide_id = max(same, key=lambda one: _common_end(known[one].file, file))
        candidates.remove(slide_id)
        moved[slide_id] = SlideFile(file, stem)
    return moved


def _same_slides(
    out: Path, file: str, candidates: Sequence[str], known: Mapping[str, SlideFile]
) -> list[str]:
    """Those of some slides that this file holds, by the content that their ledgers recorded."""
    if not candidates:
        return []
    try:
        content = fingerprint(file)
    except StoreError:  # a missing or unreadable file has no content to compare
        content = ""
    same = []
    for slide_id in candidates:
        recorded = load_ledger(out, slide_id).source.get("samples", "")
        former = known[slide_id].file
        if recorded and content:
            is_same = recorded == content
        else:  # nothing was read so far: the name decides, if no other file has it
            is_same = file_of(former) == file or _is_gone(former)
        if is_same:
            same.append(slide_id)
    return same


def _is_gone(file: str) -> bool:
    """Whether a file is no longer at its place; of a URL that is not known."""
    return not is_url(file) and not Path(file).exists()


def _common_end(first: str, second: str) -> int:
    """How many parts the ends of two paths share."""
    pairs = zip(reversed(Path(first).parts), reversed(Path(second).parts))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tell_moves(
    moved: Mapping[str, SlideFile],
    known: Mapping[str, SlideFile],
    on_message: OnMessage,
) -> None:
    """Says which slides were found at another place."""
    elsewhere = [
        slide_id
        for slide_id, owner in moved.items()
        if file_of(known[slide_id].file) != owner.file
    ]
    for slide_id in elsewhere[:_SHOWN_MOVES]:
        on_message(
            f"{moved[slide_id].file!r} has the name and content of "
            f"{known[slide_id].file!r}: it is the slide {slide_id!r}"
        )
    if len(elsewhere) > _SHOWN_MOVES:
        rest = len(elsewhere) - _SHOWN_MOVES
        on_message(f"{rest} more slides are known by their name and content")


def _tell_shared(
    found: Mapping[str, SlideEntry],
    known: Mapping[str, SlideFile],
    on_message: OnMessage,
) -> None:
    """Says which new slides have the name of another slide of the folder."""
    owners: dict[str, str] = {}
    for slide_id, owner in known.items():
        owners.setdefault(folded(owner.name), slide_id)
    for file, entry in found.items():
        owner_id = owners.get(folded(stem_of(entry.slide_path)))
        if owner_id is None or entry.id_given or entry.slide_id in known:
            continue
        on_message(
            f"{file!r} has the slide_id {entry.slide_id!r}: another file of its name, "
            f"{known[owner_id].file!r}, is the slide {owner_id!r}"
        )


def _write_claims(
    out: Path, known: Mapping[str, SlideFile], found: Mapping[str, SlideEntry]
) -> None:
    """Adds the run's slides to the list, each with a folder: without one a claim is forgotten."""
    claims = dict(known)
    for file, entry in found.items():
        (out / SLIDES / entry.slide_id).mkdir(parents=True, exist_ok=True)
        former = claims.get(entry.slide_id)
        is_copy = former is not None and former.file != file and _is_there(former.file)
        if entry.id_given or not is_copy:
            claims[entry.slide_id] = SlideFile(file, stem_of(entry.slide_path))
    if claims == _read_list(out / CLAIMS_NAME):
        return
    document = {slide_id: asdict(owner) for slide_id, owner in sorted(claims.items())}
    write_json(out / CLAIMS_NAME, document)


def _is_there(file: str) -> bool:
    """Whether a recorded file is known to be at its place: an absolute path or a URL."""
    return is_url(file) or (Path(file).is_absolute() and Path(file).exists())


def equal_slides(ledgers: Iterable[SlideLedger]) -> list[tuple[str, ...]]:
    """Groups of two and more slides whose files have the same content, as far as it was read."""
    ids_by_content: dict[str, list[str]] = {}
    for ledger in ledgers:
        content = ledger.source.get("samples")
        if content and ledger.stages:
            ids_by_content.setdefault(content, []).append(ledger.slide_id)
    return [tuple(sorted(ids)) for ids in ids_by_content.values() if len(ids) > 1]
