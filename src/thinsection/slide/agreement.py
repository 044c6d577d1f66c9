"""Comparison of a slide with OpenSlide's view of it: levels, resolution, and pixels in places."""

from itertools import product

import numpy as np
from numpy.typing import NDArray

from thinsection.errors import SlideReadError
from thinsection.slide.base import Slide
from thinsection.slide.geometry import corner_l0
from thinsection.types import Level, PointL0, Size

# where px are compared: shares of a level's width and height, its border included
_PROBES = (
    (0.5, 0.5),
    (0.31, 0.23),
    (0.23, 0.71),
    (0.77, 0.42),
    (0.62, 0.83),
    (0.0, 0.0),
    (1.0, 1.0),
)
_PROBE_PX = 48
# Lower levels are interpolated as OpenSlide does it; its arithmetic has 8 bits. Allowed absolute
# difference, of 255: largest and mean. White noise, the worst case, gave 3.4 and .35; levels that
# are 1 px apart differ by tens wherever there is texture.
_LEVEL_MAX = 4.0
_LEVEL_MEAN = 0.75


class UnreadReference(Exception):
    """OpenSlide cannot read a place that the slide reads; at all others they agree."""


def find_difference(slide: Slide, reference: Slide) -> str:
    """Returns in what a slide differs from OpenSlide's view of it; '' where they agree.

    Levels that OpenSlide leaves out, because no flag of their pages says so, are not compared.

    Raises:
        UnreadReference: OpenSlide decodes not every place; nobody can then say who is right there,
            but by OpenSlide it is not to be read at all.
    """
    own_levels = {level.size: level for level in slide.levels}
    sizes = list(own_levels)
    reference_sizes = [level.size for level in reference.levels]
    is_part = set(reference_sizes) <= set(sizes) and reference_sizes[0] == sizes[0]
    if not is_part:
        return f"its levels are {sizes}, which differ from those of OpenSlide"
    own_mpp = slide.slide_mpp or (0.0, 0.0)
    reference_mpp = reference.slide_mpp or (0.0, 0.0)
    if not np.allclose(own_mpp, reference_mpp, rtol=1e-6):
        return f"its resolution is {slide.slide_mpp}, but OpenSlide reads {reference.slide_mpp}"
    unread = ""
    for level, place in product(reference.levels, _PROBES):
        own_level = own_levels[level.size]
        try:
            difference = _pixel_difference(slide, reference, own_level, level, place)
        except UnreadReference as error:
            unread = unread or str(error)
        except SlideReadError as error:
            return str(error)
        else:
            if difference:
                return difference
    if unread:
        raise UnreadReference(unread)
    return ""


def _pixel_difference(
    slide: Slide,
    reference: Slide,
    level: Level,
    reference_level: Level,
    place: tuple[float, float],
) -> str:
    """Returns by how much the pixels of one place differ; '' where they agree."""
    width, height = level.size
    x = max(0, min(int(place[0] * width), width - _PROBE_PX))
    y = max(0, min(int(place[1] * height), height - _PROBE_PX))
    origin_l0 = corner_l0(level, x, y)
    size = (min(_PROBE_PX, width), min(_PROBE_PX, height))
    own_pixels = interpolated(slide, origin_l0, level.index, size)
    try:
        reference_pixels = reference.read_region(origin_l0, reference_level.index, size)
    except SlideReadError as error:
        raise UnreadReference(str(error)) from error
    difference = np.abs(own_pixels - reference_pixels)
    if level.index == 0 and difference.any():
        return f"its pixels at {origin_l0} differ by up to {difference.max():g}"
    if difference.max() > _LEVEL_MAX or difference.mean() > _LEVEL_MEAN:
        return (
            f"its pixels of level {level.index} at {origin_l0} differ by up to "
            f"{difference.max():.1f}, on average {difference.mean():.2f}"
        )
    return ""


def interpolated(
    slide: Slide, origin_l0: PointL0, level: int, size: Size
) -> NDArray[np.float64]:
    """Reads a region as OpenSlide paints it, float (height, width, 3).

    OpenSlide puts px (0, 0) at origin_l0 / downsample of the level, not rounded, and cairo
    interpolates linearly between px; `Slide.read_region` rounds.
    Source: openslide-vendor-aperio.c `paint_region`, openslide-grid.c `read_tiles`.
    """
    source = slide.levels[level]
    x, right = divmod(origin_l0[0] / source.downsample, 1)
    y, below = divmod(origin_l0[1] / source.downsample, 1)
    corner = corner_l0(source, x, y)
    region = slide.read_region(corner, level, (size[0] + 1, size[1] + 1))
    pixels = region.astype(np.float64)
    rows = pixels[:-1] * (1 - below) + pixels[1:] * below
    columns = rows[:, :-1] * (1 - right) + rows[:, 1:] * right
    return np.asarray(columns)
