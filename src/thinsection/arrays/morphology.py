"""Masks on either device.

Regions that are removed or filled are 4-connected; regions that are counted are
8-connected.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.arrays.bands import row_bands
from thinsection.arrays.labels import RunRegions, find_regions
from thinsection.arrays.namespace import Array, ArrayNamespace

# edge of the largest blocks in which `depth` looks for the deepest pixel, a power of 4
_BLOCK_PX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRegions:
    """Regions of a mask of any device by a picture of labels; members as of `RunRegions`."""

    ns: ArrayNamespace
    picture: Array  # number of each pixel's region, 0 outside, (H, W)
    count: int

    def areas(self) -> Array:
        return self._count(self.picture)

    def hits(self, marked: Array) -> Array:
        return self._count(self.picture * marked)

    def moments(self) -> Array:
        xp = self.ns.xp
        sums = xp.zeros((6, self.count + 1))
        for band in row_bands(len(self.picture)):
            rows, columns = xp.nonzero(self.picture[band.inside])
            rows += band.inside.start
            region = self.picture[rows, columns]
            y = rows * 1.0
            x = columns * 1.0
            for index, weights in enumerate((None, y, x, y * y, x * x, x * y)):
                sums[index] += xp.bincount(
                    region, weights=weights, minlength=self.count + 1
                )
        return sums

    def at_border(self) -> Array:
        keep = self.ns.xp.zeros(self.count + 1, dtype=bool)
        picture = self.picture
        for side in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
            keep[side] = True
        keep[0] = False
        return keep

    def mask(self, keep: Array) -> Array:
        # an index by int32 is copied as int64, so labels are looked up band by band
        mask = self.ns.xp.empty(self.picture.shape, dtype=bool)
        keep = keep.copy()
        keep[0] = False
        for band in row_bands(len(mask)):
            mask[band.inside] = keep[self.picture[band.inside]]
        return mask

    def labels(self) -> Array:
        return self.picture

    def _count(self, numbers: Array) -> Array:
        """Pixels of each number but 0, (count + 1,)."""
        areas = self.ns.xp.zeros(self.count + 1, dtype=self.ns.xp.int64)
        for band in row_bands(len(numbers)):
            areas += self.ns.xp.bincount(
                numbers[band.inside].ravel(), minlength=self.count + 1
            )
        areas[0] = 0
        return areas


def regions_of(
    ns: ArrayNamespace, mask: Array, *, connectivity: int = 4
) -> RunRegions | LabelledRegions:
    """The connected regions of a mask; 8 also joins pixels at a corner.

    Memory: on a CPU up to 130 bytes per run, a row's longest stretch of pixels side by side; on a
        GPU 8 bytes per pixel.
    """
    if ns.xp is np:
        return find_regions(mask, corners=connectivity == 8)
    return labelled_regions(ns, mask, connectivity=connectivity)


def labelled_regions(
    ns: ArrayNamespace, mask: Array, *, connectivity: int = 4
) -> LabelledRegions:
    """The regions by SciPy or cupyx."""
    structure = ns.xp.ones((3, 3), dtype=bool) if connectivity == 8 else None
    picture, count = ns.ndimage.label(mask, structure=structure)
    return LabelledRegions(ns=ns, picture=picture, count=int(count))


def labelled(
    ns: ArrayNamespace, mask: Array, *, connectivity: int = 4
) -> tuple[Array, int]:
    """Labels (H, W), 0 outside, and their count; 8 also joins pixels at a corner."""
    regions = regions_of(ns, mask, connectivity=connectivity)
    return regions.labels(), regions.count


def drop_small(ns: ArrayNamespace, mask: Array, min_area_px: float) -> Array:
    """The mask without its 4-connected regions of fewer than min_area_px pixels."""
    regions = regions_of(ns, mask)
    return regions.mask(regions.areas() >= min_area_px)


def fill_small(ns: ArrayNamespace, mask: Array, min_area_px: float) -> Array:
    """The mask with its 4-connected holes of fewer than min_area_px pixels filled."""
    holes = drop_small(ns, ~mask, min_area_px)
    return ns.xp.logical_not(holes, out=holes)


def mostly(ns: ArrayNamespace, mask: Array, marked: Array, min_share: float) -> Array:
    """The 8-connected regions of a mask of which more than a share is marked."""
    regions = regions_of(ns, mask, connectivity=8)
    return regions.mask(regions.hits(marked) > min_share * regions.areas())


def at_border(ns: ArrayNamespace, mask: Array) -> Array:
    """The 4-connected regions of a mask that touch the picture's border."""
    regions = regions_of(ns, mask)
    return regions.mask(regions.at_border())


