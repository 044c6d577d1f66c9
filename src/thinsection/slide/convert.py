"""Any slide as a pyramidal OME-TIFF; what can be copied is not decoded."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image

from thinsection.errors import InvalidInputError, OutputError
from thinsection.files.atomic import atomic_path
from thinsection.files.lock import scratch_folder
from thinsection.files.sources import FileSource
from thinsection.slide.base import Slide
from thinsection.slide.geometry import l0_from_lv
from thinsection.slide.open import open_slide
from thinsection.slide.readers import AUTO, load_slide
from thinsection.slide.rewrite import Picture, copied, encoded
from thinsection.slide.tiff_codecs import SEPARATE
from thinsection.slide.tiff_layout import read_layout
from thinsection.types import Mpp, RgbArray, Size

COARSEST_PX = 1024  # longer edge of the smallest level, at most
FORMATS = {"ome-tiff": ".ome.tif"}


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
    if not 1 <= quality <= 100:
        raise InvalidInputError(f"quality must be in [1, 100], got {quality}")
    if not out.name.lower().endswith((".ome.tif", ".ome.tiff")):
        raise InvalidInputError(f"out must end in '.ome.tif', got {str(out)!r}")
    refuse_present(out, overwrite=overwrite)
    with ExitStack() as stack:
        slide = stack.enter_context(open_slide(slide_path, reader=reader, slide_mpp=slide_mpp))
        pictures = _levels(slide, quality, stack)
        pictures += _halves(slide, quality, stack, grey=pictures[0].is_grey)
        metadata: dict[str, Any] = {"axes": "YX" if pictures[0].is_grey else "YXS"}
        tmp = stack.enter_context(atomic_path(out))
        with tifffile.TiffWriter(tmp, bigtiff=True, ome=True) as file:
            first, *others = pictures
            # tifffile's own would hold the address of this machine's network card
            metadata |= {"UUID": f"urn:uuid:{uuid.uuid4()}", **_physical(slide.slide_mpp)}
            first.write(file, subifds=len(others), metadata=metadata)
            for picture in others:
                picture.write(file, subfiletype=1, metadata=None)
    return out


def refuse_present(out: Path, *, overwrite: bool) -> None:
    """Nothing is replaced without a word."""
    if out.exists() and not overwrite:
        remedy = "pass --overwrite, or another name"
        raise OutputError(f"out must not exist, got {str(out)!r}; {remedy}")


def _physical(mpp: Mpp | None) -> dict[str, Any]:
    if mpp is None:
        return {}
    sizes = {f"PhysicalSize{axis}": value for axis, value in zip("XY", mpp)}
    return {**sizes, **{f"{name}Unit": "\u00b5m" for name in sizes}}


def _levels(slide: Slide, quality: int, stack: ExitStack) -> list[Picture]:
    """The slide's own levels, copied where it is a TIFF that we read."""
    if slide.reader == "tiff" and slide.source is None:
        handle = stack.enter_context(Path(slide.slide_path).open("rb"))  # noqa: SIM115
        pages = read_layout(slide.slide_path, None, handle).pages
        if all(page.planarconfig != SEPARATE for page in pages):
            source = FileSource(slide.slide_path)
            stack.callback(source.close)
            return [copied(page, source, name=slide.slide_path) for page in pages]
    found = []
    for level in slide.levels:
        read = partial(_read, slide, level.index)
        found.append(encoded(level.size, read, quality=quality))
    return found


def _read(slide: Slide, level: int, x: int, y: int, edge: int) -> RgbArray:
    down = slide.levels[level].downsample
    return slide.read_region((l0_from_lv(x, down), l0_from_lv(y, down)), level, (edge, edge))


def _halves(slide: Slide, quality: int, stack: ExitStack, *, grey: bool) -> Iterator[Picture]:
    """Levels below the slide's last one, each made from the one above and kept in a file."""
    if max(slide.levels[-1].size) <= COARSEST_PX:
        return
    folder = stack.enter_context(scratch_folder("convert"))
    above, index = slide, len(slide.levels) - 1
    while max(size := above.levels[index].size) > COARSEST_PX:
        half: Size = (max(1, size[0] // 2), max(1, size[1] // 2))
        path = folder / f"{half[0]}.tif"
        picture = encoded(half, partial(_half, above, index), quality=quality, grey=grey)
        with tifffile.TiffWriter(path, bigtiff=True) as file:
            picture.write(file, metadata=None)
        above, index = stack.enter_context(load_slide("tiff", str(path))), 0
        yield from _levels(above, quality, stack)


def _half(above: Slide, index: int, x: int, y: int, edge: int) -> RgbArray:
    region = _read(above, index, 2 * x, 2 * y, 2 * edge)
    return np.asarray(Image.fromarray(region).reduce(2))
