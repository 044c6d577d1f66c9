"""Record of how a slide was opened. A copy or pickle of a slide is this record.

Whoever receives it opens the file again by the same reader. The record states sizes and times of
the files, so that a copy never shows the pixels of another file that lies at the same path now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from thinsection.errors import SlideOpenError
from thinsection.files.urls import is_url
from thinsection.slide.dicom_series import files_of_slide, is_dicom_path
from thinsection.slide.look import Look
from thinsection.types import Mpp

# metadata of a folder of chunks, which are written anew when its pixels are
FOLDER_METADATA = ("zarr.json", ".zattrs", ".zarray", ".zgroup")

# attributes of a slide that a copy takes over from the original, by name
Statements = Mapping[str, object]


class FileState(NamedTuple):
    """State of one file of a slide, by which another file at its place is noticed."""

    name: str
    num_bytes: int
    version: str  # time of the last change, or what the server states about the version


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Arguments of `open_slide`, the reader that it chose, and the state of the slide's files."""

    path: str  # absolute path, or URL without its secrets
    reader: str
    slide_mpp: Mpp | None
    look: Look
    image: str | None
    files: tuple[FileState, ...]
    # True for `slide.stored`, the slide before it is turned upright
    is_stored: bool = False

    def check_files(self) -> None:
        """Compares the local files with those that were opened.

        Raises:
            SlideOpenError: another file lies there now, or the file was changed.
        """
        if not is_url(self.path) and Path(self.path).exists():
            self.check_same(file_states(self.path))

    def check_same(self, files: tuple[FileState, ...]) -> None:
        """Raises SlideOpenError: these are not the states of the files that were opened."""
        if files != self.files:
            raise SlideOpenError(
                f"slide must be the file that was opened, got another or a changed one at "
                f"{self.path!r}; open it again by open_slide"
            )


def companions(path: Path) -> list[Path]:
    """Returns the files beside a local slide that belong to it."""
    if path.suffix.lower() == ".mrxs":
        folder = path.with_suffix("")
        if folder.is_dir():
            return sorted(file for file in folder.iterdir() if file.is_file())
    if is_dicom_path(path):
        return [file.path for file in files_of_slide(path) if file.path != path]
    return []


def file_states(path: str) -> tuple[FileState, ...]:
    """Returns the state of each file of a local slide; () if it is missing.

    For a folder of chunks these are the files with its metadata. Memory: 200 bytes a file.
    """
    if is_url(path):
        return ()
    slide = Path(path)
    try:
        state = slide.stat()
    except OSError:  # whoever opens it says why it cannot be read
        return ()
    if not S_ISDIR(state.st_mode):
        own = FileState(slide.name, state.st_size, str(state.st_mtime_ns))
        return (own, *_states(companions(slide)))
    return _states(slide / name for name in FOLDER_METADATA)


def _states(files: Iterable[Path]) -> tuple[FileState, ...]:
    """Returns the states of those files that exist."""
    states = []
    for file in files:
        with suppress(FileNotFoundError):
            state = file.stat()
            states.append(FileState(file.name, state.st_size, str(state.st_mtime_ns)))
    return tuple(states)
