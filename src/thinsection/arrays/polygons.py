"""Masks as polygons and back: smooth outlines, pixels inside, exact areas in boxes.

Polygons are shapely's, valid and in level-0 px (x to the right, y down) unless another
unit is named. A piece of a mask is 4-connected and its holes are 8-connected; an island
in a hole is a piece.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.types import CoordsL0, MaskArray, MaskFrame, Size

if TYPE_CHECKING:
    from shapely import Geometry, MultiPolygon, Polygon

# Of an outline's pixel centres with its mask.
LEAST_IOU = 0.995
# Sigma of smoothing along a ring, in half mask px, and the distance by which it may be
# simplified, in mask px. The first pair that keeps LEAST_IOU is taken; the last leaves
# the rings of marching squares as they are.
_SMOOTHINGS = ((2.0, 0.25), (1.0, 0.25), (0.5, 0.2), (0.0, 0.3), (0.0, 0.0))
# A ring of fewer points is left as it is.
_MIN_SMOOTHED_POINTS = 16
# Decimals of level-0 px.
_DECIMALS = 2

_Floats = npt.NDArray[np.float64]
_Lines = npt.NDArray[np.float64] | npt.NDArray[np.int64]


def mask_outlines(
    mask: MaskArray, frame: MaskFrame, *, least_iou: float = LEAST_IOU
) -> "MultiPolygon":
    """Smooth, simplified outlines of every piece with its holes, in level-0 px.

    They are as smooth as leaves `least_iou` between the mask and the pixels whose
    centres are inside.

    Memory: O(H * W) and some 200 bytes per pixel of the outlines.

    Source: marching squares (scikit-image), Douglas and Peucker's simplification (GEOS).
    """
    import shapely

    shape = tuple(frame.size_th)[::-1]
    if mask.dtype != np.bool_ or mask.shape != shape:
        raise InvalidInputError(
            f"mask must be bool of shape {shape}, got {mask.dtype} {mask.shape}; "
            "pass the frame that the mask was computed in"
        )
    pieces = _find_pieces(mask)
    outlines = shapely.MultiPolygon()
    if not pieces:
        return outlines
    for sigma, tolerance in _SMOOTHINGS:
        outlines = shapely.MultiPolygon(
            [_make_polygon(rings, sigma, tolerance, frame) for rings in pieces]
        )
        if not outlines.is_valid:
            continue
        if overlap(rasterised(outlines, frame), mask) >= least_iou:
            break
    return outlines


def overlap(one: MaskArray, other: MaskArray) -> float:
    """Intersection over union of two masks; 1 where both are empty."""
    union = np.count_nonzero(one | other)
    return np.count_nonzero(one & other) / union if union else 1.0


def _find_pieces(mask: MaskArray) -> list[list[_Floats]]:
    """Closed rings (K, 2) of (x, y) in mask px of each piece, the exterior first."""
    from scipy import ndimage
    from skimage.measure import find_contours

    labels = np.pad(ndimage.label(mask)[0], 1)
    padded = np.pad(mask, 1).astype(np.uint8)
    pieces: dict[int, list[_Floats]] = {}
    for contour in find_contours(padded, 0.5, fully_connected="low"):
        # the first point lies midway between a pixel of the piece and one outside
        row, column = contour[0]
        before = labels[int(np.floor(row)), int(np.floor(column))]
        after = labels[int(np.ceil(row)), int(np.ceil(column))]
        ring = contour[:, ::-1] - 0.5
        pieces.setdefault(int(max(before, after)), []).append(ring)
    for rings in pieces.values():
        # the exterior is the widest
        rings.sort(key=lambda ring: -np.ptp(ring[:, 0]))
    return list(pieces.values())


def _make_polygon(
    rings: list[_Floats], sigma: float, tolerance: float, frame: MaskFrame
) -> "Polygon":
    """A piece with its rings smoothed and simplified, in level-0 px."""
    import shapely

    downsample = np.array(frame.downsample_xy)
    lines = [
        shapely.LinearRing(_smooth_ring(ring, sigma, frame.size_th)) for ring in rings
    ]
    simplified = shapely.simplify(lines, tolerance, preserve_topology=False)
    exterior, *holes = shapely.transform(
        simplified, lambda xy: (xy * downsample).round(_DECIMALS)
    )
    return shapely.Polygon(exterior, holes)


def _smooth_ring(ring: _Floats, sigma: float, size_th: Size) -> _Floats:
    """The ring without the steps of pixels; the slide's border stays straight."""
    from scipy import ndimage

    if sigma == 0 or len(ring) < _MIN_SMOOTHED_POINTS:
        return ring
    points = ring[:-1]
    smooth = ndimage.gaussian_filter1d(points, sigma, axis=0, mode="wrap")
    at_border = ((points == 0) | (points == size_th)).any(axis=1, keepdims=True)
    return np.asarray(np.where(at_border, points, smooth))


