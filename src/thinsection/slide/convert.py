"""Any slide as a pyramidal OME-TIFF without label, macro, dates, users and free text.

Segments of another TIFF are copied, never encoded anew; comments and EXIF within them are left out.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import simplejpeg
import tifffile
from PIL import Image
from tifffile import TiffPage

from thinsection.errors import InvalidInputError, OutputError
from thinsection.files.atomic import atomic_path
from thinsection.files.lock import scratch_folder
from thinsection.files.sources import ByteSource, FileSource
from thinsection.machine import cpu_count
from thinsection.slide.base import Slide
from thinsection.slide.clean_profile import clean_profile
from thinsection.slide.clean_streams import clean_jpeg, clean_page_segment
from thinsection.slide.formats.tiff_inventory import page_size
from thinsection.slide.formats.tiff_layout import read_layout
from thinsection.slide.formats.tiff_pages import (
    JPEG,
    SEPARATE,
    YCBCR,
    alpha_of,
    orientation_of,
)
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.geometry import corner_l0
from thinsection.slide.open import open_slide
from thinsection.slide.orientation import ORIENTATION_TAG, UPRIGHT
from thinsection.slide.pictures import picture_notes
from thinsection.slide.readers import AUTO, load_slide
from thinsection.types import Level, Mpp, RgbArray, Size, ignore_message

COARSEST_PX = 1024  # longer edge of the smallest level, at most
FORMATS = {"ome-tiff": ".ome.tif"}
SEGMENT_PX = 512  # px of the tiles that are encoded here
_SAMPLING = ((1, 1), (2, 1), (2, 2), (4, 1))  # chroma subsamplings that tifffile writes
_UM_PER_CM = 10_000.0
_MOST_ROWS = 2**31  # largest number of rows of a strip
_ExtraTag = tuple[int, str, int, int, bool]  # additional tag, as TiffWriter takes it


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image of a file that is written.

    Attributes:
        segments: returns the bytes of each segment, in order.
        is_grey: True if the image has one sample per px.
        write: `TiffWriter.write` with its arguments about the segments. Memory: one segment, or
            that of `encoded_picture`.
    """

    segments: Callable[[], Iterator[bytes]]
    is_grey: bool
    write: Callable[..., object]


def convert(
    slide_path: str | Path,
    out: str | Path,
    *,
    reader: str = AUTO,
    slide_mpp: Mpp | float | None = None,
    image: str | int | None = None,
    quality: int = 90,
    overwrite: bool = False,
    on_message: Callable[[str], None] = ignore_message,
) -> Path:
    """Writes a slide as OME-TIFF: its levels, the missing ones by halves, its resolution.

    Segments of a TIFF are copied without encoding them anew; comments, EXIF and bytes after their
    ends are left out. Other formats, and levels that are missing until the
    longer edge has `COARSEST_PX`, are encoded as JPEG of the given quality (4:2:2). Label, macro
    and all metadata but the resolution and the numbers of an ICC profile are left out.

    Args:
        slide_path: the slide, or its URL.
        out: the file to write, '*.ome.tif'.
        reader: 'auto', or a name of `available_readers()`.
        slide_mpp: µm per level-0 px, one number or (x, y), in place of what the file states.
        image: name or number of the picture of the file to convert; None takes the slide.
        quality: JPEG quality of encoded levels, 1 to 100.
        overwrite: True replaces an existing file.
        on_message: takes a line if the file has other pictures, which are not converted.

    Returns: out.

    Memory: that of the reader, two tiles of 512 px for each CPU, and the file's list of segments.
    Missing levels take temporary files with a third of the bytes of the finest level.

    Raises:
        ImageError: the file has no such picture, or none that could be a slide.
        InvalidInputError: quality, or `out` does not end in '.ome.tif' or '.ome.tiff'.
        OutputError: `out` is the slide; or it exists, and `overwrite` is False.
        SlideOpenError: no reader opens the slide.

    Source: OME-TIFF 6.0, pyramids in SubIFDs.
    """
    out = Path(out)
    if not 1 <= quality <= 100:
        raise InvalidInputError(f"quality must be in [1, 100], got {quality}")
    if not out.name.lower().endswith((".ome.tif", ".ome.tiff")):
        raise InvalidInputError(f"out must end in '.ome.tif', got {str(out)!r}")
    if out.exists() and Path(slide_path).exists() and out.samefile(slide_path):
        raise OutputError(
            f"out must not be the slide itself, got {str(out)!r}; choose another folder or name"
        )
    if out.exists() and not overwrite:
        raise OutputError(
            f"out must not exist, got {str(out)!r}; pass overwrite=True, or another name"
        )
    with ExitStack() as stack:
        slide = open_slide(slide_path, reader=reader, slide_mpp=slide_mpp, image=image)
        stack.enter_context(slide)
        if slide.picture is not None:
            for note in picture_notes(slide.pictures, slide.picture, image):
                on_message(note)
        if _is_copied(slide):
            slide = slide.stored  # the copy is turned as the file is, and has its tag
        pictures = _level_pictures(slide, quality, stack, image)
        pictures += _halves(slide, quality, stack, grey=pictures[0].is_grey)
        write_ome_tiff(out, pictures, slide.slide_mpp)
    return out


