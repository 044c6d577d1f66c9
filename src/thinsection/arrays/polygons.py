"""Masks as polygons and back: smooth outlines, px whose centres are inside, exact areas in boxes.

Polygons are shapely's, valid and in level-0 px (x to the right, y down) unless said otherwise. A
piece of a mask is 4-connected and its holes are 8-connected; an island in a hole is a piece.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import require
from thinsection.types import CoordsL0, MaskArray, MaskFrame, Size

if TYPE_CHECKING:
    from shapely import MultiPolygon

LEAST_IOU = 0.995  # of an outline's px centres with its mask
# of a ring along its way, in half mask px, and how far it may be simplified, mask px; the first
# that keeps LEAST_IOU is taken, the last is what marching squares give
_LADDER = ((2.0, 0.25), (1.0, 0.25), (0.5, 0.2), (0.0, 0.3), (0.0, 0.0))
_SMOOTHED = 16  # points; a shorter ring is left as it is
_DECIMALS = 2  # of level-0 px

_Floats = npt.NDArray[np.float64]
_Edges = tuple[_Floats, _Floats, _Floats]  # starts (E, 2), ends and signs


def mask_outlines(
    mask: MaskArray, frame: MaskFrame, *, least_iou: float = LEAST_IOU
) -> "MultiPolygon":
    """Smooth, simplified outlines of every piece with its holes, in level-0 px.

    As smooth as leaves `least_iou` between the mask and the px whose centres are inside.

    Memory: O(H * W) and some 200 bytes per px of the outlines.
    Source: marching squares (scikit-image), Douglas and Peucker's simplification (GEOS).
    """
    import shapely

    shape = tuple(frame.size_th)[::-1]
    got = f"{mask.dtype} {mask.shape}; pass the frame that the mask was computed in"
    fits = mask.dtype == np.bool_ and mask.shape == shape
    require(fits, f"mask must be bool of shape {shape}", got)
    pieces = _pieces(mask)
    found = shapely.MultiPolygon()
    for rung in _LADDER if pieces else ():
        found = shapely.MultiPolygon(
            [_polygon(rings, *rung, frame) for rings in pieces]
        )
        if found.is_valid and overlap(rasterised(found, frame), mask) >= least_iou:
            break
    return found


def overlap(one: MaskArray, other: MaskArray) -> float:
    """Intersection over union of two masks; 1 where both are empty."""
    union = np.count_nonzero(one | other)
    return np.count_nonzero(one & other) / union if union else 1.0


def _pieces(mask: MaskArray) -> list[list[_Floats]]:
    """Closed rings (K, 2) of (x, y) in mask px of each piece, the exterior first."""
    from scipy import ndimage
    from skimage.measure import find_contours

    labels, padded = np.pad(ndimage.label(mask)[0], 1), np.pad(mask, 1).astype(np.uint8)
    pieces: dict[int, list[_Floats]] = {}
    for contour in find_contours(padded, 0.5, fully_connected="low"):
        (row, column), ring = contour[0], contour[:, ::-1] - 0.5
        # the point lies midway between a px of the piece and one outside
        sides = (labels[int(f(row)), int(f(column))] for f in (np.floor, np.ceil))
        pieces.setdefault(max(map(int, sides)), []).append(ring)
    return [
        sorted(p, key=lambda ring: -float(np.ptp(ring[:, 0]))) for p in pieces.values()
    ]


def _polygon(
    rings: list[_Floats], sigma: float, tolerance: float, frame: MaskFrame
) -> Any:
    """A piece with its rings smoothed and simplified, in level-0 px."""
    import shapely

    downsample = np.array(frame.downsample_xy)
    lines = [
        shapely.LinearRing(_smoothed(ring, sigma, frame.size_th)) for ring in rings
    ]
    plain = shapely.simplify(lines, tolerance, preserve_topology=False)
    exterior, *holes = shapely.transform(
        plain, lambda xy: (xy * downsample).round(_DECIMALS)
    )
    return shapely.Polygon(exterior, holes)


def _smoothed(ring: _Floats, sigma: float, size_th: Size) -> _Floats:
    """The ring without the steps of px; the slide's border stays straight."""
    from scipy import ndimage

    if not sigma or len(ring) < _SMOOTHED:
        return ring
    smooth = ndimage.gaussian_filter1d(ring[:-1], sigma, axis=0, mode="wrap")
    at_border = ((ring[:-1] == 0) | (ring[:-1] == size_th)).any(axis=1, keepdims=True)
    return np.asarray(np.where(at_border, ring[:-1], smooth))


def rasterised(polygons: Any, frame: MaskFrame) -> MaskArray:
    """The mask (H, W) of px whose centres are inside; of (multi)polygons and their collections.
    Memory: 4 H W bytes, and 60 bytes for each row that an edge crosses."""
    width, height = frame.size_th
    start, end, sign = _edges(polygons, 1 / np.array(frame.downsample_xy))
    first, last = (
        np.clip(np.ceil(p[:, 1] - 0.5), 0, height).astype(int) for p in (start, end)
    )
    count = abs(last - first)
    edge = np.repeat(np.arange(len(count)), count)
    row = np.arange(len(edge)) - np.repeat(
        count.cumsum() - count - np.minimum(first, last), count
    )
    part = (row + 0.5 - start[edge, 1]) / (end - start)[edge, 1]
    x = start[edge, 0] + part * (end - start)[edge, 0]
    column = np.clip(np.ceil(x - 0.5), 0, width).astype(int)
    turns = np.zeros((height, width + 1), dtype=np.int32)
    np.add.at(turns, (row, column), (sign * np.sign(first - last))[edge])
    return np.asarray(turns.cumsum(axis=1)[:, :-1] > 0)


