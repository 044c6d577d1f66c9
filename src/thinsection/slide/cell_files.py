"""Recognises files of cells that are given as regions: thousands of small outlines.

Their union would take minutes, and is not what a region is for.
"""

import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.slide.annotation_formats import Shape

_FEWEST = 1000  # fewer objects are read and noted, whatever they are
_LARGEST_PX = 5000  # level-0 px of a cell: 20 µm across at 0.25 µm/px
_SAMPLE = 500  # outlines that are measured
_ADVICE = "cells are no regions; export the annotations without them"
_CELL = re.compile(rb'"objectType"\s*:\s*"(?:cell|detection)"')
_OTHER = re.compile(rb'"objectType"\s*:\s*"(?!cell"|detection")')


def refuse_detections(path: Path) -> None:
    """Refuses a GeoJSON whose objects are all QuPath's detections or cells, before it is parsed.

    Memory: pages of the file, which is mapped. Time: half a second for 500 MB.

    Raises InvalidInputError: names the file and the number of objects.
    """
    if path.stat().st_size < _FEWEST * 32:
        return
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        if _CELL.search(data) is None or _OTHER.search(data) is not None:
            return
        num_objects = len(re.findall(rb'"objectType"', data))
        # a feature without a kind is an annotation
        num_features = len(re.findall(rb'"Feature"', data))
    if num_objects >= max(_FEWEST, num_features):
        raise InvalidInputError(
            f"regions must be annotations, got {num_objects:,} detections and no annotation in "
            f"{str(path)!r}; {_ADVICE}"
        )


def refuse_cells(shapes: Sequence[Shape], path: Path) -> None:
    """Refuses annotations of which most are as small as cells.

    Raises InvalidInputError: names the file, the number of outlines and their size.
    """
    outlines = [shape.polygons[0] for shape in shapes if shape.polygons]
    if len(outlines) < _FEWEST:
        return
    step = len(outlines) // _SAMPLE + 1
    areas = [area for outline in outlines[::step] if (area := _area(outline)) > 0]
    if areas and median(areas) < _LARGEST_PX:
        raise InvalidInputError(
            f"regions must be areas of tissue, got {len(outlines):,} outlines with a median of "
            f"{median(areas):,.0f} px² in {str(path)!r}; {_ADVICE}"
        )


def _area(outline: object) -> float:
    """Area of an outline's outer ring, px² of level 0; 0 if it is no ring."""
    try:
        ring = outline.exterior.coords if hasattr(outline, "exterior") else outline[0]  # type: ignore[index]
        x, y = np.asarray([point[:2] for point in ring], dtype=np.float64).T
    except (TypeError, ValueError, LookupError):
        return 0.0  # reading it raises the error
    return float(abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2)
