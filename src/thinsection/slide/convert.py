"""Any slide as a pyramidal OME-TIFF without label, macro, dates, users and free text.

Segments of another TIFF are copied, never encoded anew; comments and EXIF within them are left out.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import tifffile
from PIL import Image

from thinsection.errors import OutputError, require
from thinsection.files.atomic import atomic_path
from thinsection.files.lock import scratch_folder
from thinsection.files.sources import ByteSource, FileSource
from thinsection.machine import cpu_count
from thinsection.slide.base import Slide
from thinsection.slide.deid.profile import clean_profile
from thinsection.slide.deid.streams import clean_jpeg, clean_page_segment
from thinsection.slide.formats.tiff_layout import (
    JPEG,
    SEPARATE,
    YCBCR,
    alpha_of,
    orientation_of,
    read_layout,
)
from thinsection.slide.geometry import corner_l0
from thinsection.slide.open import open_slide
from thinsection.slide.orientation import ORIENTATION_TAG, UPRIGHT
from thinsection.slide.readers import AUTO, load_slide
from thinsection.types import Level, Mpp, RgbArray, Size

COARSEST_PX = 1024  # longer edge of the smallest level, at most
FORMATS = {"ome-tiff": ".ome.tif"}
_EDGE = 512  # px of the tiles that are encoded here
_COLOUR = {"colorspace": "RGB", "colorsubsampling": "422"}
_SAMPLING = ((1, 1), (2, 1), (2, 2), (4, 1))  # that tifffile writes


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image of a file that is written: its segments in order, how they are to be read."""

    options: Mapping[str, Any]  # of TiffWriter.write
    segments: Callable[[], Iterator[bytes]]

    @property
    def is_grey(self) -> bool:
        """Whether it has one sample a px."""
        return len(self.options["shape"]) == 2

    def write(self, file: tifffile.TiffWriter, **more: Any) -> None:
        """Appends it. Memory: one segment, or `_encoded`'s."""
        file.write(self.segments(), software=False, **{**self.options, **more})


def convert(
    slide_path: str | Path,
    out: str | Path,
    *,
    reader: str = AUTO,
    slide_mpp: Mpp | None = None,
    quality: int = 90,
    overwrite: bool = False,
) -> Path:
    """Writes a slide as OME-TIFF: its levels, the missing ones by halves, its resolution.

    Segments of a TIFF are copied without encoding them anew; comments, EXIF and bytes after their
    ends are left out. Other formats, and levels that are missing until the
    longer edge has `COARSEST_PX`, are encoded as JPEG of the given quality (4:2:2). Label, macro
    and all metadata but the resolution and the numbers of an ICC profile are left out.

    Returns: out.

    Memory: that of the reader, two tiles of 512 px for each CPU, and what the file lists of its
    segments; missing levels take a third of the finest one's bytes as temporary files.

    Raises:
        InvalidInputError: quality, or `out` does not end in '.ome.tif' or '.ome.tiff'.
        OutputError: `out` exists, and not overwrite.
        SlideOpenError: no reader opens the slide.

    Source: OME-TIFF 6.0, pyramids in SubIFDs.
    """
    out = Path(out)
    require(1 <= quality <= 100, "quality must be in [1, 100]", quality)
    ends = out.name.lower().endswith((".ome.tif", ".ome.tiff"))
    require(ends, "out must end in '.ome.tif'", repr(str(out)))
    _refuse_present(out, overwrite=overwrite)
    with ExitStack() as stack:
        slide = stack.enter_context(
            open_slide(slide_path, reader=reader, slide_mpp=slide_mpp)
        )
        if _is_copied(slide):
            slide = slide.stored  # the copy is turned as the file is, and has its tag
        pictures = _levels(slide, quality, stack)
        pictures += _halves(slide, quality, stack, grey=pictures[0].is_grey)
        # tifffile's own UUID would hold the address of this machine's network card
        axes = {
            "axes": "YX" if pictures[0].is_grey else "YXS",
            "UUID": uuid.uuid4().urn,
        }
        mpp = {
            f"PhysicalSize{axis}": um for axis, um in zip("XY", slide.slide_mpp or ())
        }
        about = {**axes, **mpp, **{f"{name}Unit": "\u00b5m" for name in mpp}}
        tmp = stack.enter_context(atomic_path(out))
        with tifffile.TiffWriter(tmp, bigtiff=True, ome=True) as file:
            first, *others = pictures
            first.write(file, subifds=len(others), metadata=about)
            for picture in others:
                picture.write(file, subfiletype=1, metadata=None)
    return out


def _refuse_present(out: Path, *, overwrite: bool) -> None:
    """Nothing is replaced without a word."""
    got = f"{str(out)!r}; pass --overwrite, or another name"
    require(overwrite or not out.exists(), "out must not exist", got, error=OutputError)


def _levels(slide: Slide, quality: int, stack: ExitStack) -> list[Picture]:
    """The slide's own levels, copied where it is a TIFF that we read."""
    if _is_copied(slide):
        handle = stack.enter_context(Path(slide.slide_path).open("rb"))  # noqa: SIM115
        pages = read_layout(slide.slide_path, None, handle).pages
        source = stack.enter_context(closing(FileSource(slide.slide_path)))
        return [copied(page, source) for page in pages]
    return [
        _encoded(lv.size, partial(_read, slide, lv, 1), quality=quality)
        for lv in slide.levels
    ]


