"""Masks on either device: labels, small regions, dilation, opening.

Connectivity is 4 for what is removed or filled and 8 for what is counted, as scikit-image's and
HistoQC's defaults are.
"""

from dataclasses import dataclass

import numpy as np

from thinsection.arrays.namespace import Array, ArrayNamespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Size of the 8-connected regions of a mask; zeros if there are none.

    Attributes:
        count: how many.
        mean_area_px: mean area, px.
        max_area_px: largest area, px.
    """

    count: int
    mean_area_px: float
    max_area_px: int


def labelled(ns: ArrayNamespace, mask: Array, *, connectivity: int = 4) -> tuple[Array, int]:
    """Labels (H, W), 0 outside, and how many regions there are.

    Args:
        connectivity: 4, or 8 to join px that touch at a corner.
    """
    structure = ns.xp.ones((3, 3), dtype=bool) if connectivity == 8 else None
    labels, count = ns.ndimage.label(mask, structure=structure)
    return labels, int(count)


def drop_small(ns: ArrayNamespace, mask: Array, min_area_px: float) -> Array:
    """The mask without its 4-connected regions of fewer than min_area_px px."""
    labels, count = labelled(ns, mask)
    if count == 0:
        return mask.copy()
    keep = ns.xp.bincount(labels.ravel(), minlength=count + 1) >= min_area_px
    keep[0] = False
    return keep[labels]


def fill_small(ns: ArrayNamespace, mask: Array, min_area_px: float) -> Array:
    """The mask with its 4-connected holes of fewer than min_area_px px filled."""
    return ~drop_small(ns, ~mask, min_area_px)


def dilated_by_square(ns: ArrayNamespace, mask: Array, edge_px: int) -> Array:
    """The mask dilated by a square; an even square reaches one px less to the right and down."""
    structure = ns.xp.ones((edge_px, 1), dtype=bool)
    rows = ns.ndimage.binary_dilation(mask, structure=structure)
    return ns.ndimage.binary_dilation(rows, structure=structure.T)


def opened_by_disk(ns: ArrayNamespace, mask: Array, radius_px: float) -> Array:
    """The mask opened by a disk; outside the image counts as inside, so borders are kept."""
    disk = ns.xp.asarray(disk_footprint(radius_px))
    eroded = ns.ndimage.binary_erosion(mask, structure=disk, border_value=1)
    return ns.ndimage.binary_dilation(eroded, structure=disk)


def disk_footprint(radius_px: float) -> np.ndarray:
    """Bool (2r + 1, 2r + 1): px centres at most radius_px from the middle."""
    reach = int(radius_px)
    dy, dx = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    return np.asarray(dx**2 + dy**2 <= radius_px**2)


def measure_regions(ns: ArrayNamespace, mask: Array) -> Regions:
    """Number, mean and largest area of the 8-connected regions."""
    labels, count = labelled(ns, mask, connectivity=8)
    if count == 0:
        return Regions(count=0, mean_area_px=0.0, max_area_px=0)
    areas = ns.xp.bincount(labels.ravel(), minlength=count + 1)[1:]
    return Regions(
        count=count, mean_area_px=float(areas.sum()) / count, max_area_px=int(areas.max())
    )
