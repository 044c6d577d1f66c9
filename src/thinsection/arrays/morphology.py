"""Masks on either device: 4-connected for what is removed or filled, 8-connected for counts."""

import numpy as np

from thinsection.arrays.namespace import Array, ArrayNamespace

_BAND_ROWS = 256  # that are looked at at once


def labelled(
    ns: ArrayNamespace, mask: Array, *, connectivity: int = 4
) -> tuple[Array, int]:
    """Labels (H, W), 0 outside, and how many there are; connectivity 8 joins px at a corner."""
    structure = ns.xp.ones((3, 3), dtype=bool) if connectivity == 8 else None
    labels, count = ns.ndimage.label(mask, structure=structure)
    return labels, int(count)


def drop_small(ns: ArrayNamespace, mask: Array, min_area_px: float) -> Array:
    """The mask without its 4-connected regions of fewer than min_area_px px."""
    labels, count = labelled(ns, mask)
    keep = ns.xp.bincount(labels.ravel(), minlength=count + 1) >= min_area_px
    keep[0] = False
    return keep[labels]


def fill_small(ns: ArrayNamespace, mask: Array, min_area_px: float) -> Array:
    """The mask with its 4-connected holes of fewer than min_area_px px filled."""
    return ~drop_small(ns, ~mask, min_area_px)


def mostly(ns: ArrayNamespace, mask: Array, marked: Array, min_share: float) -> Array:
    """The 8-connected regions of a mask of which so large a share is marked."""
    labels, count = labelled(ns, mask, connectivity=8)
    hits = ns.xp.bincount(labels[marked & mask], minlength=count + 1)
    keep = hits > min_share * ns.xp.bincount(labels.ravel(), minlength=count + 1)
    keep[0] = False
    return keep[labels]


def keep_elongated(
    ns: ArrayNamespace, mask: Array, elongation: float, min_area_px: float
) -> Array:
    """The 8-connected regions whose length, by their spread, is so many times their mean width."""
    xp, (labels, count) = ns.xp, labelled(ns, mask, connectivity=8)
    if count == 0:
        return mask.copy()
    sums = xp.zeros((6, count + 1))
    for top in range(
        0, len(labels), _BAND_ROWS
    ):  # sums of whole numbers: exact in any order
        rows, columns = xp.nonzero(labels[top : top + _BAND_ROWS])
        region, y, x = labels[top + rows, columns], (top + rows) * 1.0, columns * 1.0
        for n, weights in enumerate((None, y, x, y * y, x * x, x * y)):
            sums[n] += xp.bincount(region, weights=weights, minlength=count + 1)
    area = xp.maximum(sums[0], 1)
    mean_y, mean_x = sums[1] / area, sums[2] / area
    yy, xx = sums[3] / area - mean_y**2 + 1 / 12, sums[4] / area - mean_x**2 + 1 / 12
    xy = sums[5] / area - mean_x * mean_y
    spread = xp.sqrt(((yy - xx) / 2) ** 2 + xy**2)
    length = xp.sqrt(12 * ((yy + xx) / 2 + spread))
    keep = (length * length / area >= elongation) & (area >= min_area_px)
    keep[0] = False
    return keep[labels]


def dilated_by_square(ns: ArrayNamespace, mask: Array, edge_px: int) -> Array:
    """The mask dilated by a square; an even square reaches one px less to the right and down."""
    before, after = edge_px // 2, (edge_px - 1) // 2
    down = _any_between(ns, mask, -after, before)
    return _any_between(ns, down.T, -after, before).T


def opened_by_disk(ns: ArrayNamespace, mask: Array, radius_px: float) -> Array:
    """The mask opened by a disk; outside the image counts as inside, so borders are kept."""
    return dilated_by_disk(ns, ~dilated_by_disk(ns, ~mask, radius_px), radius_px)


def dilated_by_disk(ns: ArrayNamespace, mask: Array, radius_px: float) -> Array:
    """The mask dilated by a disk: the union of its columns, each a run of px moved sideways."""
    disk, width = disk_footprint(radius_px), mask.shape[1]
    padded = ns.xp.pad(mask, ((0, 0), (len(disk) // 2,) * 2))
    runs: dict[int, Array] = {}
    out = ns.xp.zeros_like(mask)
    for left, column in enumerate(disk.T):
        half = int(column.sum()) // 2
        if half not in runs:
            runs[half] = _any_between(ns, padded, -half, half)
        out |= runs[half][:, left : left + width]
    return out


def _any_between(ns: ArrayNamespace, mask: Array, first: int, last: int) -> Array:
    """True where any of the rows at offsets first (<= 0) to last (>= 0) is, in log2 steps."""
    length = last - first + 1
    padded = ns.xp.zeros((mask.shape[0] + length - 1, *mask.shape[1:]), dtype=bool)
    padded[-first : -first + mask.shape[0]] = mask
    have = 1  # rows that each row of `padded` stands for, from itself on
    while have < length:
        step = min(have, length - have)
        padded = padded[:-step] | padded[step:]
        have += step
    return padded


def disk_footprint(radius_px: float) -> np.ndarray:
    """Bool (2r + 1, 2r + 1): px centres at most radius_px from the middle."""
    reach = int(radius_px)
    dy, dx = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    return np.asarray(dx**2 + dy**2 <= radius_px**2)


def region_areas(ns: ArrayNamespace, mask: Array) -> Array:
    """Px of each of the 8-connected regions of a mask, (regions,)."""
    labels, count = labelled(ns, mask, connectivity=8)
    return ns.xp.bincount(labels.ravel(), minlength=count + 1)[1:]
