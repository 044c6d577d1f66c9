"""Outlines of many cells as one array of points, with their measures and their WKB.

A loop over a million polygons takes seconds in Python, so each function works on whole arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.types import Floats, Mpp

if TYPE_CHECKING:
    import pyarrow as pa

Offsets = npt.NDArray[np.int64]  # (N + 1,): cell i has the points from i to i + 1
Flags = npt.NDArray[np.bool_]  # (N,)

MIN_POINTS = 3  # fewer points enclose no area
# WKB of a polygon with one ring: byte order, type, number of rings, number of points
_HEADER = np.dtype(
    [("order", "u1"), ("kind", "<u4"), ("rings", "<u4"), ("points", "<u4")]
)
POINT_BYTES = 16  # x and y, as float64
_POLYGON = 3
_LITTLE_ENDIAN = 1


@dataclass(frozen=True, slots=True)
class Shapes:
    """Measures of outlines; NaN for a cell whose outline has no area."""

    centers: Floats  # (N, 2), in the frame of the outlines
    area_um2: Floats
    perimeter_um: Floats
    major_axis_um: Floats  # axes of the ellipse with the same second moments
    minor_axis_um: Floats
    circularity: Floats  # 4 pi area / perimeter^2; 1 for a disc
    orientation_deg: Floats  # from x to the major axis, towards y, in [0, 180)


@dataclass(frozen=True, slots=True)
class Outlines:
    """Outer rings of N cells. The last point of a ring does not repeat the first.

    Attributes:
        points: (P, 2) of x, y, the points of all cells one after another.
        offsets: (N + 1,), where the points of each cell begin, and the last end.
    """

    points: Floats
    offsets: Offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_points(self) -> npt.NDArray[np.int64]:
        """Number of points of each outline."""
        return np.diff(self.offsets)

    @classmethod
    def of_counts(cls, points: Floats, counts: Sequence[int] | Offsets) -> "Outlines":
        """Outlines of rings with so many points each, closed or not."""
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        return cls(points, offsets)._opened()

    @classmethod
    def empty(cls, num_cells: int) -> "Outlines":
        """Outlines without points, for cells of which only the centre is known."""
        return cls(np.zeros((0, 2)), np.zeros(num_cells + 1, dtype=np.int64))

    def _opened(self) -> "Outlines":
        """The same without last points that repeat the first."""
        first = self.offsets[:-1]
        last = self.offsets[1:] - 1
        is_closed = last > first
        ends = np.where(is_closed, last, 0)
        starts = np.where(is_closed, first, 0)
        if len(self.points):
            is_closed &= (self.points[starts] == self.points[ends]).all(axis=1)
        if not is_closed.any():
            return self
        kept = np.ones(len(self.points), dtype=bool)
        kept[last[is_closed]] = False
        num_removed = np.concatenate([[0], np.cumsum(is_closed)])
        return Outlines(self.points[kept], self.offsets - num_removed)

    def take(self, kept: Flags) -> "Outlines":
        """The outlines of some of the cells."""
        if kept.all():
            return self
        counts = self.num_points
        points = self.points[np.repeat(kept, counts)]
        return Outlines.of_counts(points, counts[kept])

    def moved(self, scale_xy: tuple[float, float], offset: Floats) -> "Outlines":
        """The outlines times a scale, plus an offset."""
        if scale_xy == (1.0, 1.0) and not offset.any():
            return self
        return Outlines(self.points * np.asarray(scale_xy) + offset, self.offsets)

    def are_finite(self) -> Flags:
        """True for each cell whose coordinates are all finite numbers."""
        is_finite = np.isfinite(self.points).all(axis=1)
        if is_finite.all():
            return np.ones(len(self), dtype=bool)
        num_bad = np.concatenate([[0], np.cumsum(~is_finite)])
        return np.asarray(np.diff(num_bad[self.offsets]) == 0)

    def shapes(self, mpp: Mpp) -> Shapes:
        """Measures of each outline; `mpp` is µm per unit of the outlines, along x and y.

        Memory: some 150 bytes per point.

        Source: area, centroid and second moments of a polygon by Green's theorem.
        """
        counts = self.num_points
        has_points = counts > 0
        first = self.offsets[:-1][has_points]
        # points as µm from the first point of the cell: far from 0 the products would lose digits
        origin = np.zeros((len(self), 2))
        origin[has_points] = self.points[first]
        local = (self.points - np.repeat(origin, counts, axis=0)) * np.asarray(mpp)
        x = local[:, 0]
        y = local[:, 1]
        following = self.next_rows()
        next_x, next_y = x[following], y[following]
        cross = x * next_y - next_x * y

        def sums(values: Floats) -> Floats:
            total = np.zeros(len(self))
            if len(first):
                total[has_points] = np.add.reduceat(values, first)
            return total

        with np.errstate(divide="ignore", invalid="ignore"):
            signed_area = sums(cross) / 2
            signed_area[signed_area == 0] = np.nan
            sum_x = x + next_x
            sum_y = y + next_y
            center_x = sums(sum_x * cross) / (6 * signed_area)
            center_y = sums(sum_y * cross) / (6 * signed_area)
            # second moments about the centre, per area
            moment_xx = sums((sum_x * sum_x - x * next_x) * cross) / (12 * signed_area)
            moment_yy = sums((sum_y * sum_y - y * next_y) * cross) / (12 * signed_area)
            mixed = (sum_x * sum_y + x * y + next_x * next_y) * cross
            moment_xy = sums(mixed) / (24 * signed_area)
            moment_xx -= center_x**2
            moment_yy -= center_y**2
            moment_xy -= center_x * center_y
            half_sum = (moment_xx + moment_yy) / 2
            half_difference = (moment_xx - moment_yy) / 2
            root = np.hypot(half_difference, moment_xy)
            major = 4 * np.sqrt(half_sum + root)
            minor = 4 * np.sqrt(np.maximum(half_sum - root, 0))
            angle = np.degrees(np.arctan2(moment_xy, half_difference)) / 2 % 180
            perimeter = sums(np.hypot(next_x - x, next_y - y))
            area = np.abs(signed_area)
            circularity = 4 * np.pi * area / perimeter**2
        centers = np.stack([center_x, center_y], axis=1) / np.asarray(mpp) + origin
        return Shapes(
            centers=centers,
            area_um2=area,
            perimeter_um=np.where(np.isnan(area), np.nan, perimeter),
            major_axis_um=major,
            minor_axis_um=minor,
            circularity=circularity,
            orientation_deg=angle,
        )

    def next_rows(self) -> Offsets:
        """(P,): row of the next point of each ring; at the last point that of the first."""
        following = np.arange(1, len(self.points) + 1)
        has_points = self.num_points > 0
        following[self.offsets[1:][has_points] - 1] = self.offsets[:-1][has_points]
        return following

    def bounds(self) -> Floats:
        """(N, 4): least x and y, largest x and y of each outline; NaN without points."""
        bounds = np.full((len(self), 4), np.nan)
        has_points = self.num_points > 0
        first = self.offsets[:-1][has_points]
        if len(first):
            bounds[has_points, :2] = np.minimum.reduceat(self.points, first)
            bounds[has_points, 2:] = np.maximum.reduceat(self.points, first)
        return bounds

    def to_wkb(self) -> "pa.BinaryArray":
        """The outlines as WKB polygons; null without points."""
        import pyarrow as pa

        counts = self.num_points
        has_points = counts > 0
        num_written = np.where(has_points, counts + 1, 0)  # a ring of WKB is closed
        lengths = np.where(has_points, _HEADER.itemsize + POINT_BYTES * num_written, 0)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        data = np.empty(int(lengths.sum()), dtype=np.uint8)
        headers = np.empty(np.count_nonzero(has_points), dtype=_HEADER)
        headers["order"] = _LITTLE_ENDIAN
        headers["kind"] = _POLYGON
        headers["rings"] = 1
        headers["points"] = num_written[has_points]
        places = starts[has_points][:, None] + np.arange(_HEADER.itemsize)
        data[places] = headers.view(np.uint8).reshape(-1, _HEADER.itemsize)
        is_point = np.ones(len(data), dtype=bool)
        is_point[places] = False
        # the row of each written point: those of the ring, then its first again
        rows = np.arange(int(num_written.sum()))
        rows -= np.repeat(np.cumsum(num_written) - num_written, num_written)
        rows = np.where(rows == np.repeat(counts, num_written), 0, rows)
        rows += np.repeat(self.offsets[:-1], num_written)
        data[is_point] = self.points[rows].view(np.uint8).ravel()
        offsets = np.concatenate([[0], ends]).astype(np.int32)
        validity = None
        if not has_points.all():
            validity = pa.py_buffer(np.packbits(has_points, bitorder="little"))
        return pa.Array.from_buffers(
            pa.binary(),
            len(self),
            [validity, pa.py_buffer(offsets), pa.py_buffer(data)],
        )


@dataclass(frozen=True, slots=True)
class DecodedWkb:
    """Outlines of WKB geometries, and how many of these were more than one ring."""

    outlines: Outlines
    centers: Floats  # (N, 2): the place of a point; NaN for other geometries
    num_with_holes: int  # holes are left out
    num_in_pieces: int  # the largest piece is kept


def decode_wkb(column: "pa.Array") -> DecodedWkb:
    """Reads WKB: the outer ring of polygons, the largest piece of several, and points.

    Other and unreadable geometries have no points and no centre.

    Memory: twice the column.
    """
    import pyarrow as pa

    column = column.cast(pa.binary()) if column.type != pa.binary() else column
    column = column.fill_null(b"") if column.null_count else column
    offsets, data = _buffers(column)
    lengths = np.diff(offsets)
    is_simple = lengths >= _HEADER.itemsize
    places = offsets[:-1][is_simple][:, None] + np.arange(_HEADER.itemsize)
    headers = data[places].view(_HEADER)[:, 0]
    is_ring = headers["order"] == _LITTLE_ENDIAN
    is_ring &= headers["kind"] == _POLYGON
    is_ring &= headers["rings"] == 1
    num_points = headers["points"].astype(np.int64)
    is_ring &= lengths[is_simple] == _HEADER.itemsize + POINT_BYTES * num_points
    is_simple[is_simple] = is_ring
    if not is_simple.all():
        return _decode_by_shapely(column, is_simple)
    is_point = np.ones(len(data), dtype=bool)
    is_point[places] = False
    points = data[is_point].view("<f8").reshape(-1, 2)
    no_centers = np.full((len(column), 2), np.nan)
    return DecodedWkb(Outlines.of_counts(points, num_points), no_centers, 0, 0)


def _buffers(column: "pa.BinaryArray") -> tuple[Offsets, npt.NDArray[np.uint8]]:
    """Offsets and bytes of a column, the bytes from the first to the last that it uses."""
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
    return offsets - offsets[0], data[offsets[0] : offsets[-1]]


def _decode_by_shapely(column: "pa.BinaryArray", is_simple: Flags) -> DecodedWkb:
    """Decodes a column of which some geometries are not one ring."""
    import pyarrow as pa
    import shapely

    odd = np.flatnonzero(~is_simple)
    texts = column.to_numpy(zero_copy_only=False)
    geometries = shapely.from_wkb(texts[odd], on_invalid="ignore")
    centers = np.full((len(column), 2), np.nan)
    num_with_holes = 0
    num_in_pieces = 0
    is_empty = np.zeros(len(column), dtype=bool)
    for row, geometry in zip(odd.tolist(), geometries, strict=True):
        texts[row] = b""
        is_empty[row] = True
        if geometry is None or geometry.is_empty:
            continue
        if geometry.geom_type == "Point":
            centers[row] = geometry.x, geometry.y
            continue
        pieces = [part for part in shapely.get_parts(geometry) if part.area > 0]
        pieces = [part for part in pieces if part.geom_type == "Polygon"]
        if not pieces:
            continue
        largest = max(pieces, key=lambda part: float(part.area))
        num_in_pieces += len(pieces) > 1
        num_with_holes += len(largest.interiors) > 0
        ring = shapely.force_2d(shapely.Polygon(largest.exterior))
        texts[row] = shapely.to_wkb(ring, byte_order=_LITTLE_ENDIAN)
        is_empty[row] = False
    full = pa.array(texts[~is_empty], type=pa.binary())
    counts = np.zeros(len(column), dtype=np.int64)
    if not len(full):
        outlines = Outlines.empty(len(column))
    else:
        decoded = decode_wkb(full).outlines
        counts[~is_empty] = decoded.num_points
        outlines = Outlines.of_counts(decoded.points, counts)
    return DecodedWkb(outlines, centers, num_with_holes, num_in_pieces)
