"""Disks whose rims are seen in a mask, whole or in part."""

from dataclasses import dataclass

import numpy as np

from thinsection.arrays.morphology import labelled
from thinsection.arrays.namespace import Array, ArrayNamespace

# Equal parts of a turn, in each of which a rim is seen or not.
_PARTS = 48
# Regions of fewer pixels have no circle.
_MIN_PIXELS = 12
# A pixel this near to a circle is on it: a share of the radius, or pixels if that is more.
_NEAR_SHARE = 0.12
_NEAR_PX = 2.0
# Share of a ring's pixels that is on its circle.
_MIN_ON_CIRCLE = 0.5
# Share of a circle that is inside the image.
_MIN_INSIDE = 0.4


def disks_of_rings(
    ns: ArrayNamespace, mask: Array, *, min_seen: float, max_radius_px: float
) -> Array:
    """The disks inside the regions of a mask that are rings or arcs, bool (H, W).

    A circle is fitted to each 8-connected region: the least squares of x² + y² = 2ax + 2by + c
    over its pixels (I. Kåsa, IEEE Transactions on Instrumentation and Measurement 25, 1976). The
    region is a ring if half of its pixels are on the circle, and enough of the circle is seen.

    Args:
        ns: device of the mask.
        mask: bool (H, W).
        min_seen: share of the circle that has pixels of the region, of what the image shows of it.
        max_radius_px: larger circles are no rings.

    Memory: 5 bytes a pixel, 80 a pixel that is true, and 1.3 kB a region.
    """
    xp = ns.xp
    labels, count = labelled(ns, mask, connectivity=8)
    disks = xp.zeros_like(mask)
    if count == 0:
        return disks
    pixels = _pixels(ns, labels, count)
    circles = _fitted(ns, pixels)
    on_circle, turn = _on_circle(ns, pixels, circles)
    in_part = (pixels.region * _PARTS + turn)[on_circle]
    seen = xp.bincount(in_part, minlength=(count + 1) * _PARTS) > 0
    angles = (xp.arange(_PARTS) + 0.5) * (2 * np.pi / _PARTS)
    rim_y = circles.y[:, None] + circles.radius[:, None] * xp.sin(angles)
    rim_x = circles.x[:, None] + circles.radius[:, None] * xp.cos(angles)
    height, width = mask.shape
    shown = (rim_y >= 0) & (rim_y < height) & (rim_x >= 0) & (rim_x < width)
    num_shown = shown.sum(axis=1)
    num_seen = (seen.reshape(-1, _PARTS) & shown).sum(axis=1)
    is_ring = (num_seen >= min_seen * num_shown) & (num_shown >= _MIN_INSIDE * _PARTS)
    is_ring &= pixels.sums(on_circle) >= _MIN_ON_CIRCLE * pixels.area
    is_ring &= (circles.radius <= max_radius_px) & (pixels.area >= _MIN_PIXELS)
    for number in xp.flatnonzero(is_ring).tolist():
        _draw_disk(
            ns,
            disks,
            float(circles.y[number]),
            float(circles.x[number]),
            float(circles.radius[number]),
        )
    return disks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pixels:
    """The N pixels of R - 1 regions; region 0 has none."""

    ns: ArrayNamespace
    # number of each pixel's region, (N,)
    region: Array
    # of each pixel from the middle of its region: whole numbers, so that sums are exact, (N,)
    y: Array
    x: Array
    # of each region, (R,)
    middle_y: Array
    middle_x: Array
    area: Array

    def sums(self, values: Array) -> Array:
        """Sum of (N,) over each region, (R,)."""
        return self.ns.xp.bincount(
            self.region, weights=values, minlength=len(self.area)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Circles:
    """The circle of each region in pixels of the image, (R,) each."""

    y: Array
    x: Array
    radius: Array


def _pixels(ns: ArrayNamespace, labels: Array, count: int) -> _Pixels:
    xp = ns.xp
    rows, columns = xp.nonzero(labels)
    region = labels[rows, columns]
    area = xp.bincount(region, minlength=count + 1)
    middles = []
    for places in (rows, columns):
        total = xp.bincount(region, weights=places, minlength=count + 1)
        middles.append(xp.rint(total / xp.maximum(area, 1)))
    return _Pixels(
        ns=ns,
        region=region,
        y=rows - middles[0][region],
        x=columns - middles[1][region],
        middle_y=middles[0],
        middle_x=middles[1],
        area=area,
    )


def _fitted(ns: ArrayNamespace, pixels: _Pixels) -> _Circles:
    """Solves the three normal equations of each region's circle."""
    xp = ns.xp
    squared = pixels.x**2 + pixels.y**2
    number = xp.maximum(pixels.area, 1)
    mean_y = pixels.sums(pixels.y) / number
    mean_x = pixels.sums(pixels.x) / number
    mean_squared = pixels.sums(squared) / number
    yy = pixels.sums(pixels.y**2) / number - mean_y**2
    xx = pixels.sums(pixels.x**2) / number - mean_x**2
    xy = pixels.sums(pixels.x * pixels.y) / number - mean_x * mean_y
    ys = pixels.sums(pixels.y * squared) / number - mean_y * mean_squared
    xs = pixels.sums(pixels.x * squared) / number - mean_x * mean_squared
    determinant = 2 * (xx * yy - xy**2)
    # the pixels of a straight line have none, and then a circle without an end
    determinant = xp.where(determinant > 1e-6, determinant, xp.nan)
    y = (ys * xx - xs * xy) / determinant
    x = (xs * yy - ys * xy) / determinant
    radius = xp.sqrt(mean_squared - 2 * (x * mean_x + y * mean_y) + x**2 + y**2)
    return _Circles(y=y + pixels.middle_y, x=x + pixels.middle_x, radius=radius)


def _on_circle(
    ns: ArrayNamespace, pixels: _Pixels, circles: _Circles
) -> tuple[Array, Array]:
    """Which pixels are on their region's circle, bool (N,), and in which part of its turn."""
    xp = ns.xp
    y = pixels.y + (pixels.middle_y - circles.y)[pixels.region]
    x = pixels.x + (pixels.middle_x - circles.x)[pixels.region]
    radius = circles.radius[pixels.region]
    near = xp.maximum(_NEAR_SHARE * radius, _NEAR_PX)
    on_circle = xp.abs(xp.hypot(y, x) - radius) < near
    turns = xp.where(on_circle, xp.arctan2(y, x) / (2 * np.pi), 0) % 1
    return on_circle, (turns * _PARTS).astype(int) % _PARTS


def _draw_disk(
    ns: ArrayNamespace, disks: Array, y: float, x: float, radius: float
) -> None:
    height, width = disks.shape
    top, bottom = max(0, int(y - radius)), min(height, int(y + radius) + 2)
    left, right = max(0, int(x - radius)), min(width, int(x + radius) + 2)
    rows = ns.xp.arange(top, bottom)[:, None] - y
    columns = ns.xp.arange(left, right) - x
    disks[top:bottom, left:right] |= rows**2 + columns**2 <= radius**2