def _is_copied(slide: Slide) -> bool:
    """Whether the segments of a slide are written as they are.

    Those with alpha are not: levels that are made below them have three samples, and readers take
    levels of one kind only.
    """
    if slide.reader != "tiff" or slide.source is not None:
        return False
    pages = read_layout(slide.slide_path, None).pages
    return all(
        page.planarconfig != SEPARATE and alpha_of(page) is None for page in pages
    )


def _read(slide: Slide, level: Level, times: int, corner: tuple[int, int]) -> RgbArray:
    """A tile of a level whose size is divided by `times`."""
    origin, edge = corner_l0(level, *(times * px for px in corner)), times * _EDGE
    region = slide.read_region(origin, level.index, (edge, edge))
    return region if times == 1 else np.asarray(Image.fromarray(region).reduce(times))


def _halves(
    slide: Slide, quality: int, stack: ExitStack, *, grey: bool
) -> Iterator[Picture]:
    """Levels below the slide's last one, each made from the one above and kept in a file."""
    if max(slide.levels[-1].size) <= COARSEST_PX:
        return
    folder = stack.enter_context(scratch_folder("convert"))
    above = slide
    while max(size := (level := above.levels[-1]).size) > COARSEST_PX:
        half: Size = (max(1, size[0] // 2), max(1, size[1] // 2))
        path = folder / f"{half[0]}.tif"
        picture = _encoded(
            half,
            partial(_read, above, level, 2),
            quality=quality,
            grey=grey,
            orientation=slide.orientation,
        )
        with tifffile.TiffWriter(path, bigtiff=True) as file:
            picture.write(file, metadata=None)
        above = stack.enter_context(load_slide("tiff", str(path)))
        yield from _levels(above, quality, stack)


def copied(page: Any, source: ByteSource) -> Picture:
    """A page whose colours stand together, byte by byte; InvalidInputError: it cannot be said."""
    samples, strip = (
        page.samplesperpixel,
        min(page.rowsperstrip or 2**31, page.imagelength),
    )
    options: dict[str, Any] = {
        "shape": (page.imagelength, page.imagewidth, samples)[: 2 + (samples > 1)],
        "dtype": page.dtype,
        "photometric": int(page.photometric),
        "extrasamples": page.extrasamples or None,
        "compression": int(page.compression),
        "predictor": int(page.predictor) if page.predictor > 1 else None,
        "jpegtables": clean_jpeg(page.jpegtables).data if page.jpegtables else None,
        "iccprofile": _clean_icc(page.iccprofile),
        "resolution": page.resolution,
        "resolutionunit": int(page.resolutionunit),
    }
    options["extratags"] = _orientation_tags(orientation_of(page))
    tiled = {"tile": (page.tilelength, page.tilewidth)}
    options |= tiled if page.is_tiled else {"rowsperstrip": strip}
    if int(page.compression) in JPEG and samples == 3:
        sampling = page.subsampling if int(page.photometric) == YCBCR else (1, 1)
        known = sampling is None or tuple(sampling) in _SAMPLING
        require(known, f"chroma sampling must be one of {_SAMPLING}", sampling)
        options["subsampling"] = sampling
        options["compressionargs"] = {"outcolorspace": int(page.photometric)}
    places = list(zip(page.dataoffsets, page.databytecounts))

    def segments() -> Iterator[bytes]:
        for index, (offset, count) in enumerate(places):
            data = source.read_at(offset, count) if count else b""
            yield clean_page_segment(page, index, data).data

    has_px = any(count for _, count in places)
    require(has_px, "an image must have px", f"an empty one in {source.name!r}")
    return Picture(options=options, segments=segments)


def _clean_icc(profile: bytes | None) -> bytes | None:
    """A colour profile without its texts; None where there is none, or it is damaged."""
    cleaned = clean_profile(profile) if profile else None
    return cleaned.data if cleaned else None


def _orientation_tags(orientation: int) -> list[tuple[int, str, int, int, bool]]:
    """TiffWriter's `extratags` for a picture that is stored so; none where it is upright."""
    if orientation == UPRIGHT:
        return []
    return [(ORIENTATION_TAG, "H", 1, orientation, True)]


def _encoded(
    size: Size,
    read: Callable[[tuple[int, int]], RgbArray],
    *,
    quality: int,
    grey: bool = False,
    orientation: int = UPRIGHT,
) -> Picture:
    """Tiles are read (x, y in px), encoded as JPEG. Memory: one per CPU, and what `read` takes."""

    def tile(place: tuple[int, int]) -> bytes:
        pixels = np.ascontiguousarray(
            read((place[1], place[0]))[..., : 1 if grey else 3]
        )
        kind = {"colorspace": "GRAY", "colorsubsampling": "Gray"} if grey else _COLOUR
        return bytes(simplejpeg.encode_jpeg(pixels, quality=quality, **kind))

    def segments() -> Iterator[bytes]:
        workers = cpu_count()
        places = product(range(0, size[1], _EDGE), range(0, size[0], _EDGE))
        with ThreadPoolExecutor(workers) as pool:
            while together := list(islice(places, 2 * workers)):
                yield from pool.map(tile, together)

    options = {
        "shape": size[::-1] if grey else (*size[::-1], 3),
        "dtype": np.uint8,
        "photometric": "minisblack" if grey else "rgb",
        "compression": "jpeg",
        "subsampling": None if grey else (2, 1),
        "tile": (_EDGE, _EDGE),
        "extratags": _orientation_tags(orientation),
    }
    return Picture(options=options, segments=segments)