def coverage(
    polygons: Any, coords_l0: CoordsL0, size_l0: Size
) -> npt.NDArray[np.float32]:
    """The share, (N,), of each box of size (width, height) that polygons cover: exact.
    Memory: 100 bytes per box of a grid, and 200 bytes for each box that an edge crosses."""
    if not len(coords_l0):
        return np.zeros(0, dtype=np.float32)
    low, high = coords_l0, coords_l0 + np.array(size_l0)
    lines = [
        np.unique(np.concatenate([low[:, axis], high[:, axis]])) for axis in (0, 1)
    ]
    areas = np.pad(
        cell_areas(polygons, *lines).cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0))
    )
    left, top = (np.searchsorted(lines[axis], low[:, axis]) for axis in (0, 1))
    right, bottom = (np.searchsorted(lines[axis], high[:, axis]) for axis in (0, 1))
    inside = (
        areas[bottom, right]
        - areas[top, right]
        - areas[bottom, left]
        + areas[top, left]
    )
    shares = np.clip(inside / np.prod(size_l0, dtype=np.float64), 0, 1)
    return np.asarray(shares, dtype=np.float32)


def cell_areas(polygons: Any, x: npt.NDArray, y: npt.NDArray) -> _Floats:
    """The area that polygons cover of each cell between lines at x (W + 1) and y (H + 1), (H, W).

    Each edge is cut at the lines; a piece adds what lies to its right, with its direction's sign.
    Memory: 16 bytes per cell and 200 bytes for each cell that an edge crosses.
    """
    start, end, sign = _cut(*_cut(*_edges(polygons, np.ones(2)), x, 0), y, 1)
    middle, rise = (start + end) / 2, (start[:, 1] - end[:, 1]) * sign
    row, column = (
        np.searchsorted(lines, middle[:, i]) - 1 for i, lines in ((1, y), (0, x))
    )
    there = (row >= 0) & (row < len(y) - 1) & (column < len(x) - 1)
    row, column, rise, middle_x = (
        row[there],
        column[there],
        rise[there],
        middle[there, 0],
    )
    rises = np.zeros((len(y) - 1, len(x)))
    np.add.at(rises, (row, column + 1), rise)
    areas = rises.cumsum(axis=1)[:, :-1] * np.diff(x)
    within = column >= 0
    row, column = row[within], column[within]
    np.add.at(areas, (row, column), rise[within] * (x[column + 1] - middle_x[within]))
    return areas


def _edges(polygons: Any, scale: _Floats) -> _Edges:
    """Starts (E, 2), ends and signs of all edges: exteriors run one way, holes the other."""
    import shapely

    parts = shapely.get_parts(
        shapely.get_parts(polygons)
    )  # of a collection of multipolygons too
    parts = parts[shapely.get_type_id(parts) == shapely.GeometryType.POLYGON]
    rings = shapely.get_rings(parts)
    outer = np.zeros(len(rings), dtype=bool)
    counts = 1 + shapely.get_num_interior_rings(parts)
    outer[np.cumsum(counts) - counts] = True
    points, of_ring = shapely.get_coordinates(rings, return_index=True)
    same = of_ring[1:] == of_ring[:-1]
    sign = np.where(shapely.is_ccw(rings) == outer, 1.0, -1.0)[of_ring[1:][same]]
    points = points * scale
    return points[:-1][same], points[1:][same], sign


def _cut(
    start: _Floats, end: _Floats, sign: _Floats, lines: npt.NDArray, axis: int
) -> _Edges:
    """Edges cut where they cross lines at sorted values of x (axis 0) or y (axis 1)."""
    a, b = start[:, axis], end[:, axis]
    first = np.searchsorted(lines, np.minimum(a, b), side="right")
    count = np.maximum(np.searchsorted(lines, np.maximum(a, b), side="left") - first, 0)
    edge, after = np.repeat(np.arange(len(a)), count + 1), np.cumsum(count + 1)
    nth = np.arange(len(edge)) - (after - count - 1)[edge]
    stops = end[edge]
    inner = np.flatnonzero(nth < count[edge])  # pieces that end at a line
    of = edge[inner]
    ahead = np.where(b[of] > a[of], nth[inner], count[of] - 1 - nth[inner])
    line = lines[first[of] + ahead]
    part = (line - a[of]) / (b[of] - a[of])
    stops[inner] = start[of] + part[:, None] * (end[of] - start[of])
    stops[inner, axis] = line
    starts = np.concatenate([start[:1], stops[:-1]])
    starts[after - count - 1] = start
    return starts, stops, sign[edge]
