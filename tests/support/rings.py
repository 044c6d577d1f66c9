"""Rings that are drawn, for tests."""

import numpy as np
from skimage.draw import ellipse

from thinsection.types import MaskArray

SHAPE = (200, 240)


def disk_of(
    y: float,
    x: float,
    radius: float,
    *,
    aspect: float = 1.0,
    turned: float = 0.0,
    wider_px: float = 1.5,
) -> MaskArray:
    """An ellipse with the area of a circle of this radius, with both half-axes `wider_px` longer.

    Its longer axis is `aspect` times the shorter one; `turned` is in radians.
    """
    mask = np.zeros(SHAPE, bool)
    axes = (radius / aspect**0.5 + wider_px, radius * aspect**0.5 + wider_px)
    mask[ellipse(y, x, *axes, shape=SHAPE, rotation=-turned)] = True
    return mask


def ring(
    y: float,
    x: float,
    radius: float,
    *,
    aspect: float = 1.0,
    turned: float = 0.0,
    degrees: tuple[float, float] = (0, 360),
    width_px: float = 3.0,
) -> MaskArray:
    """A ring between two angles from its centre."""
    half = width_px / 2
    outer = disk_of(y, x, radius, aspect=aspect, turned=turned, wider_px=half)
    inner = disk_of(y, x, radius, aspect=aspect, turned=turned, wider_px=-half)
    rows, columns = np.indices(SHAPE)
    angle = np.degrees(np.arctan2(rows - y, columns - x)) % 360
    return outer & ~inner & (angle >= degrees[0]) & (angle <= degrees[1])
