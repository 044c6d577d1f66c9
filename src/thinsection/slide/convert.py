"""TIFFs written anew: any slide as a pyramidal OME-TIFF, and slides without what names a patient.

Segments of another TIFF are copied as they are, never decoded. Left out of a copy are label, macro,
dates, users and free text.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from thinsection.errors import InvalidInputError, OutputError, SlideOpenError, require
from thinsection.files.atomic import atomic_path
from thinsection.files.lock import scratch_folder
from thinsection.files.sources import ByteSource, FileSource
from thinsection.machine import cpu_count
from thinsection.slide.base import Slide
from thinsection.slide.geometry import corner_l0
from thinsection.slide.open import open_slide
from thinsection.slide.readers import AUTO, load_slide
from thinsection.slide.tiff_layout import JPEG, OME, SEPARATE, YCBCR, TiffLayout, read_layout
from thinsection.types import Level, Mpp, RgbArray, Size

COARSEST_PX = 1024  # longer edge of the smallest level, at most
FORMATS = {"ome-tiff": ".ome.tif"}
_EDGE = 512  # px of the tiles that are encoded here
_COLOUR = {"colorspace": "RGB", "colorsubsampling": "422"}
_SAMPLING = ((1, 1), (2, 1), (2, 2), (4, 1))  # that tifffile writes
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

    Segments of a TIFF are copied as they are. Other formats, and levels that are missing until the
    longer edge has `COARSEST_PX`, are encoded as JPEG of the given quality (4:2:2). Label, macro
    and all metadata but the resolution and an ICC profile are left out.

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
        slide = stack.enter_context(open_slide(slide_path, reader=reader, slide_mpp=slide_mpp))
        pictures = _levels(slide, quality, stack)
        pictures += _halves(slide, quality, stack, grey=pictures[0].is_grey)
        # tifffile's own UUID would hold the address of this machine's network card
        axes = {"axes": "YX" if pictures[0].is_grey else "YXS", "UUID": uuid.uuid4().urn}
        mpp = {f"PhysicalSize{axis}": um for axis, um in zip("XY", slide.slide_mpp or ())}
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
    if slide.reader == "tiff" and slide.source is None:
        handle = stack.enter_context(Path(slide.slide_path).open("rb"))  # noqa: SIM115
        pages = read_layout(slide.slide_path, None, handle).pages
        if all(page.planarconfig != SEPARATE for page in pages):
            source = stack.enter_context(closing(FileSource(slide.slide_path)))
            return [copied(page, source) for page in pages]
    return [_encoded(lv.size, partial(_read, slide, lv, 1), quality=quality) for lv in slide.levels]


def _read(slide: Slide, level: Level, times: int, corner: tuple[int, int]) -> RgbArray:
    """A tile of a level whose size is divided by `times`."""
    origin, edge = corner_l0(level, *(times * px for px in corner)), times * _EDGE
    region = slide.read_region(origin, level.index, (edge, edge))
    return region if times == 1 else np.asarray(Image.fromarray(region).reduce(times))


def _halves(slide: Slide, quality: int, stack: ExitStack, *, grey: bool) -> Iterator[Picture]:
    """Levels below the slide's last one, each made from the one above and kept in a file."""
    if max(slide.levels[-1].size) <= COARSEST_PX:
        return
    folder = stack.enter_context(scratch_folder("convert"))
    above = slide
    while max(size := (level := above.levels[-1]).size) > COARSEST_PX:
        half: Size = (max(1, size[0] // 2), max(1, size[1] // 2))
        path = folder / f"{half[0]}.tif"
        picture = _encoded(half, partial(_read, above, level, 2), quality=quality, grey=grey)
        with tifffile.TiffWriter(path, bigtiff=True) as file:
            picture.write(file, metadata=None)
        above = stack.enter_context(load_slide("tiff", str(path)))
        yield from _levels(above, quality, stack)


def copied(page: Any, source: ByteSource) -> Picture:
    """A page whose colours stand together, byte by byte; InvalidInputError: it cannot be said."""
    samples, strip = page.samplesperpixel, min(page.rowsperstrip or 2**31, page.imagelength)
    options: dict[str, Any] = {
        "shape": (page.imagelength, page.imagewidth, samples)[: 2 + (samples > 1)],
        "dtype": page.dtype,
        "photometric": int(page.photometric),
        "extrasamples": page.extrasamples or None,
        "compression": int(page.compression),
        "predictor": int(page.predictor) if page.predictor > 1 else None,
        "jpegtables": page.jpegtables,
        "iccprofile": page.iccprofile,
        "resolution": page.resolution,
        "resolutionunit": int(page.resolutionunit),
    }
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
        for offset, count in places:
            yield source.read_at(offset, count) if count else b""

    has_px = any(count for _, count in places)
    require(has_px, "an image must have px", f"an empty one in {source.name!r}")
    return Picture(options=options, segments=segments)


def _encoded(
    size: Size, read: Callable[[tuple[int, int]], RgbArray], *, quality: int, grey: bool = False
) -> Picture:
    """Tiles are read (x, y in px), encoded as JPEG. Memory: one per CPU, and what `read` takes."""

    def tile(place: tuple[int, int]) -> bytes:
        pixels = np.ascontiguousarray(read((place[1], place[0]))[..., : 1 if grey else 3])
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
    }
    return Picture(options=options, segments=segments)


def identifying(slide_path: str | Path) -> list[str]:
    """What in a TIFF slide may identify a patient, one line each; [] where nothing was found.

    Text within the px is not looked for, nor is the name of the file. Memory: the metadata.
    Raises InvalidInputError: not a TIFF of a kind that is copied.
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
    _refuse_present(out, overwrite=overwrite)
    with ExitStack() as stack:
        layout = _layout(slide_path, stack.enter_context(Path(slide_path).open("rb")))
        plain = not any(key.startswith(OME) for key in layout.facts["properties"])
        got = f"{str(slide_path)!r}; `thinsection convert` writes one without other metadata"
        require(plain, "slide must not be an OME-TIFF", got)
        told = list(_told(layout))
        tmp = stack.enter_context(atomic_path(out))
        source, kept = stack.enter_context(closing(FileSource(str(slide_path)))), _kept(layout)
        size = sum(sum(page.databytecounts) for page in kept)
        with tifffile.TiffWriter(tmp, bigtiff=size > 2**32 - 2**25) as file:
            for page in kept:
                # Latin-1, as scanners write it
                text = _description(page).encode("latin-1", "replace") or None
                more = {"subfiletype": int(page.subfiletype), "description": text}
                copied(page, source).write(file, **more, metadata=None)
        if left := identifying(tmp):
            raise OutputError(f"copy must not identify anybody, got {left} in {str(out)!r}")
    return told


def _layout(slide_path: str | Path, handle: Any) -> TiffLayout:
    try:
        return read_layout(str(slide_path), None, handle)
    except SlideOpenError as error:
        what = f"slide {Path(slide_path).name!r} is not a TIFF that can be copied"
        remedy = "`thinsection convert` writes one without metadata"
        raise InvalidInputError(f"{what}: {remedy}; {error}") from error


def _kept(layout: TiffLayout) -> list[Any]:
    """Pages in the order of the file: levels, and the thumbnail."""
    pages = [page for name, (_, page) in layout.associated.items() if name == "thumbnail"]
    return sorted([*layout.pages, *pages], key=lambda page: int(page.offset))


def _told(layout: TiffLayout) -> Iterable[str]:
    yield from (f"{name} image" for name in sorted({*layout.associated} - {"thumbnail"}))
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
