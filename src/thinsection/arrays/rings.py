"""Disks whose rims are seen in a mask, whole or in part."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.types import MaskArray

# Equal parts of a turn, in each of which a rim is seen or not.
_PARTS = 48
# The angle in the middle of each part, (_PARTS,).
_ANGLES = (np.arange(_PARTS) + 0.5) * (2 * np.pi / _PARTS)
# Smaller rings are not looked for.
_LEAST_RADIUS_PX = 7.0
# Radii that are looked for, each as a multiple of the one before.
_NEXT_RADIUS = 1.12
# Width of a cell of possible centres: a share of the radius, or pixels if that is more.
_CELL_SHARE = 0.2
_CELL_PX = 3.0
# Votes for a likely circle, as a share of its circumference in pixels.
_LEAST_VOTES = 0.5
# The likeliest circles are looked at, and no more.
_MOST_CIRCLES = 300
# A pixel this near to an ellipse is on its rim: a share of the radius, or pixels if that is more.
_NEAR_SHARE = 0.15
_NEAR_PX = 2.0
# Mean width of the rim in a part that is seen; a few spots are less.
_LEAST_WIDTH_PX = 0.5
# Times that an ellipse is fitted again to the pixels on its rim.
_FITS = 4
# How firmly a fit keeps the shape that the ellipse has: it counts as this many points of its rim.
_FIRMNESS = 1.0
# Of an ellipse: the longer axis over the shorter one.
_MAX_ASPECT = 2.0
# With fewer parts that have pixels, there is no fit.
_LEAST_PARTS = 5
# Share of an ellipse that is inside the image.
_LEAST_SHOWN = 0.4
# Around a pixel, where the direction of its line is measured.
_REACH_PX = 4
# Of the spread of a line's pixels along it and across it: their difference over their sum.
_LEAST_DIRECTED = 0.25
# Pixels whose surroundings are looked at together.
_CHUNK = 4096

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ellipse:
    """Its unit plane is the image, moved and stretched so that the ellipse is the unit circle."""

    centre: Floats  # (y, x)
    to_unit: Floats  # (2, 2), of (y, x)

    @property
    def from_unit(self) -> Floats:
        return np.linalg.inv(self.to_unit).astype(np.float64)

    @property
    def radius(self) -> float:
        """Of the circle with the same area, in pixels."""
        return float(np.linalg.det(self.from_unit) ** 0.5)

    @property
    def near(self) -> float:
        """Half the width of the rim in the unit plane."""
        return max(_NEAR_SHARE, _NEAR_PX / self.radius)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rim:
    """The pixels near an ellipse, by parts of its turn, in the unit plane."""

    # of every pixel from the centre, (N,)
    distance: Floats
    # pixels on the rim
    num_pixels: int
    # parts with enough of them, (_PARTS,)
    seen: npt.NDArray[np.bool_]
    # distance of the rim's middle and of its outer edge in each part that is seen, (S,)
    middle: Floats
    edge: Floats


def disks_of_rings(
    mask: MaskArray, *, min_seen: float, max_radius_px: float
) -> MaskArray:
    """The insides of round rings, also of those that are seen in part, bool (H, W), on a CPU.

    Each pixel votes for the centres of circles through it, which lie across its line (C. Kimme,
    D. Ballard and J. Sklansky, Communications of the ACM 18, 1975). The likeliest circles become
    ellipses that fit the pixels near them. Arcs of one ellipse count together, wherever they are,
    and the inside of a ring ends at the ring's own pixels.

    Args:
        mask: bool (H, W).
        min_seen: share of the ellipse near which there are pixels, of what the image shows of it.
        max_radius_px: larger ones are no rings: radius of the circle with the area of the ellipse.

    Memory: 5 bytes a pixel, and 150 a pixel that is true.
    """
    disks = np.zeros_like(mask)
    pixels = np.argwhere(mask).astype(np.float64)
    for circle in _likely_circles(mask, max_radius_px):
        ellipse = _fitted(pixels, circle)
        if ellipse is None or ellipse.radius > max_radius_px:
            continue
        rim = _rim_of(pixels, ellipse)
        if _is_ring(rim, ellipse, mask.shape, min_seen):
            _fill(disks, ellipse, rim)
            # they are no part of a second ring
            pixels = pixels[rim.distance > 1 + ellipse.near]
    return disks


def _likely_circles(mask: MaskArray, max_radius_px: float) -> list[_Ellipse]:
    """Circles with many votes, the most first."""
    pixels, across = _directions(mask)
    found: list[tuple[float, _Ellipse]] = []
    radius = _LEAST_RADIUS_PX
    while radius <= max_radius_px * _NEXT_RADIUS:
        for votes, centre in _crowded_cells(pixels, across, radius, mask.shape):
            circle = _Ellipse(centre=centre, to_unit=np.eye(2) / radius)
            found.append((votes / (2 * np.pi * radius), circle))
        radius *= _NEXT_RADIUS
    found.sort(key=lambda pair: -pair[0])
    return [circle for _, circle in found[:_MOST_CIRCLES]]


def _directions(mask: MaskArray) -> tuple[Floats, Floats]:
    """Pixels that lie on a line, and the direction across it, (y, x), both float64 (M, 2).

    The direction is that in which the pixels around vary least. Where they vary alike in all
    directions, there is no line.
    """
    rows, columns = np.nonzero(mask)
    dy, dx = (
        offsets.ravel()
        for offsets in np.mgrid[-_REACH_PX : _REACH_PX + 1, -_REACH_PX : _REACH_PX + 1]
    )
    powers = np.stack([np.ones_like(dy), dy, dx, dy * dy, dx * dx, dy * dx], axis=1)
    padded = np.pad(mask, _REACH_PX)
    is_line = np.empty(len(rows), dtype=bool)
    across = np.empty((len(rows), 2))
    for start in range(0, len(rows), _CHUNK):
        part = slice(start, start + _CHUNK)
        around = padded[
            rows[part, None] + _REACH_PX + dy, columns[part, None] + _REACH_PX + dx
        ]
        sums = around.astype(np.float32) @ powers.astype(np.float32)
        number, y, x, yy, xx, xy = sums.astype(np.float64).T
        # a pixel has a spread of its own, 1/12 along each axis
        yy = yy / number - (y / number) ** 2 + 1 / 12
        xx = xx / number - (x / number) ** 2 + 1 / 12
        xy = xy / number - y * x / number**2
        is_line[part] = np.hypot(yy - xx, 2 * xy) > _LEAST_DIRECTED * (yy + xx)
        along = 0.5 * np.arctan2(2 * xy, xx - yy)
        across[part] = np.stack([np.cos(along), -np.sin(along)], axis=1)
    pixels = np.stack([rows[is_line], columns[is_line]], axis=1).astype(np.float64)
    return pixels, across[is_line]


def _crowded_cells(
    pixels: Floats, across: Floats, radius: float, shape: tuple[int, int]
) -> Iterator[tuple[int, Floats]]:
    """Votes and middle, (y, x), of each cell with enough votes.

    Four grids, shifted by half a cell, so that one of them has any centre well inside a cell.
    """
    cell = max(_CELL_PX, _CELL_SHARE * radius)
    # a centre may lie outside the image
    height = int((shape[0] + 2 * radius) / cell) + 2
    width = int((shape[1] + 2 * radius) / cell) + 2
    for shift in itertools.product((0.0, 0.5), (0.0, 0.5)):
        votes = np.zeros(height * width, dtype=np.int64)
        for side in (radius, -radius):
            places = (pixels + side * across + radius) / cell + shift
            rows, columns = places.astype(np.int64).T
            is_in = (places >= 0).all(axis=1) & (rows < height) & (columns < width)
            numbers = rows[is_in] * width + columns[is_in]
            votes += np.bincount(numbers, minlength=height * width)
        for number in np.flatnonzero(votes >= _LEAST_VOTES * 2 * np.pi * radius):
            middle = np.array(divmod(int(number), width)) + 0.5 - shift
            yield int(votes[number]), middle * cell - radius


def _rim_of(pixels: Floats, ellipse: _Ellipse) -> _Rim:
    y, x = ellipse.to_unit @ (pixels - ellipse.centre).T
    distance = np.hypot(y, x)
    is_near = np.abs(distance - 1) < ellipse.near
    turns = np.arctan2(y[is_near], x[is_near]) / (2 * np.pi) % 1
    part = (turns * _PARTS).astype(np.int64) % _PARTS
    count = np.bincount(part, minlength=_PARTS)
    total = np.bincount(part, weights=distance[is_near], minlength=_PARTS)
    # pixels of a line of 1 px in a part
    length = 2 * np.pi / _PARTS * ellipse.radius
    seen = count >= max(1.0, _LEAST_WIDTH_PX * length)
    middle = total[seen] / count[seen]
    width = count[seen] / length / ellipse.radius
    return _Rim(
        distance=distance,
        num_pixels=len(part),
        seen=seen,
        middle=middle,
        edge=middle + width / 2,
    )


def _fitted(pixels: Floats, ellipse: _Ellipse) -> _Ellipse | None:
    """The ellipse through the pixels near it; None if there are too few, or if it is too long.

    Each part of the turn has one point, so that thick parts count no more than thin ones.
    """
    for _ in range(_FITS):
        rim = _rim_of(pixels, ellipse)
        if np.count_nonzero(rim.seen) < _LEAST_PARTS:
            return None
        directions = np.stack([np.sin(_ANGLES), np.cos(_ANGLES)], axis=1)
        fit = _fit_of_points(rim.middle[:, None] * directions[rim.seen])
        if fit is None:
            return None
        ellipse = _Ellipse(
            centre=ellipse.centre + ellipse.from_unit @ fit.centre,
            to_unit=fit.to_unit @ ellipse.to_unit,
        )
        if np.linalg.cond(ellipse.to_unit) > _MAX_ASPECT:
            return None
    return ellipse


def _fit_of_points(points: Floats) -> _Ellipse | None:
    """The ellipse through points near the unit circle, (y, x), (P, 2); None: no ellipse fits.

    The fit is the least squares of x² + y² = a(x² - y²) + 2bxy + 2cx + 2dy + e. With a = b = 0 it
    is that of a circle (I. Kåsa, IEEE Transactions on Instrumentation and Measurement 25, 1976).
    """
    y, x = points.T
    equations = [x * x - y * y, 2 * x * y, 2 * x, 2 * y, np.ones_like(y)]
    # two more: a = 0 and b = 0
    kept = _FIRMNESS * np.eye(2, 5)
    (a, b, c, d, e), *_ = np.linalg.lstsq(
        np.concatenate([np.stack(equations, axis=1), kept]),
        np.concatenate([x * x + y * y, np.zeros(2)]),
        rcond=None,
    )
    if np.hypot(a, b) >= 1:
        return None
    # the same as p·Sp - 2p·t = e for a point p, and (p - centre)·S(p - centre) = e + t·centre
    shape, t = np.array([[1 + a, -b], [-b, 1 - a]]), np.array([d, c])
    centre = np.linalg.solve(shape, t)
    scale = e + t @ centre
    if scale <= 0:
        return None
    to_unit = np.linalg.cholesky(shape).T / np.sqrt(scale)
    return _Ellipse(centre=centre, to_unit=to_unit)


def _is_ring(
    rim: _Rim, ellipse: _Ellipse, shape: tuple[int, int], min_seen: float
) -> bool:
    around = np.stack([np.sin(_ANGLES), np.cos(_ANGLES)])
    y, x = ellipse.from_unit @ around + ellipse.centre[:, None]
    shown = (y >= 0) & (y < shape[0]) & (x >= 0) & (x < shape[1])
    num_shown = np.count_nonzero(shown)
    if num_shown < _LEAST_SHOWN * _PARTS:
        return False
    inside = np.count_nonzero(rim.distance < 1 - ellipse.near)
    # a filled disk is no ring
    is_empty = inside <= rim.num_pixels
    return bool(is_empty and np.count_nonzero(rim.seen & shown) >= min_seen * num_shown)


def _fill(disks: MaskArray, ellipse: _Ellipse, rim: _Rim) -> None:
    """Fills what the ring's pixels enclose; between them, its edge is interpolated."""
    reach = rim.edge.max() * np.linalg.norm(ellipse.from_unit, axis=1)
    top, left = np.maximum(0, np.floor(ellipse.centre - reach)).astype(int)
    bottom, right = np.maximum(0, np.ceil(ellipse.centre + reach) + 1).astype(int)
    window = disks[top:bottom, left:right]
    rows, columns = np.indices(window.shape)
    places = np.stack([rows + top, columns + left])
    from_centre = places - ellipse.centre[:, None, None]
    y, x = np.tensordot(ellipse.to_unit, from_centre, axes=1)
    edge = np.interp(np.arctan2(y, x), _ANGLES[rim.seen], rim.edge, period=2 * np.pi)
    window |= np.hypot(y, x) <= edge
