"""Masks on either device.

Regions that are removed or filled are 4-connected; regions that are counted are
8-connected.
"""

import math

import numpy as np
import numpy.typing as npt

from thinsection.arrays.bands import row_bands
from thinsection.arrays.labels import label_regions
from thinsection.arrays.namespace import Array, ArrayNamespace


def labelled(
    ns: ArrayNamespace, mask: Array, *, connectivity: int = 4
) -> tuple[Array, int]:
    """Labels (H, W), 0 outside, and their count; 8 also joins pixels at a corner."""
    if ns.xp is np:
        return label_regions(mask, corners=connectivity == 8)
    structure = ns.xp.ones((3, 3), dtype=bool) if connectivity == 8 else None
    labels, count = ns.ndimage.label(mask, structure=structure)
    return labels, int(count)


def drop_small(ns: ArrayNamespace, mask: Array, min_area_px: float) -> Array:
    """The mask without its 4-connected regions of fewer than min_area_px pixels."""
    labels, count = labelled(ns, mask)
    keep = _label_areas(ns, labels, count) >= min_area_px
    return regions_of(ns, labels, keep)


def regions_of(ns: ArrayNamespace, labels: Array, keep: Array) -> Array:
    """The regions whose labels are True in `keep`, (count + 1,); label 0 is outside."""
    keep = keep.copy()
    keep[0] = False
    # an index by int32 is copied as int64, so labels are looked up band by band
    mask = ns.xp.empty(labels.shape, dtype=bool)
    for band in row_bands(len(labels)):
        mask[band.inside] = keep[labels[band.inside]]
    return mask


def _label_areas(ns: ArrayNamespace, labels: Array, count: int) -> Array:
    """Pixels of each label, (count + 1,)."""
    areas = ns.xp.zeros(count + 1, dtype=ns.xp.int64)
    for band in row_bands(len(labels)):
        areas += ns.xp.bincount(labels[band.inside].ravel(), minlength=count + 1)
    return areas


def fill_small(ns: ArrayNamespace, mask: Array, min_area_px: float) -> Array:
    """The mask with its 4-connected holes of fewer than min_area_px pixels filled."""
    return ~drop_small(ns, ~mask, min_area_px)


def mostly(ns: ArrayNamespace, mask: Array, marked: Array, min_share: float) -> Array:
    """The 8-connected regions of a mask of which more than a share is marked."""
    labels, count = labelled(ns, mask, connectivity=8)
    hits = ns.xp.bincount(labels[marked & mask], minlength=count + 1)
    keep = hits > min_share * _label_areas(ns, labels, count)
    return regions_of(ns, labels, keep)


def at_border(ns: ArrayNamespace, mask: Array) -> Array:
    """The 4-connected regions of a mask that touch the picture's border."""
    labels, count = labelled(ns, mask)
    keep = ns.xp.zeros(count + 1, dtype=bool)
    for side in (labels[0], labels[-1], labels[:, 0], labels[:, -1]):
        keep[side] = True
    return regions_of(ns, labels, keep)


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
    labels, count = labelled(ns, mask, connectivity=8)
    if count == 0:
        return mask.copy()
    # per region: 1, y, x, y², x², xy; sums of whole numbers are exact in any order
    sums = xp.zeros((6, count + 1))
    for band in row_bands(len(labels)):
        rows, columns = xp.nonzero(labels[band.inside])
        rows += band.inside.start
        region = labels[rows, columns]
        y = rows * 1.0
        x = columns * 1.0
        for index, weights in enumerate((None, y, x, y * y, x * x, x * y)):
            sums[index] += xp.bincount(region, weights=weights, minlength=count + 1)
    area = xp.maximum(sums[0], 1)
    mean_y = sums[1] / area
    mean_x = sums[2] / area
    # a pixel has a spread of its own, 1/12 along each axis
    yy = sums[3] / area - mean_y**2 + 1 / 12
    xx = sums[4] / area - mean_x**2 + 1 / 12
    xy = sums[5] / area - mean_x * mean_y
    spread = xp.sqrt(((yy - xx) / 2) ** 2 + xy**2)
    length = xp.sqrt(12 * ((yy + xx) / 2 + spread))
    keep = (length * length / area >= elongation) & (area >= min_area_px)
    keep &= area / length <= max_width_px
    return regions_of(ns, labels, keep)


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
    """
    disk = disk_footprint(radius_px)
    width = mask.shape[1]
    reach = len(disk) // 2
    padded = ns.xp.pad(mask, ((0, 0), (reach, reach)))
    halves = disk.sum(axis=0) // 2
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


def region_areas(ns: ArrayNamespace, mask: Array) -> Array:
    """Pixels of each of the 8-connected regions of a mask, (regions,)."""
    labels, count = labelled(ns, mask, connectivity=8)
    return _label_areas(ns, labels, count)[1:]
