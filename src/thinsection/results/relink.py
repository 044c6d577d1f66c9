"""Slides that moved: a results folder finds them again by name and content.

The file of a slide has the same name and the recorded content. If no file with this name has the
content, it is any file with the content. If several files fit, it is the one whose path has the
longest common end with the former path. If that does not decide either, the slide is not changed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.urls import is_url
from thinsection.results.folder import Listener, check_results_folder
from thinsection.results.tables import write_tables
from thinsection.slide.cohort import slides_at
from thinsection.slide.ids import file_key, folded, path_of_key, slide_stem
from thinsection.store.identity import fingerprint
from thinsection.store.outcome import KnownSlide, known_slides
from thinsection.store.slide_ids import (
    FINGERPRINT,
    FileById,
    common_end,
    move_slides,
    read_slide_ids,
)
from thinsection.types import ignore_message


@dataclass(frozen=True, kw_only=True)
class Relinked:
    """Slides of a results folder after a search for them; each is in one of the four groups."""

    found: dict[str, str]  # new file, by slide id
    ambiguous: dict[str, tuple[str, ...]]  # files that fit equally well, by slide id
    missing: tuple[str, ...]  # neither at a new place nor at the known place
    kept: tuple[str, ...]  # not found, but still at their known place


class _Files:
    """Slide files at the new places; the content of each is read once, if at all."""

    def __init__(self, paths: Iterable[str]) -> None:
        # the first of several links to the same file
        by_file = {file_key(path): path for path in reversed([*paths])}
        self.paths = tuple(sorted(by_file.values()))
        self._contents: dict[str, str] = {}
        self._by_name: dict[str, list[str]] = {}
        for path in self.paths:
            self._by_name.setdefault(folded(slide_stem(path)), []).append(path)

    def named(self, name: str) -> list[str]:
        """Files of this name, whatever its capitals."""
        return self._by_name.get(folded(name), [])

    def content(self, path: str) -> str:
        """Fingerprint of a file; '' if it cannot be read."""
        if path not in self._contents:
            try:
                self._contents[path] = fingerprint(path)
            except StoreError:
                self._contents[path] = ""
        return self._contents[path]

    @cached_property
    def by_content(self) -> dict[str, list[str]]:
        """Every file by its content; reads 128 KiB of each."""
        files: dict[str, list[str]] = {}
        for path in self.paths:
            files.setdefault(self.content(path), []).append(path)
        files.pop("", None)
        return files


def relink(
    folder: str | Path,
    places: Sequence[str | Path],
    *,
    on_message: Listener = ignore_message,
) -> Relinked:
    """Finds the slides of a results folder at new places; changes their paths and nothing else.

    Args:
        folder: a results folder.
        places: slide files, folders with slides, or URLs.
        on_message: takes notes on files that are passed over.

    Memory: some kB per slide of the folder, 300 bytes per file at the places.

    Raises:
        StoreError: it is no results folder, or a process works in it.
        InvalidInputError: the places have no slide.
    """
    out = Path(folder)
    check_results_folder(out)
    paths: list[str] = []
    for place in map(str, places):
        for path in slides_at(place, on_message):
            paths.append(path if is_url(path) else str(Path(path).absolute()))
    files = _Files(paths)
    if not files.paths:
        raise InvalidInputError(
            f"new place must contain slides, got none in {', '.join(map(str, places))}"
        )
    slides = known_slides(out)
    listed_slides = read_slide_ids(out)
    candidates = {
        slide.slide_id: _candidates(slide, listed_slides, files) for slide in slides
    }
    found = {}
    ambiguous = {}
    missing = []
    kept = []
    for slide in slides:
        slide_id = slide.slide_id
        path = slide.slide_path
        fitting = candidates[slide_id]
        if len(fitting) == 1:
            found[slide_id] = fitting[0]
        elif fitting:
            ambiguous[slide_id] = tuple(fitting)
        elif path and (is_url(path) or Path(path).exists()):
            kept.append(slide_id)
        else:
            missing.append(slide_id)
    move_slides(out, found)
    if found:
        write_tables(out, known_slides(out))
    return Relinked(
        found=found, ambiguous=ambiguous, missing=tuple(missing), kept=tuple(kept)
    )


def _candidates(slide: KnownSlide, listed_slides: FileById, files: _Files) -> list[str]:
    """Files that may be this slide: one if it is found, none if it is missing."""
    listed = listed_slides.get(slide.slide_id)
    former = slide.slide_path or (path_of_key(listed.file) if listed else "")
    name = slide_stem(former) if former else slide.slide_id
    content = slide.ledger.source.get(FINGERPRINT, "")
    fitting = files.named(name)
    if content:
        fitting = [file for file in fitting if files.content(file) == content]
        fitting = fitting or files.by_content.get(content, [])
    if len(fitting) < 2:
        return fitting
    ends = [common_end(former, file) for file in fitting]
    return [file for file, end in zip(fitting, ends) if end == max(ends)]
