"""Structure of a TIFF file: its levels and associated images, found among its pages."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tifffile import TiffFile, TiffPage

from thinsection.errors import DamagedTiffError, SlideOpenError, ThinsectionError
from thinsection.slide.formats.tiff_channels import TiffChannels, find_channels
from thinsection.slide.formats.tiff_codecs import colour_note
from thinsection.slide.formats.tiff_metadata import TiffMetadata, read_metadata
from thinsection.slide.formats.tiff_pages import (
    find_unsupported,
    has_fourth_sample,
    is_sound,
    level_of_page,
    orientation_of,
)
from thinsection.slide.look import unpicked_channels_error
from thinsection.slide.orientation import ORIENTATION_TAG, UPRIGHT
from thinsection.types import Level, Mpp

# what OpenSlide treats in a way of its own (overlaps, sparse layouts, restart markers)
_LEFT_TO_OPENSLIDE = {
    "ndpi": "Hamamatsu NDPI",
    "bif": "Ventana BIF",
    "scn": "Leica SCN",
    "philips": "Philips TIFF",
}
_ASPECT_TOLERANCE = 0.02
_ICC_TAG = 34675
_ASSOCIATED_NAMES = ("label", "macro", "thumbnail")


@dataclass(frozen=True, kw_only=True)
class TiffLayout:
    """Structure of a TIFF slide; of tifffile's pages use what needs no open file.

    Attributes:
        levels: finest first.
        pages: pages of the levels.
        associated: by the name of an associated image, its only level and its page.
        metadata: what the file says of the slide.
        icc_profile: the colour profile, if any.
        notes: sentences on what was taken otherwise than the file says it.
        checked: True where no page asks for memory beyond reason, so that a C library may see it.
    """

    levels: list[Level]
    pages: list[TiffPage]
    associated: dict[str, tuple[Level, TiffPage]]
    metadata: TiffMetadata
    icc_profile: bytes | None = None
    notes: tuple[str, ...] = ()
    checked: bool


def read_layout(
    path: str, slide_mpp: Mpp | None, handle: BinaryIO | None = None
) -> TiffLayout:
    """Parses the layout of a local file, or of an opened binary file, which stays open.

    Raises:
        ChannelsError: it is no RGB or gray picture of 8 bits.
        SlideOpenError: not a TIFF, truncated, or left to OpenSlide.
    """
    with _parsed(path, handle) as file:
        chain = _sound_chain(file)
        base = chain[0]
        channels = find_channels(file)
        if channels is not None:
            raise unpicked_channels_error(channels.channels, file.filename)
        # OME-TIFFs of QuPath and bfconvert store their levels as pages below the first
        below = list(base.pages or ())
        pages = [base, *below, *chain[1:]]
        file_bytes = file.filehandle.size
        sound = [
            page for page in pages if is_sound(page, file_bytes, required=page is base)
        ]
        level_pages, associated = _sort_pages(sound, below)
        _refuse_mixed_orientations(base, level_pages)
        return TiffLayout(
            levels=[
                _supported_level(page, index, base)
                for index, page in enumerate(level_pages)
            ],
            pages=level_pages,
            associated={
                name: (_supported_level(page, 0, page), page)
                for name, page in associated.items()
            },
            metadata=read_metadata(file, base, slide_mpp),
            icc_profile=base.tags.valueof(_ICC_TAG),
            notes=tuple(filter(None, [colour_note(base, file.filehandle)])),
            checked=len(sound) == len(pages),
        )


def channel_layout(path: str, slide_mpp: Mpp | None) -> tuple[TiffLayout, TiffChannels]:
    """Parses the levels of a file with channels, and where these lie.

    Raises:
        SlideOpenError: as `read_layout`; or there are no channels to pick.
    """
    with _parsed(path) as file:
        base = _sound_chain(file)[0]
        channels = find_channels(file)
        if channels is None:
            raise SlideOpenError(
                "tiff: an RGB or gray picture of 8 bits has no channels to choose, in "
                f"{path!r}; omit --channels"
            )
        keyframes = [planes[0].page.keyframe for planes in channels.planes]
        file_bytes = file.filehandle.size
        for keyframe, planes in zip(keyframes, channels.planes):
            is_sound(keyframe, file_bytes, required=True)
            for plane in planes:
                counts = plane.page.databytecounts
                is_complete = len(counts) == len(keyframe.databytecounts)
                if not is_complete or max(counts) > file_bytes:
                    raise SlideOpenError(
                        "tiff: planes must have all segments; the file is damaged"
                    )
        layout = TiffLayout(
            levels=[
                level_of_page(keyframe, index, base)
                for index, keyframe in enumerate(keyframes)
            ],
            pages=[],
            associated={},
            metadata=read_metadata(file, base, slide_mpp),
            checked=False,
        )
        return layout, channels


def library_objection(path: str, *, alpha_too: bool = False) -> str:
    """Returns why a C library would show other px than a TIFF describes; '' where it would not.

    OpenSlide leaves px as they are stored, or mirrors them within each tile, and takes any fourth
    sample for alpha. cuCIM, with `alpha_too`, ignores alpha and orientation.
    """
    try:
        with _parsed(path) as file:
            for page in file.pages:
                orientation = orientation_of(page)
                if orientation != UPRIGHT:
                    return f"page {page.index} has orientation {orientation}"
                if has_fourth_sample(page, undeclared_only=not alpha_too):
                    return f"page {page.index} has a fourth sample"
    except SlideOpenError:  # no TIFF, or a damaged one: the library says so itself
        return ""
    return ""


@contextmanager
def _parsed(path: str, handle: BinaryIO | None = None) -> Iterator[TiffFile]:
    """Opens the file by tifffile for the block; SlideOpenError for whatever it raises."""
    name = Path(path.split("?", 1)[0])
    if name.suffix.lower() == ".vsi":
        _refuse_vsi(name)
    try:
        with TiffFile(path if handle is None else handle, name=Path(path).name) as file:
            yield file
    except (ThinsectionError, MemoryError):
        raise
    except Exception as error:  # whatever a parser makes of damage
        raise DamagedTiffError(
            f"tiff: not a readable TIFF: {error or repr(error)}"
        ) from error


def _refuse_vsi(path: Path) -> None:
    folder = f"_{path.stem}_"
    beside = "is" if path.with_name(folder).is_dir() else "is not"
    raise SlideOpenError(
        "tiff: this Olympus VSI contains a preview only; its pixels are in .ets files in "
        f"'{folder}', which {beside} in the same folder; no reader here reads those: convert it to "
        "OME-TIFF (QuPath or bfconvert)"
    )


def _sound_chain(file: TiffFile) -> list[TiffPage]:
    """Returns the chain of pages, whole, the first of them with sound sizes."""
    pages = list(file.pages)
    if not pages:
        raise SlideOpenError("tiff: a TIFF header without pages; the file is truncated")
    # tifffile only logs a broken chain: levels would be missing
    if _next_page_offset(file, pages[-1]) != 0:
        raise SlideOpenError(
            "tiff: the chain of pages continues beyond the end; the file is truncated"
        )
    for flag, name in _LEFT_TO_OPENSLIDE.items():
        if getattr(file, f"is_{flag}"):
            raise SlideOpenError(f"tiff: {name} is left to OpenSlide")
    is_sound(pages[0], file.filehandle.size, required=True)
    return pages


def _next_page_offset(file: TiffFile, page: TiffPage) -> int:
    """Returns where the page after this one begins in the file; 0 after the last."""
    form = file.tiff
    handle = file.filehandle
    handle.seek(page.offset)
    (count,) = struct.unpack(form.tagnoformat, handle.read(form.tagnosize))
    handle.seek(page.offset + form.tagnosize + count * form.tagsize)
    (offset,) = struct.unpack(form.offsetformat, handle.read(form.offsetsize))
    return int(offset)


def _sort_pages(
    pages: Sequence[TiffPage], below: Sequence[TiffPage]
) -> tuple[list[TiffPage], dict[str, TiffPage]]:
    """Returns the pages that are levels, finest first, and others by name.

    The first page is level 0. Where there are pages `below` it, only these may be levels.
    """
    base = pages[0]
    levels = [base]
    associated: dict[str, TiffPage] = {}
    for page in pages[1:]:
        may_be_level = page in below if below else page.is_tiled and base.is_tiled
        if may_be_level and _is_reduced(page, base):
            levels.append(page)
        elif not find_unsupported(page):
            name = f"image{len(associated)}" if associated else "thumbnail"
            associated.setdefault(_own_name(page) or name, page)
    levels.sort(key=lambda page: -int(page.imagewidth))
    return levels, associated


def _own_name(page: TiffPage) -> str:
    """Returns the name of an associated image, where one of its first two lines begins with it."""
    for line in str(page.description).splitlines()[:2]:
        word = line.split(" ", 1)[0].lower()
        if word in _ASSOCIATED_NAMES:
            return word
    return ""


def _is_reduced(page: TiffPage, base: TiffPage) -> bool:
    """Tells whether a page may show what `base` shows, at a smaller size."""
    if page.samplesperpixel != base.samplesperpixel or page.dtype != base.dtype:
        return False
    x_ratio = base.imagewidth / page.imagewidth
    y_ratio = base.imagelength / page.imagelength
    tolerance = _ASPECT_TOLERANCE + 2 / page.imagelength
    return bool(x_ratio > 1 and abs(x_ratio / y_ratio - 1) < tolerance)


def _supported_level(page: TiffPage, index: int, base: TiffPage) -> Level:
    """Returns the level of a page; SlideOpenError where it is of a kind that is left out here."""
    unsupported = find_unsupported(page)
    if unsupported:
        raise SlideOpenError(f"tiff: {unsupported} is not supported")
    return level_of_page(page, index, base)


def _refuse_mixed_orientations(base: TiffPage, levels: Sequence[TiffPage]) -> None:
    """Refuses levels that say that they are turned otherwise than the first page is.

    A level without the tag is turned as the first page: programs that set it set it there alone.
    """
    first = orientation_of(base)
    for page in levels:
        if ORIENTATION_TAG not in page.tags or orientation_of(page) == first:
            continue
        raise SlideOpenError(
            f"tiff: levels must have one orientation (tag {ORIENTATION_TAG}), got {first} and "
            f"{orientation_of(page)}; write the same number into every page"
        )
