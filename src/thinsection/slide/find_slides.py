"""Search for slides: in a folder with its subfolders, or below the URL of a folder."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from thinsection.errors import CohortError
from thinsection.files.sources import RemoteFolder
from thinsection.files.url_secrets import without_secrets
from thinsection.slide.dicom_series import SUFFIX, group_files
from thinsection.slide.readers import is_folder_slide, slide_suffixes


def find_in_folder(
    folder: Path, on_message: Callable[[str], None] | None = None
) -> list[str]:
    """Returns the slides of a folder and its subfolders; a slide's own folder is not searched.

    Args:
        folder: the folder.
        on_message: takes a line for each folder whose .dcm files are several slides.
    """
    candidates: list[Path] = []
    for parent, folders, files in os.walk(folder):
        candidates += [Path(parent, name) for name in (*folders, *files)]
        # os.walk goes into what is left in this list
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

    A URL is a folder's where it ends with `/`, or where its name has no suffix and files lie below.
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
        folder_slides = [one for one in path.parents if _names_folder_slide(one)]
        if folder_slides:
            outermost = folder_slides[-1]
            slides.setdefault(outermost, str(outermost))
        elif (
            suffix == SUFFIX
        ):  # their heads cannot be read: the files of a folder are one slide
            slides.setdefault(path.parent, str(path))
        elif suffix in suffixes:
            slides.setdefault(path, str(path))
    return list(slides.values())


def _names_folder_slide(path: PurePosixPath) -> bool:
    """Tells whether a remote folder is by its name one slide of many files."""
    return is_folder_slide(f"url://{path}")