Window = tuple[slice, slice]  # rows and columns of a mask


def window_of(polygons: "Geometry", frame: MaskFrame) -> Window:
    """Rows and columns of a mask outside which no pixel is inside polygons."""
    downsample = np.tile(frame.downsample_xy, 2)
    bounds = np.nan_to_num(np.asarray(polygons.bounds)) / downsample
    low = np.clip(np.floor(bounds[:2]), 0, frame.size_th).astype(int)
    high = np.clip(np.ceil(bounds[2:]), low, frame.size_th).astype(int)
    return slice(int(low[1]), int(high[1])), slice(int(low[0]), int(high[0]))


def rasterised(
    polygons: "Geometry", frame: MaskFrame, window: Window | None = None
) -> MaskArray:
    """The mask (H, W) of pixels whose centres are inside, or the part of it in a window.

    Takes polygons, multipolygons and collections of them.

    Memory: 4 H W bytes, and 60 bytes for each row that an edge crosses.
    """
    size_x, size_y = frame.size_th
    rows, columns = window or (slice(0, size_y), slice(0, size_x))
    width = columns.stop - columns.start
    height = rows.stop - rows.start
    edges = _edges_of(polygons, 1 / np.array(frame.downsample_xy))
    start_row = np.ceil(edges.start[:, 1] - 0.5) - rows.start
    end_row = np.ceil(edges.end[:, 1] - 0.5) - rows.start
    first = np.clip(start_row, 0, height).astype(int)
    last = np.clip(end_row, 0, height).astype(int)
    # one crossing for each row of centres that an edge passes
    count = abs(last - first)
    edge = np.repeat(np.arange(len(count)), count)
    first_crossing = count.cumsum() - count
    row = np.arange(len(edge)) - np.repeat(
        first_crossing - np.minimum(first, last), count
    )
    run = (edges.end - edges.start)[edge]
    part = (row + rows.start + 0.5 - edges.start[edge, 1]) / run[:, 1]
    x = edges.start[edge, 0] + part * run[:, 0]
    column = np.clip(np.ceil(x - 0.5) - columns.start, 0, width).astype(int)
    turns = np.zeros((height, width + 1), dtype=np.int32)
    np.add.at(turns, (row, column), (edges.sign * np.sign(first - last))[edge])
    return np.asarray(turns.cumsum(axis=1)[:, :-1] > 0)


