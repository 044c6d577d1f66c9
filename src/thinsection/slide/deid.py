"""Slides without what names a patient: label, macro, dates, users and free text."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tifffile

from thinsection.errors import InvalidInputError, OutputError, SlideOpenError, require
from thinsection.files.atomic import atomic_path
from thinsection.files.sources import FileSource
from thinsection.slide.convert import refuse_present
from thinsection.slide.rewrite import copied
from thinsection.slide.tiff_layout import OME, TiffLayout, read_layout

# of an Aperio description: what says how the px were made; all else may name somebody
_APERIO = (
    *("AppMag", "MPP", "StripeWidth", "Left", "Top", "LineAreaXOffset", "LineAreaYOffset"),
    *("LineCameraSkew", "OriginalWidth", "OriginalHeight", "Originalheight", "Focus Offset"),
    *("DisplayColor", "Gamma", "ICC Profile", "Exposure Time", "Exposure Scale", "Total Depth"),
)
# tags that lay out px, their colours and their size; every other tag is left out
_PLAIN = (
    *(254, 256, 257, 258, 259, 262, 266, 270, 273, 274, 277, 278, 279, 282, 283, 284, 296, 317),
    *(320, 322, 323, 324, 325, 330, 338, 339, 347, 530, 531, 532, 32997, 34675),
)
_ONLY_TIFF = "is not a TIFF that can be copied: `thinsection convert` writes one without metadata"


def identifying(slide_path: str | Path) -> list[str]:
    """What in a TIFF slide may identify a patient, one line each; [] where nothing was found.

    Text within the px is not looked for, nor is the name of the file.

    Memory: the metadata.

    Raises:
        InvalidInputError: not a TIFF of a kind that is copied.
    """
    with Path(slide_path).open("rb") as handle:
        return list(_told(_layout(slide_path, handle)))


def deidentify(slide_path: str | Path, out: str | Path, *, overwrite: bool = False) -> list[str]:
    """Writes a TIFF slide without what may identify a patient; image data stays equal in bytes.

    Kept are the levels and the thumbnail, each with its segments, tags that lay out px, the ICC
    profile and, of Aperio's description, what says how px were made. Left out are label, macro and
    other images, and every other tag. The name of the file is the caller's.

    Returns: what was left out, as `identifying` says it.

    Memory: one segment and the metadata.

    Raises:
        InvalidInputError: not a TIFF of a kind that is copied, or an OME-TIFF.
        OutputError: `out` exists, and not overwrite; or what was written still tells something.
    """
    out = Path(out)
    refuse_present(out, overwrite=overwrite)
    with ExitStack() as stack:
        layout = _layout(slide_path, stack.enter_context(Path(slide_path).open("rb")))
        plain = not any(key.startswith(OME) for key in layout.facts["properties"])
        got = f"{str(slide_path)!r}; `thinsection convert` writes one without other metadata"
        require(plain, "slide must not be an OME-TIFF", got)
        told = list(_told(layout))
        tmp = stack.enter_context(atomic_path(out))
        _write(tmp, layout, str(slide_path), stack)
        if left := identifying(tmp):
            raise OutputError(f"copy must not identify anybody, got {left} in {str(out)!r}")
    return told


def _layout(slide_path: str | Path, handle: Any) -> TiffLayout:
    try:
        return read_layout(str(slide_path), None, handle)
    except SlideOpenError as error:
        what = f"slide {Path(slide_path).name!r} {_ONLY_TIFF}"
        raise InvalidInputError(f"{what}; {error}") from error


def _kept(layout: TiffLayout) -> list[Any]:
    """Pages in the order of the file: levels, and the thumbnail."""
    pages = [*layout.pages]
    if "thumbnail" in layout.associated:
        pages.append(layout.associated["thumbnail"][1])
    return sorted(pages, key=lambda page: int(page.offset))


def _told(layout: TiffLayout) -> Iterable[str]:
    for name in sorted(layout.associated):
        if name != "thumbnail":
            yield f"{name} image"
    for key in layout.facts["properties"]:
        vendor, _, name = key.partition(".")
        if vendor == "aperio" and name not in _APERIO:
            yield f"{name} in Aperio's description"
    seen = set[str]()
    for page in _kept(layout):
        seen |= {f"tag {tag.code} ({tag.name})" for tag in page.tags if tag.code not in _PLAIN}
        if page.description and not page.description.startswith("Aperio"):
            seen.add("ImageDescription: free text")
    yield from sorted(seen)


def _description(page: Any) -> str:
    """What of a page's description is kept: Aperio's first part, and its pairs that are known."""
    text = str(page.description or "")
    if not text.startswith("Aperio"):
        return ""
    first, *pairs = text.split("|")
    return "|".join([first, *(p for p in pairs if p.partition("=")[0].strip() in _APERIO)])


def _write(path: Path, layout: TiffLayout, name: str, stack: ExitStack) -> None:
    source = FileSource(name)
    stack.callback(source.close)
    size = sum(sum(page.databytecounts) for page in _kept(layout))
    with tifffile.TiffWriter(path, bigtiff=size > 2**32 - 2**25) as file:
        for page in _kept(layout):
            # Latin-1, as scanners write it
            text = _description(page).encode("latin-1", "replace") or None
            picture = copied(page, source, name=name)
            picture.write(file, subfiletype=int(page.subfiletype), description=text, metadata=None)
