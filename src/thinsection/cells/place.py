"""Places cells on a slide: their scale, and whether they fit the slide and its tissue."""

from dataclasses import dataclass

import numpy as np

from thinsection.errors import InvalidInputError, MissingMppError
from thinsection.types import Floats, Mpp, Size

# words of a frame that are no resolution
PX = "px"
UM = "um"


@dataclass(frozen=True, kw_only=True)
class CellSlide:
    """Slide on which cells lie, as far as their table needs it."""

    slide_id: str
    size_l0: Size
    slide_mpp: Mpp


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How coordinates of a file become px of level 0: times a scale, plus an offset.

    Attributes:
        scale_xy: level-0 px per unit of the file, along x and y.
        offset_l0: level-0 px of the file's origin.
        rule: the same in words: 'px of level 0', 'µm', 'px of 0.5 µm'.
    """

    scale_xy: tuple[float, float] = (1.0, 1.0)
    offset_l0: tuple[float, float] = (0.0, 0.0)
    rule: str = "px of level 0"

    def centers_l0(self, centers: Floats) -> Floats:
        """Centres (N, 2) of the file in level-0 px."""
        moved = centers * np.asarray(self.scale_xy) + np.asarray(self.offset_l0)
        return np.asarray(moved)


def placement_of(
    frame: str, slide: CellSlide, offset_l0: tuple[float, float] = (0.0, 0.0)
) -> Placement:
    """Placement for a frame: 'px' for px of level 0, 'um' for µm, or the µm of one px.

    Raises:
        InvalidInputError: the frame is neither of these words nor a number above 0.
        MissingMppError: the slide has no resolution, and the frame needs it.
    """
    text = frame.strip().lower().replace("µ", "u")
    if text in (PX, "level0", "level-0"):
        return Placement(offset_l0=offset_l0)
    unit_um = 1.0
    rule = "µm"
    if text not in (UM, "microns", "micron"):
        try:
            unit_um = float(text)
        except ValueError:
            unit_um = 0.0
        if not 0 < unit_um < np.inf:
            raise InvalidInputError(
                f"frame of cells must be px (of level 0), um, or the µm of one px such as 0.5, "
                f"got {frame!r}"
            )
        rule = f"px of {unit_um:g} µm"
    scale_x = unit_um / slide.slide_mpp[0]
    scale_y = unit_um / slide.slide_mpp[1]
    if not (0 < scale_x < np.inf and 0 < scale_y < np.inf):
        raise MissingMppError(
            f"slide_mpp is missing in {slide.slide_id!r}; pass --slide-mpp or add a slide_mpp "
            "column to the cohort"
        )
    return Placement(scale_xy=(scale_x, scale_y), offset_l0=offset_l0, rule=rule)