def spreads(ns: ArrayNamespace, sums: Array) -> Array:
    """Largest and least variance of the pixels of each region along an axis, px², (2, N).

    `sums` are the moments of the regions, (6, N).
    """
    xp = ns.xp
    area = xp.maximum(sums[0], 1)
    mean_y = sums[1] / area
    mean_x = sums[2] / area
    # a pixel has a spread of its own, 1/12 along each axis
    yy = sums[3] / area - mean_y**2 + 1 / 12
    xx = sums[4] / area - mean_x**2 + 1 / 12
    xy = sums[5] / area - mean_x * mean_y
    half = xp.sqrt(((yy - xx) / 2) ** 2 + xy**2)
    middle = (yy + xx) / 2
    return xp.stack([middle + half, middle - half])


def keep_elongated(
    ns: ArrayNamespace,
    mask: Array,
    elongation: float,
    min_area_px: float,
    max_width_px: float = math.inf,
) -> Array:
    """The 8-connected regions that are long for their mean width.

    The length is that of a bar with the region's spread, and the mean width is the area over
    the length: a region that bends back or crosses itself counts as wider. `elongation` is the
    least ratio of the two, and wider regions than `max_width_px` are left out.
    """
    xp = ns.xp
    regions = regions_of(ns, mask, connectivity=8)
    sums = regions.moments()
    area = xp.maximum(sums[0], 1)
    length = xp.sqrt(12 * spreads(ns, sums)[0])
    keep = (length * length / area >= elongation) & (area >= min_area_px)
    keep &= area / length <= max_width_px
    return regions.mask(keep)


def dilated_by_square(ns: ArrayNamespace, mask: Array, edge_px: int) -> Array:
    """The mask dilated by a square.

    An even square reaches one pixel less to the right and down.
    """
    before = edge_px // 2
    after = (edge_px - 1) // 2
    down = _any_between(ns, mask, -after, before)
    return _any_between(ns, down.T, -after, before).T


def dilated_along(ns: ArrayNamespace, mask: Array, length_px: int, axis: int) -> Array:
    """The mask dilated by a line along rows (axis 1) or columns (axis 0)."""
    before = length_px // 2
    after = length_px - 1 - before
    if axis == 1:
        return _any_between(ns, mask.T, -before, after).T
    return _any_between(ns, mask, -before, after)