def coverage(
    polygons: "Geometry", coords_l0: CoordsL0, size_l0: Size
) -> npt.NDArray[np.float32]:
    """The exact share, (N,), of each box of size (width, height) that polygons cover.

    Memory: 100 bytes per box of a grid, and 200 bytes for each box that an edge crosses.
    """
    if not len(coords_l0):
        return np.zeros(0, dtype=np.float32)
    x_low, y_low = coords_l0.T
    x_high, y_high = (coords_l0 + np.array(size_l0)).T
    x_lines = np.unique(np.concatenate([x_low, x_high]))
    y_lines = np.unique(np.concatenate([y_low, y_high]))
    areas = cell_areas(polygons, x_lines, y_lines)
    summed = np.pad(areas.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
    left = np.searchsorted(x_lines, x_low)
    right = np.searchsorted(x_lines, x_high)
    top = np.searchsorted(y_lines, y_low)
    bottom = np.searchsorted(y_lines, y_high)
    covered = (
        summed[bottom, right]
        - summed[top, right]
        - summed[bottom, left]
        + summed[top, left]
    )
    shares = np.clip(covered / np.prod(size_l0, dtype=np.float64), 0, 1)
    return np.asarray(shares, dtype=np.float32)


def cell_areas(polygons: "Geometry", x: _Lines, y: _Lines) -> _Floats:
    """The area that polygons cover of each cell between lines, (H, W).

    Lines are at x (W + 1) and y (H + 1). Each edge is cut at the lines; a piece of it
    adds the area to its right, with its direction's sign.

    Memory: 16 bytes per cell and 200 bytes for each cell that an edge crosses.
    """
    edges = _edges_of(polygons, np.ones(2))
    edges = _cut(edges, x, axis=0)
    edges = _cut(edges, y, axis=1)
    middle = (edges.start + edges.end) / 2
    rise = (edges.start[:, 1] - edges.end[:, 1]) * edges.sign
    row = np.searchsorted(y, middle[:, 1]) - 1
    column = np.searchsorted(x, middle[:, 0]) - 1
    # an edge left of all cells (column -1) still has cells to its right
    counts = (row >= 0) & (row < len(y) - 1) & (column < len(x) - 1)
    row = row[counts]
    column = column[counts]
    rise = rise[counts]
    middle_x = middle[counts, 0]
    rises = np.zeros((len(y) - 1, len(x)))
    np.add.at(rises, (row, column + 1), rise)
    areas = rises.cumsum(axis=1)[:, :-1] * np.diff(x)
    within = column >= 0
    row = row[within]
    column = column[within]
    np.add.at(areas, (row, column), rise[within] * (x[column + 1] - middle_x[within]))
    return areas


@dataclass(frozen=True, slots=True)
class _Edges:
    """Straight edges of polygons: exteriors run one way, holes the other."""

    start: _Floats  # (E, 2)
    end: _Floats  # (E, 2)
    sign: _Floats  # (E,), 1 or -1


def _edges_of(polygons: "Geometry", scale: _Floats) -> _Edges:
    """All edges of polygons, with coordinates times `scale`."""
    import shapely

    # twice, because a collection may hold multipolygons
    parts = shapely.get_parts(shapely.get_parts(polygons))
    parts = parts[shapely.get_type_id(parts) == shapely.GeometryType.POLYGON]
    rings = shapely.get_rings(parts)
    counts = 1 + shapely.get_num_interior_rings(parts)
    is_exterior = np.zeros(len(rings), dtype=bool)
    is_exterior[np.cumsum(counts) - counts] = True
    points, ring_of_point = shapely.get_coordinates(rings, return_index=True)
    points = points * scale
    same_ring = ring_of_point[1:] == ring_of_point[:-1]
    ring_sign = np.where(shapely.is_ccw(rings) == is_exterior, 1.0, -1.0)
    return _Edges(
        start=points[:-1][same_ring],
        end=points[1:][same_ring],
        sign=ring_sign[ring_of_point[1:][same_ring]],
    )


def _cut(edges: _Edges, lines: _Lines, *, axis: int) -> _Edges:
    """Cuts edges where they cross lines at sorted values of x (axis 0) or y (axis 1)."""
    start = edges.start
    end = edges.end
    a = start[:, axis]
    b = end[:, axis]
    first_line = np.searchsorted(lines, np.minimum(a, b), side="right")
    last_line = np.searchsorted(lines, np.maximum(a, b), side="left")
    num_cuts = np.maximum(last_line - first_line, 0)
    edge = np.repeat(np.arange(len(a)), num_cuts + 1)
    first_piece = np.cumsum(num_cuts + 1) - num_cuts - 1
    nth = np.arange(len(edge)) - first_piece[edge]
    stops = end[edge]
    # pieces that end at a line rather than at the end of their edge
    inner = np.flatnonzero(nth < num_cuts[edge])
    cut = edge[inner]
    upwards = b[cut] > a[cut]
    nth_line = np.where(upwards, nth[inner], num_cuts[cut] - 1 - nth[inner])
    line = lines[first_line[cut] + nth_line]
    part = (line - a[cut]) / (b[cut] - a[cut])
    stops[inner] = start[cut] + part[:, None] * (end[cut] - start[cut])
    stops[inner, axis] = line
    starts = np.concatenate([start[:1], stops[:-1]])
    starts[first_piece] = start
    return _Edges(start=starts, end=stops, sign=edges.sign[edge])
