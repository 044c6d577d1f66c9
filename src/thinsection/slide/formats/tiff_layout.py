"""Structure of a TIFF file: its levels and associated images, found among its pages."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tifffile import TiffFile, TiffPage

from thinsection.errors import (
    DamagedTiffError,
    ImageError,
    ProvedDamageError,
    SlideOpenError,
    ThinsectionError,
)
from thinsection.slide.base import GRAY
from thinsection.slide.formats.channels import LevelPlanes, find_channels
from thinsection.slide.formats.tiff_decoder import colour_note
from thinsection.slide.formats.tiff_inventory import (
    ROUNDED_PX,
    TiffPicture,
    find_pictures,
    padded_downsample,
    page_size,
    stated_downsample,
)
from thinsection.slide.formats.tiff_pages import (
    OmeImage,
    TiffMetadata,
    empty_segments_note,
    find_unsupported,
    has_unexplained_sample,
    is_sound,
    level_of_page,
    orientation_of,
    read_metadata,
)
from thinsection.slide.level_check import BY_SIZE, LevelCandidate, Verdicts
from thinsection.slide.look import Channels, unpicked_channels_error
from thinsection.slide.orientation import ORIENTATION_TAG, UPRIGHT
from thinsection.slide.pictures import (
    SLIDES,
    Picture,
    choose_picture,
    picture_notes,
)
from thinsection.slide.readers import LEFT_TO_TIFF
from thinsection.types import Level, Mpp

# what OpenSlide treats in a way of its own (overlaps, sparse layouts, restart markers)
_LEFT_TO_OPENSLIDE = {
    "ndpi": "Hamamatsu NDPI",
    "bif": "Ventana BIF",
    "scn": "Leica SCN",
    "philips": "Philips TIFF",
}
_ICC_TAG = 34675


@dataclass(frozen=True, kw_only=True)
class TiffLayout:
    """Structure of a TIFF slide. Its file may be closed: use only data that tifffile has read.

    Attributes:
        levels: levels, finest first, without the padding that their pages may have.
        pages: pages of the levels.
        possible: pages that may be levels too; the comparison of their pixels decides.
        ome: OME-XML metadata of the slide.
        associated: name of an associated image -> its only level and its page.
        metadata: metadata of the slide.
        pictures: inventory of the file.
        picture: the picture of the inventory that is shown.
        notes: sentences on the choice, on the levels, and on data that were interpreted otherwise
            than the file states.
        icc_profile: the colour profile, if any.
        checked: True if no page needs an unreasonable amount of memory, so that a C library may
            read the file.
    """

    levels: list[Level]
    pages: list[TiffPage]
    possible: list[TiffPage]
    ome: OmeImage | None
    associated: dict[str, tuple[Level, TiffPage]]
    metadata: TiffMetadata
    pictures: tuple[Picture, ...]
    picture: Picture
    notes: tuple[str, ...]
    icc_profile: bytes | None = None
    checked: bool

    def with_candidates(self, candidates: Sequence[LevelCandidate]) -> TiffLayout:
        """Returns a layout of level 0 and the candidates."""
        base = self.pages[0]
        pages = {page.offset: page for page in (*self.pages, *self.possible)}
        return replace(
            self,
            levels=[
                level_of_page(base, 0, base),
                *(candidate.level for candidate in candidates),
            ],
            pages=[base, *(pages[candidate.key[1]] for candidate in candidates)],
        )


def unchecked_levels(
    pages: Sequence[TiffPage], verdicts: Verdicts
) -> list[LevelCandidate]:
    """Returns the pages that may be levels and have no verdict yet.

    Args:
        pages: pages of a picture; the page of level 0 is the first.
        verdicts: verdicts on levels so far.
    """
    base = pages[0]
    candidates: list[LevelCandidate] = []
    for page in pages[1:]:
        key = (base.offset, page.offset)
        if key in verdicts:
            continue
        level = level_of_page(page, len(candidates) + 1, base)
        stated = padded_downsample(page, base)
        downsample_by_size = None
        if stated is not None:
            downsample_by_size = level.downsample
            level = replace(level, downsample=stated)
        candidates.append(
            LevelCandidate(key=key, level=level, downsample_by_size=downsample_by_size)
        )
    return candidates


def read_layout(
    path: str,
    slide_mpp: Mpp | None,
    handle: BinaryIO | None = None,
    *,
    image: str | None = None,
    verdicts: Verdicts | None = None,
) -> TiffLayout:
    """Parses the layout of a local file, or of an opened binary file, which stays open.

    Args:
        path: the file, or the name of the opened file.
        slide_mpp: (x, y) µm per level-0 px, in place of the resolution that the file states.
        handle: the opened file.
        image: name or number of the picture that is the slide.
        verdicts: results of the comparison of pixels; see `tiff_inventory`.

    Raises:
        ChannelsError: the slide is no RGB or gray picture of 8 bits.
        ImageError: the file has no such picture, or no picture that could be a slide.
        SlideOpenError: the file is no TIFF, is truncated, or only OpenSlide reads it.
    """
    with _parsed(path, handle) as file:
        layout = _read_pictures(file, slide_mpp, image, verdicts or {})
        base = layout.pages[0]
        channels = find_channels(file, base, layout.ome)
        if channels is not None:
            raise unpicked_channels_error(channels[0], file.filename)
        first = orientation_of(base)
        for page in layout.pages:
            # a level without the tag is as level 0: programs that set it set it there alone
            if ORIENTATION_TAG in page.tags and orientation_of(page) != first:
                raise SlideOpenError(
                    f"tiff: levels must have one orientation (tag {ORIENTATION_TAG}), got {first} "
                    f"and {orientation_of(page)}; write the same number into every page"
                )
        for page in layout.pages:
            unsupported = find_unsupported(page)
            if unsupported:
                raise SlideOpenError(f"tiff: {unsupported} is not supported")
        notes = [*layout.notes, colour_note(base, file.filehandle)]
        if base.dtype == np.dtype(np.int8):
            notes.append(
                "its samples are called signed, and are shown as 0 to 255 like those of other "
                "files, as OpenSlide shows them"
            )
        notes.append(empty_segments_note(layout.pages))
        if any(page.samplesperpixel == 1 for page in layout.pages):
            notes.append(GRAY)
        return replace(
            layout,
            notes=tuple(filter(None, notes)),
            icc_profile=base.tags.valueof(_ICC_TAG),
        )


def channel_layout(
    path: str, slide_mpp: Mpp | None, image: str | None = None
) -> tuple[TiffLayout, Channels, list[LevelPlanes]]:
    """Parses the levels of a file with channels, and the planes of the channels on each level.

    Raises:
        SlideOpenError: as `read_layout`; or there are no channels to pick.
    """
    with _parsed(path) as file:
        layout = _read_pictures(file, slide_mpp, image, {})
        base = layout.pages[0]
        found = find_channels(file, base, layout.ome)
        if found is None:
            raise SlideOpenError(
                "tiff: an RGB or gray picture of 8 bits has no channels to choose, in "
                f"{path!r}; leave out channels=..."
            )
        channels, planes_by_level = found
        keyframes = [planes[0].page.keyframe for planes in planes_by_level]
        file_bytes = file.filehandle.size
        for keyframe, planes in zip(keyframes, planes_by_level):
            is_sound(keyframe, file_bytes, required=True)
            for plane in planes:
                counts = plane.page.databytecounts
                is_complete = len(counts) == len(keyframe.databytecounts)
                if not is_complete or max(counts) > file_bytes:
                    raise SlideOpenError(
                        "tiff: planes must have all segments; the file is damaged"
                    )
        levels = [
            level_of_page(keyframe, index, base)
            for index, keyframe in enumerate(keyframes)
        ]
        notes = picture_notes(layout.pictures, layout.picture, image)
        layout = replace(
            layout,
            levels=levels,
            pages=[],
            associated={},
            notes=notes,
            checked=False,
        )
        return layout, channels, planes_by_level


def library_layout(
    path: str, *, image: str | None = None, verdicts: Verdicts
) -> TiffLayout | None:
    """Returns what OpenSlide may show of a TIFF; None where the file is left to the library.

    OpenSlide leaves px as they are stored, or mirrors them within each tile, and takes any fourth
    sample for alpha. It takes the first picture of a size.

    Raises:
        ImageError: the file has no such picture, or no picture that could be a slide.
        SlideOpenError: OpenSlide would show other px than the file describes.
    """
    layout = None
    objection = ""
    try:
        with _parsed(path) as file:
            for page in file.pages:
                orientation = orientation_of(page)
                if orientation != UPRIGHT:
                    objection = f"page {page.index} has orientation {orientation}"
                elif has_unexplained_sample(page):
                    objection = f"page {page.index} has a fourth sample"
                if objection:
                    break
            else:
                layout = _read_pictures(file, None, image, verdicts)
                base = layout.pages[0]
                for page in file.pages:
                    is_rival = page.index < base.index and page.is_tiled
                    if is_rival and page_size(page) == page_size(base):
                        objection = f"image {layout.picture.number} is not the first"
    except ImageError:
        raise
    except SlideOpenError:  # no TIFF, a damaged one, or one that is left to the library
        return None
    if objection:
        raise SlideOpenError(f"{LEFT_TO_TIFF}: {objection}")
    return layout


def _read_pictures(
    file: TiffFile, slide_mpp: Mpp | None, image: str | None, verdicts: Verdicts
) -> TiffLayout:
    """Makes the inventory of a file, and chooses its slide."""
    chain = _sound_chain(file)
    file_bytes = file.filehandle.size
    below = [page for parent in chain for page in parent.pages or ()]
    sound = set()
    for page in (*chain, *below):
        if is_sound(page, file_bytes, required=page is chain[0]):
            sound.add(page.offset)
    found = find_pictures(file, chain, sound, verdicts)
    pictures = tuple(
        picture.described(number) for number, picture in enumerate(found, start=1)
    )
    picture = choose_picture(pictures, image, slide_path=file.filename)
    shown = found[picture.number - 1]
    # the other pictures that can be read whole, by their role or number
    associated: dict[str, tuple[Level, TiffPage]] = {}
    for number, other in enumerate(found, start=1):
        page = other.base
        if other is shown or other.role in SLIDES or find_unsupported(page):
            continue
        name = f"image{number}" if other.role == "other" else other.role
        associated.setdefault(name, (level_of_page(page, 0, page), page))
    levels = _place_levels(shown, verdicts)
    padded = [
        str(level.index)
        for page, level in zip(shown.pages, levels)
        if page_size(page) != level.size
    ]
    notes = picture_notes(pictures, picture, image)
    if padded:
        levels_end = f"level {padded[0]} ends"
        if len(padded) > 1:
            levels_end = f"levels {', '.join(padded)} end"
        notes = (
            *notes,
            f"{levels_end} before the edge of the page, by the resolution that the page states: "
            "the padding is left out",
        )
    return TiffLayout(
        levels=levels,
        pages=shown.pages,
        possible=shown.possible,
        ome=shown.ome,
        associated=associated,
        metadata=read_metadata(shown.base, shown.ome, slide_mpp),
        pictures=pictures,
        picture=picture,
        notes=notes,
        checked=len(sound) == len(chain) + len(below),
    )


def _place_levels(shown: TiffPicture, verdicts: Verdicts) -> list[Level]:
    """Returns the levels of a picture at the downsample that counts, and without padding.

    The downsample of a level is the ratio of sizes if it agrees with the stated downsample within
    1.5 px of the level. Otherwise it is the stated downsample: then the level or level 0 is padded,
    and the slide ends at the end of the shorter one.
    """
    base = shown.base
    whole = page_size(base)
    content = [float(px) for px in whole]
    downsamples = []
    for page in shown.pages:
        size = page_size(page)
        downsample = (whole[0] / size[0] + whole[1] / size[1]) / 2
        stated = None
        if verdicts.get((base.offset, page.offset)) != BY_SIZE:
            stated = stated_downsample(page, base)
            padded = padded_downsample(page, base)
            if padded is not None:
                downsample = padded
                for side in (0, 1):
                    # a level may end a px early, because sizes are rounded down
                    end = size[side] * padded
                    if end + ROUNDED_PX * padded < whole[side]:
                        content[side] = min(content[side], end)
        downsample = max(1.0, downsample)
        downsamples.append((downsample, downsample == stated))
    is_cut = content != [*whole]
    levels = []
    for index, page in enumerate(shown.pages):
        downsample, is_stated = downsamples[index]
        size = page_size(page)
        if is_stated or is_cut:
            size = (
                min(size[0], max(1, math.ceil(content[0] / downsample))),
                min(size[1], max(1, math.ceil(content[1] / downsample))),
            )
        level = level_of_page(page, index, base)
        levels.append(replace(level, size=size, downsample=downsample))
    return levels


@contextmanager
def _parsed(path: str, handle: BinaryIO | None = None) -> Iterator[TiffFile]:
    """Opens the file by tifffile for the block; turns all of its errors into SlideOpenError."""
    name = Path(path.split("?", 1)[0])
    if name.suffix.lower() == ".vsi":
        folder = f"_{name.stem}_"
        beside = "is" if name.with_name(folder).is_dir() else "is not"
        raise SlideOpenError(
            "tiff: this Olympus VSI contains a preview only; its pixels are in .ets files in "
            f"'{folder}', which {beside} in the same folder; no reader here reads those: convert "
            "it to OME-TIFF (QuPath or bfconvert)"
        )
    if handle is not None:
        handle.seek(0)
    try:
        with TiffFile(path if handle is None else handle, name=Path(path).name) as file:
            yield file
    except (ThinsectionError, MemoryError):
        raise
    except Exception as error:  # damage can raise any error in a parser
        raise DamagedTiffError(
            f"tiff: not a readable TIFF: {error or repr(error)}"
        ) from error


def _sound_chain(file: TiffFile) -> list[TiffPage]:
    """Returns the chain of pages, whole, the first of them with sound sizes."""
    pages = list(file.pages)
    if not pages:
        raise SlideOpenError("tiff: a TIFF header without pages; the file is truncated")
    for flag, name in _LEFT_TO_OPENSLIDE.items():
        if getattr(file, f"is_{flag}"):
            raise SlideOpenError(f"tiff: {name} is left to OpenSlide")
    # tifffile only logs a broken chain: levels would be missing
    place = file.pages.next_page_offset
    assert place is not None
    handle = file.filehandle
    handle.seek(place)
    (following,) = struct.unpack(
        file.tiff.offsetformat, handle.read(file.tiff.offsetsize)
    )
    places = [page.offset for page in pages]
    if following in places:
        raise ProvedDamageError(
            f"tiff: the chain of pages is a loop, from page {len(pages) - 1} to page "
            f"{places.index(following)}; the file is damaged; copy it again"
        )
    if following >= file.filehandle.size:
        raise ProvedDamageError(
            "tiff: the chain of pages continues beyond the end; the file is truncated; copy it "
            "again"
        )
    if following != 0:
        raise SlideOpenError("tiff: the chain of pages is broken; the file is damaged")
    is_sound(pages[0], file.filehandle.size, required=True)
    return pages