def write_ome_tiff(
    out: Path, levels: Sequence[Picture], mpp: Mpp | None, *, tags: bool = False
) -> None:
    """Writes the levels of a pyramid, finest first, as an OME-TIFF, atomically.

    Args:
        out: the file.
        levels: their pictures; the lower ones become SubIFDs.
        mpp: (x, y) µm/px of the finest level; None if it is not known.
        tags: True writes the resolution as tags of TIFF too, which OpenSlide reads.

    Memory: that of one picture's segments.

    Source: OME-TIFF 6.0, pyramids in SubIFDs.
    """
    first, *others = levels
    # tifffile writes it as OME-XML; its own UUID would hold this network card's address
    metadata: dict[str, str | float] = {
        "axes": "YX" if first.is_grey else "YXS",
        "UUID": uuid.uuid4().urn,
    }
    if mpp is not None:
        metadata["PhysicalSizeX"] = mpp[0]
        metadata["PhysicalSizeY"] = mpp[1]
        metadata["PhysicalSizeXUnit"] = "\u00b5m"
        metadata["PhysicalSizeYUnit"] = "\u00b5m"
    with (
        atomic_path(out) as unfinished,
        tifffile.TiffWriter(unfinished, bigtiff=True, ome=True) as file,
    ):
        more: dict[str, object] = {}
        if tags and mpp is not None:
            more["resolution"] = tuple(_UM_PER_CM / value for value in mpp)
            more["resolutionunit"] = "CENTIMETER"
        first.write(
            file, first.segments(), metadata=metadata, subifds=len(others), **more
        )
        for picture in others:
            picture.write(file, picture.segments(), subfiletype=1)


def _level_pictures(
    slide: Slide, quality: int, stack: ExitStack, image: str | int | None = None
) -> list[Picture]:
    """Returns the stored levels of a slide; those of a TIFF that we read are copied."""
    if isinstance(slide, TiffSlide) and _is_copied(slide):
        handle = stack.enter_context(Path(slide.slide_path).open("rb"))  # noqa: SIM115
        source = stack.enter_context(closing(FileSource(slide.slide_path)))
        # the pages in the slide have no open file any more
        chosen = None if image is None else str(image)
        layout = read_layout(slide.slide_path, None, handle, image=chosen)
        pages = {page.offset: page for page in (*layout.pages, *layout.possible)}
        return [
            copied_picture(pages[page.offset], source) for page in slide.layout.pages
        ]
    return [
        encoded_picture(
            level.size, partial(_read_tile, slide, level, 1), quality=quality
        )
        for level in slide.levels
    ]


def _is_copied(slide: Slide) -> bool:
    """Tells whether the segments of a slide are written as they are.

    Segments with alpha are not: new lower levels have three samples, and readers need the same
    number of samples in all levels. Segments with padding are not, because the padding would become
    part of the picture.
    """
    stored = slide.stored
    if not isinstance(stored, TiffSlide) or stored.source is not None:
        return False
    if stored.reader != "tiff":
        return False
    layout = stored.layout
    return all(
        page.planarconfig != SEPARATE
        and alpha_of(page) is None
        and page_size(page) == level.size
        for page, level in zip(layout.pages, layout.levels)
    )


def _read_tile(
    slide: Slide, level: Level, factor: int, corner: tuple[int, int]
) -> RgbArray:
    """Reads a tile of a level whose size is divided by `factor`; corner (x, y) in its px."""
    x, y = corner
    origin_l0 = corner_l0(level, factor * x, factor * y)
    edge = factor * SEGMENT_PX
    region = slide.read_region(origin_l0, level.index, (edge, edge))
    if factor == 1:
        return region
    return np.asarray(Image.fromarray(region).reduce(factor))


