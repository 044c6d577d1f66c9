"""One annotation as a file has it, and the rings of shapes that a file gives by two corners."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from thinsection.types import Json

if TYPE_CHECKING:
    from shapely import Polygon

_ANGLES = np.linspace(0, 2 * np.pi, 129)[:-1]
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
_NUM_BOX_CORNERS = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One annotation, before its coordinates are checked.

    Attributes:
        place: what it is in its file: 'feature 3', 'line 7'.
        class_name: its class; '' where it has none.
        properties: other values of it, as its file has them.
        polygons: each a list of rings as the file has them, or a polygon.
        layer: group of shapes in the file that a hole is cut out of.
        is_hole: True where it is cut out of the areas of its layer, whatever their class.
        ignored: noun for what has no area and is left out: 'point', 'line', 'object'; else ''.
        reason: what follows the noun in a note: 'without geometry'.
    """

    place: str
    class_name: str = ""
    properties: Mapping[str, Json] = field(default_factory=dict)
    polygons: "Sequence[Json | Polygon]" = ()
    layer: int = 0
    is_hole: bool = False
    ignored: str = ""
    reason: str = ""


def box_ring(left: float, top: float, right: float, bottom: float) -> Json:
    """Returns the ring of a box."""
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def rectangle_ring(points: Json) -> Json:
    """Returns the ring of a rectangle, which is given by its corners or by two opposite ones."""
    if len(points) != 2:
        return points
    (left, top), (right, bottom) = points
    return box_ring(left, top, right, bottom)


def ellipse_ring(points: Json) -> Json:
    """Returns the ring of an ellipse that is given by two or four corners of its box.

    An ellipse of more points is given by its outline.
    """
    if len(points) not in _NUM_BOX_CORNERS:
        return points
    corners = np.array(points, dtype=np.float64).reshape(-1, 2)
    low = corners.min(axis=0)
    high = corners.max(axis=0)
    return ((low + high) / 2 + (high - low) / 2 * _CIRCLE).tolist()