def inner(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Pixels of a mask of the host whose four neighbours are in it; none at the border."""
    padded = np.pad(mask, 1)
    beside = padded[1:-1, :-2] & padded[1:-1, 2:]
    return np.asarray(mask & beside & padded[:-2, 1:-1] & padded[2:, 1:-1])


def opened_by_disk(ns: ArrayNamespace, mask: Array, radius_px: float) -> Array:
    """The mask opened by a disk; outside counts as inside, so that borders are kept."""
    eroded = ~dilated_by_disk(ns, ~mask, radius_px)
    return dilated_by_disk(ns, eroded, radius_px)


def dilated_by_disk(ns: ArrayNamespace, mask: Array, radius_px: float) -> Array:
    """The mask dilated by a disk.

    It is the union over the disk's columns, each a run of pixels moved sideways.

    Memory: the result, and 5 bytes per pixel of a band.
    """
    halves = disk_footprint(radius_px).sum(axis=0) // 2
    reach = len(halves) // 2
    out = ns.xp.empty_like(mask)
    for band in row_bands(len(mask), reach):
        out[band.inside] = _dilated_whole(ns, mask[band.around], halves)[band.own]
    return out


def _dilated_whole(
    ns: ArrayNamespace, mask: Array, halves: npt.NDArray[np.int64]
) -> Array:
    """The mask dilated by a disk whose columns reach `halves` pixels up and down."""
    width = mask.shape[1]
    reach = len(halves) // 2
    padded = ns.xp.pad(mask, ((0, 0), (reach, reach)))
    out = ns.xp.zeros_like(mask)
    # columns of one length share a run, and only one run is in memory
    for half in sorted(set(halves.tolist())):
        run = _any_between(ns, padded, -half, half)
        for left in np.flatnonzero(halves == half).tolist():
            out |= run[:, left : left + width]
    return out


def _any_between(ns: ArrayNamespace, mask: Array, first: int, last: int) -> Array:
    """True where any of the rows at offsets first (<= 0) to last (>= 0) is.

    The rows that are joined double at each step.
    """
    length = last - first + 1
    padded = ns.xp.zeros((mask.shape[0] + length - 1, *mask.shape[1:]), dtype=bool)
    padded[-first : -first + mask.shape[0]] = mask
    joined = 1  # rows that each row of `padded` stands for, from itself on
    while joined < length:
        step = min(joined, length - joined)
        padded = padded[:-step] | padded[step:]
        joined += step
    return padded


def disk_footprint(radius_px: float) -> npt.NDArray[np.bool_]:
    """Bool (2r + 1, 2r + 1): pixel centres at most radius_px from the middle."""
    reach = int(radius_px)
    dy, dx = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    return np.asarray(dx**2 + dy**2 <= radius_px**2)


def depth(mask: npt.NDArray[np.bool_]) -> float:
    """Largest distance of a pixel of a mask of the host to a pixel outside of it, in px.

    All that lies beyond the picture is outside. The greatest value of SciPy's
    `distance_transform_edt` of the padded mask, without its import.

    A pixel is deeper than another by at most the distance between the two. So the depth of one
    pixel rules out most blocks of pixels.

    Memory: 50 bytes per pixel.
    """
    padded = np.pad(mask, 1)
    squared = _distances_along(padded) ** 2  # in the pixel's own column
    # no pixel is further from the outside than along its row or column
    most = np.minimum(squared, _distances_along(padded.T).T ** 2)
    height, width = most.shape
    row, column = np.divmod(np.array([most.argmax()]), width)
    deepest = int(_squared_depths(squared, most, row, column)[0])
    # top left pixels of the blocks that may hold a deeper pixel
    size = _BLOCK_PX
    row, column = _grid(height, width, size)
    while size > 1:
        half = size // 2
        center_row = (row + half).clip(max=height - 1)
        center_column = (column + half).clip(max=width - 1)
        reach = math.ceil(math.hypot(half, half))
        least = max(0, math.isqrt(deepest) - reach) ** 2
        depths = _squared_depths(squared, most, center_row, center_column, least)
        deepest = max(deepest, int(depths.max(initial=0)))
        may_be_deeper = np.sqrt(depths) + reach > math.sqrt(deepest)
        size //= 4
        down, right = _grid(4 * size, 4 * size, size)
        row = np.add.outer(row[may_be_deeper], down).ravel()
        column = np.add.outer(column[may_be_deeper], right).ravel()
        is_inside = (row < height) & (column < width)
        row = row[is_inside]
        column = column[is_inside]
    may_be_deeper = most[row, column] > deepest
    row = row[may_be_deeper]
    column = column[may_be_deeper]
    depths = _squared_depths(squared, most, row, column, deepest)
    return math.sqrt(depths.max(initial=deepest))


def _grid(
    height: int, width: int, step: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Rows and columns of each `step`-th pixel of a picture in both directions."""
    rows = np.arange(0, height, step)
    columns = np.arange(0, width, step)
    return rows.repeat(len(columns)), np.tile(columns, len(rows))


def _squared_depths(
    squared: npt.NDArray[np.int64],
    most: npt.NDArray[np.int64],
    row: npt.NDArray[np.intp],
    column: npt.NDArray[np.intp],
    least: int = 0,
) -> npt.NDArray[np.int64]:
    """Squared distances of some pixels to the outside, (pixels,).

    Args:
        squared: squared distance of each pixel along its column, (H, W).
        most: the distance is known to be at most this, (H, W).
        row: rows of the pixels.
        column: columns of the pixels.
        least: a pixel that is not deeper gets this value, or its distance.
    """
    last = squared.shape[1] - 1
    depths = np.asarray(most[row, column])
    unfinished = np.arange(len(row))
    distance = depths
    step = 1
    while len(unfinished):
        for offset in (-step, step):
            # beyond the picture its last column stands for a nearer one, which was looked at
            beside = (column + offset).clip(0, last)
            distance = np.minimum(distance, squared[row, beside] + step**2)
        depths[unfinished] = np.maximum(distance, least)
        step += 1
        # columns that are further away than the outside cannot be nearer
        is_open = (distance > least) & (distance > step**2)
        unfinished = unfinished[is_open]
        row = row[is_open]
        column = column[is_open]
        distance = distance[is_open]
    return depths


def _distances_along(padded: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Distance of each pixel to the nearest one of its column that is False, in px."""
    place = np.arange(len(padded))[:, None]
    above = np.maximum.accumulate(np.where(padded, 0, place), axis=0)
    below = np.where(padded, len(padded), place)[::-1]
    below = np.minimum.accumulate(below, axis=0)[::-1]
    return np.asarray(np.minimum(place - above, below - place))


def region_areas(ns: ArrayNamespace, mask: Array) -> Array:
    """Pixels of each of the 8-connected regions of a mask, (regions,)."""
    return regions_of(ns, mask, connectivity=8).areas()[1:]