def _halves(
    slide: Slide, quality: int, stack: ExitStack, *, grey: bool
) -> Iterator[Picture]:
    """Yields new levels below the slide's last level, each made from the level above it.

    Each new level is in a temporary file, which `stack` closes and deletes.
    """
    if max(slide.levels[-1].size) <= COARSEST_PX:
        return
    folder = stack.enter_context(scratch_folder("convert"))
    above = slide
    while max(above.levels[-1].size) > COARSEST_PX:
        level = above.levels[-1]
        half = (max(1, level.size[0] // 2), max(1, level.size[1] // 2))
        path = folder / f"{half[0]}.tif"
        picture = encoded_picture(
            half,
            partial(_read_tile, above, level, 2),
            quality=quality,
            grey=grey,
            orientation=slide.orientation,
        )
        with tifffile.TiffWriter(path, bigtiff=True) as file:
            picture.write(file, picture.segments())
        above = stack.enter_context(load_slide("tiff", str(path)))
        yield from _level_pictures(above, quality, stack)


def copied_picture(page: TiffPage, source: ByteSource) -> Picture:
    """Returns the picture of a page with interleaved colours, to be copied byte by byte.

    Raises:
        InvalidInputError: the page has no px, or tifffile cannot write pages of this kind.
    """
    samples = page.samplesperpixel
    shape: tuple[int, ...] = (page.imagelength, page.imagewidth)
    if samples > 1:
        shape = (*shape, samples)
    tile = None
    rowsperstrip = None
    if page.is_tiled:
        tile = (page.tilelength, page.tilewidth)
    else:
        rowsperstrip = min(page.rowsperstrip or _MOST_ROWS, page.imagelength)
    subsampling = None
    compressionargs = None
    if int(page.compression) in JPEG and samples == 3:
        is_ycbcr = int(page.photometric) == YCBCR
        subsampling = page.subsampling if is_ycbcr else (1, 1)
        if subsampling is not None and tuple(subsampling) not in _SAMPLING:
            raise InvalidInputError(
                f"chroma sampling must be one of {_SAMPLING}, got {subsampling}"
            )
        compressionargs = {"outcolorspace": int(page.photometric)}
    if not any(page.databytecounts):
        raise InvalidInputError(
            f"an image must have pixels, got an empty one in {source.name!r}"
        )
    profile = clean_profile(page.iccprofile) if page.iccprofile else None
    return Picture(
        segments=partial(_clean_segments, page, source),
        is_grey=samples == 1,
        write=partial(
            tifffile.TiffWriter.write,
            software=False,
            metadata=None,
            shape=shape,
            dtype=page.dtype,
            photometric=int(page.photometric),
            compression=int(page.compression),
            tile=tile,
            rowsperstrip=rowsperstrip,
            predictor=int(page.predictor) if page.predictor > 1 else None,
            extrasamples=page.extrasamples or None,
            subsampling=subsampling,
            compressionargs=compressionargs,
            jpegtables=clean_jpeg(page.jpegtables).data if page.jpegtables else None,
            iccprofile=profile.data if profile else None,
            resolution=page.resolution,
            resolutionunit=int(page.resolutionunit),
            extratags=_orientation_tags(orientation_of(page)),
        ),
    )


def _clean_segments(page: TiffPage, source: ByteSource) -> Iterator[bytes]:
    """Yields the segments of a page without comments and EXIF; b'' for an empty one."""
    for index, offset in enumerate(page.dataoffsets):
        num_bytes = page.databytecounts[index]
        data = source.read_at(offset, num_bytes) if num_bytes else b""
        yield clean_page_segment(page, index, data).data


def _orientation_tags(orientation: int) -> tuple[_ExtraTag, ...]:
    """Returns the tags for a picture that is stored with this orientation; () if it is upright."""
    if orientation == UPRIGHT:
        return ()
    return ((ORIENTATION_TAG, "H", 1, orientation, True),)


def encoded_picture(
    size: Size,
    read: Callable[[tuple[int, int]], RgbArray],
    *,
    quality: int,
    grey: bool = False,
    orientation: int = UPRIGHT,
) -> Picture:
    """Returns a picture that is encoded as JPEG; `read` returns the tile at (x, y) in px.

    Memory: one tile per CPU, and that of `read`.
    """
    width, height = size
    return Picture(
        segments=partial(_encode_tiles, size, read, quality=quality, grey=grey),
        is_grey=grey,
        write=partial(
            tifffile.TiffWriter.write,
            software=False,
            metadata=None,
            shape=(height, width) if grey else (height, width, 3),
            dtype=np.dtype(np.uint8),
            photometric="minisblack" if grey else "rgb",
            compression="jpeg",
            tile=(SEGMENT_PX, SEGMENT_PX),
            subsampling=None if grey else (2, 1),
            extratags=_orientation_tags(orientation),
        ),
    )


def _encode_tiles(
    size: Size,
    read: Callable[[tuple[int, int]], RgbArray],
    *,
    quality: int,
    grey: bool,
) -> Iterator[bytes]:
    """Yields the JPEGs of a grid of tiles, row by row, encoded by a thread for each CPU."""
    colorspace = "GRAY" if grey else "RGB"
    subsampling = "Gray" if grey else "422"
    samples = 1 if grey else 3

    def encode(place: tuple[int, int]) -> bytes:
        y, x = place
        pixels = np.ascontiguousarray(read((x, y))[..., :samples])
        jpeg = simplejpeg.encode_jpeg(
            pixels, quality=quality, colorspace=colorspace, colorsubsampling=subsampling
        )
        return bytes(jpeg)

    width, height = size
    places = product(range(0, height, SEGMENT_PX), range(0, width, SEGMENT_PX))
    workers = cpu_count()
    with ThreadPoolExecutor(workers) as pool:
        while True:
            group = list(islice(places, 2 * workers))
            if not group:
                return
            yield from pool.map(encode, group)
