"""Finds rings in a mask, whole or in part, and fills them to disks."""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.types import MaskArray

# A full turn is divided into this many equal sectors. In each, the rim is seen or not.
_SECTORS = 48
# Angle of the middle of each sector, (_SECTORS,), and its direction, (y, x), (_SECTORS, 2).
_ANGLES = (np.arange(_SECTORS) + 0.5) * (2 * np.pi / _SECTORS)
_DIRECTIONS = np.stack([np.sin(_ANGLES), np.cos(_ANGLES)], axis=1)
# A smaller ring cannot be told from a spot.
_LEAST_RADIUS_PX = 3.0
# Ratio of each radius that is tried to the radius before it.
_NEXT_RADIUS = 1.12
# Width of a cell in which votes for centres are counted: the larger of a share of the radius and
# a number of pixels.
_CELL_SHARE = 0.2
_CELL_PX = 3.0
# Least votes for a circle, as a share of its whole circumference in pixels. A rim 1 px wide is
# therefore found only if half of it has pixels, even if `min_seen` is less.
_LEAST_VOTES = 0.5
# Two circles of the same radius are alike if their centres are nearer than this share of the
# radius. Of circles that are alike, only the circle with the most votes is fitted.
_ALIKE_SHARE = 0.1
# Largest number of circles that are fitted: those with the most votes.
_MOST_CIRCLES = 2000
# A pixel is on the rim of an ellipse if it is nearer than this: the larger of a share of the radius
# and a number of pixels.
_NEAR_SHARE = 0.15
_NEAR_PX = 2.0
# Least mean width of the rim in a sector that counts as seen. A few spots are less.
_LEAST_WIDTH_PX = 0.5
# Number of times that an ellipse is fitted again to the pixels on its rim.
_FITS = 4
# Ridge weight of the coefficients a and b in `_fit_of_points`, which turn a circle into an ellipse,
# in units of one rim point. It keeps a fit of few points near the ellipse of the fit before.
_RIDGE_WEIGHT = 1.0
# Least number of seen sectors for a fit.
_LEAST_SECTORS = 5
# Longest ellipse: its longer axis over its shorter one.
_MAX_ASPECT = 2.0
# Least share of an ellipse that is inside the image.
_LEAST_SHOWN = 0.4
# Largest share of a ring's inside that has pixels. A filled disk is no ring.
_MOST_FILLED = 0.5
# Half the edge of the window in which the direction of the stroke through a pixel is measured.
_REACH_PX = 4
# A pixel is on a stroke if (variance along - variance across) / (their sum) is more than this.
_LEAST_DIRECTED = 0.25
# Number of pixels whose windows are read at once.
_CHUNK = 1024

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ellipse:
    """An ellipse: its centre, and the matrix that maps it to the unit circle."""

    centre: Floats  # (y, x)
    to_unit: Floats  # (2, 2), of (y, x)

    @property
    def from_unit(self) -> Floats:
        return np.linalg.inv(self.to_unit).astype(np.float64)

    @property
    def radius(self) -> float:
        """Radius of the circle with the same area, in pixels."""
        return float(np.linalg.det(self.to_unit) ** -0.5)

    @property
    def rim_half_width(self) -> float:
        """Half the width of the rim, as a share of the radius."""
        return max(_NEAR_SHARE, _NEAR_PX / self.radius)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rim:
    """Rim of an ellipse in each sector; distances are shares of the ellipse's radius there."""

    # True for sectors with enough pixels on the rim, (_SECTORS,)
    seen: npt.NDArray[np.bool_]
    # distance of the rim's middle and of its outer edge in each seen sector, (S,)
    middle: Floats
    edge: Floats
    # number of pixels inside the rim
    num_inside: int


def disks_of_rings(
    mask: MaskArray, *, min_seen: float, min_radius_px: float, max_radius_px: float
) -> MaskArray:
    """Disks of all rings, also of rings that are seen only in part, bool (H, W), on a CPU.

    A Hough transform: each pixel votes, for each radius, for the two centres at this distance along
    the normal of the stroke through it (C. Kimme, D. Ballard and J. Sklansky, Communications of the
    ACM 18, 1975). The circles with the most votes become ellipses that fit the pixels near them. So
    several arcs of the same ring count covariance. The disk ends at the outer edge of the rim.

    Args:
        mask: bool (H, W).
        min_seen: least share of the rim inside the image that has pixels. Rings of which less than
            .4 is inside the image are left out.
        min_radius_px: rings with a smaller radius are left out. The radius of an ellipse is that of
            the circle with the same area.
        max_radius_px: rings with a larger radius are left out.

    Memory: 5 bytes a pixel, 250 bytes a true pixel, 100 bytes a pixel of the largest ring, and
        5 MB.
    """
    disks = np.zeros_like(mask)
    # sorted by row
    pixels = np.argwhere(mask).astype(np.float64)
    for circle in _likely_circles(mask, min_radius_px, max_radius_px):
        # pixels whose row and column are within three radii of the centre
        y, x = circle.centre
        reach = 3 * circle.radius
        top, bottom = np.searchsorted(pixels[:, 0], [y - reach, y + reach])
        around = pixels[top:bottom]
        around = around[np.abs(around[:, 1] - x) <= reach]
        ellipse = _fitted(around, circle)
        if ellipse is None or not min_radius_px <= ellipse.radius <= max_radius_px:
            continue
        rim = _rim_of(around, ellipse)
        if _is_ring(rim, ellipse, mask.shape, min_seen):
            _fill(disks, ellipse, rim)
            # pixels of this ring do not count for another ring
            distance = np.hypot(*_in_unit_plane(pixels, ellipse))
            pixels = pixels[distance > 1 + ellipse.rim_half_width]
    return disks


def _likely_circles(
    mask: MaskArray, min_radius_px: float, max_radius_px: float
) -> list[_Ellipse]:
    """Circles with many votes, sorted by votes, without circles that are alike."""
    pixels, normals = _directions(mask)
    if not len(pixels):
        return []
    candidates = [np.empty((0, 4))]
    radius = max(min_radius_px, _LEAST_RADIUS_PX)
    while radius <= max_radius_px * _NEXT_RADIUS:
        votes, centres = _crowded_cells(pixels, normals, radius, mask.shape)
        radii = np.full(len(votes), radius)
        shares = votes / (2 * np.pi * radius)
        candidates.append(np.column_stack([shares, centres, radii]))
        radius *= _NEXT_RADIUS
    # columns: votes as a share of the circumference, y, x, radius
    remaining = np.concatenate(candidates)
    remaining = remaining[np.argsort(-remaining[:, 0], kind="stable")]
    circles: list[_Ellipse] = []
    while len(remaining) and len(circles) < _MOST_CIRCLES:
        centre = remaining[0, 1:3]
        radius = remaining[0, 3]
        circles.append(_Ellipse(centre=centre, to_unit=np.eye(2) / radius))
        distances = np.linalg.norm(remaining[:, 1:3] - centre, axis=1)
        is_alike = (distances < _ALIKE_SHARE * radius) & (remaining[:, 3] == radius)
        remaining = remaining[~is_alike]
    return circles


def _directions(mask: MaskArray) -> tuple[Floats, Floats]:
    """Pixels that lie on a stroke, and the normal of the stroke there, (y, x), both float64 (M, 2).

    The normal is the direction in which the positions of the pixels around vary least. If they vary
    equally in all directions, the pixel lies on no stroke.
    """
    rows, columns = np.nonzero(mask)
    dy, dx = np.mgrid[-_REACH_PX : _REACH_PX + 1, -_REACH_PX : _REACH_PX + 1].reshape(
        2, -1
    )
    powers = np.stack([np.ones_like(dy), dy, dx, dy * dy, dx * dx, dy * dx], axis=1)
    padded = np.pad(mask, _REACH_PX)
    is_stroke = np.empty(len(rows), dtype=bool)
    normals = np.empty((len(rows), 2))
    for start in range(0, len(rows), _CHUNK):
        part = slice(start, start + _CHUNK)
        around = padded[
            rows[part, None] + _REACH_PX + dy, columns[part, None] + _REACH_PX + dx
        ]
        sums = around.astype(np.float32) @ powers.astype(np.float32)
        number, y, x, yy, xx, yx = sums.astype(np.float64).T
        # a pixel is a square, which has a variance of 1/12 along each axis
        variance_y = yy / number - (y / number) ** 2 + 1 / 12
        variance_x = xx / number - (x / number) ** 2 + 1 / 12
        covariance = yx / number - y * x / number**2
        difference = np.hypot(variance_y - variance_x, 2 * covariance)
        is_stroke[part] = difference > _LEAST_DIRECTED * (variance_y + variance_x)
        angle = 0.5 * np.arctan2(2 * covariance, variance_x - variance_y)
        normals[part] = np.stack([np.cos(angle), -np.sin(angle)], axis=1)
    pixels = np.stack([rows[is_stroke], columns[is_stroke]], axis=1).astype(np.float64)
    return pixels, normals[is_stroke]


def _crowded_cells(
    pixels: Floats, normals: Floats, radius: float, shape: tuple[int, int]
) -> tuple[Floats, Floats]:
    """Votes, (C,), and middle, (y, x), (C, 2), of each cell with enough votes.

    Votes are counted on four grids, shifted by half a cell, so that each centre is well inside a
    cell of at least one grid.
    """
    cell = max(_CELL_PX, _CELL_SHARE * radius)
    # a centre may lie outside the image, by at most a radius
    height = int((shape[0] + 2 * radius) / cell) + 2
    width = int((shape[1] + 2 * radius) / cell) + 2
    counts = []
    middles = []
    for shift in itertools.product((0.0, 0.5), (0.0, 0.5)):
        votes = np.zeros(height * width, dtype=np.int64)
        for side in (radius, -radius):
            places = (pixels + side * normals + radius) / cell + shift
            rows, columns = places.astype(np.int64).T
            votes += np.bincount(rows * width + columns, minlength=height * width)
        crowded = np.flatnonzero(votes >= _LEAST_VOTES * 2 * np.pi * radius)
        counts.append(votes[crowded])
        cells = np.column_stack(np.divmod(crowded, width))
        middles.append((cells + 0.5 - shift) * cell - radius)
    return np.concatenate(counts).astype(np.float64), np.concatenate(middles)


def _in_unit_plane(pixels: Floats, ellipse: _Ellipse) -> Floats:
    """Positions of pixels, (y, x), (2, N), in the plane in which the ellipse is the unit circle."""
    places: Floats = ellipse.to_unit @ (pixels - ellipse.centre).T
    return places


def _rim_of(pixels: Floats, ellipse: _Ellipse) -> _Rim:
    """Rim of an ellipse, from the pixels around it."""
    y, x = _in_unit_plane(pixels, ellipse)
    distance = np.hypot(y, x)
    is_near = np.abs(distance - 1) < ellipse.rim_half_width
    turns = np.arctan2(y[is_near], x[is_near]) / (2 * np.pi) % 1
    sector = (turns * _SECTORS).astype(np.int64) % _SECTORS
    count = np.bincount(sector, minlength=_SECTORS)
    total = np.bincount(sector, weights=distance[is_near], minlength=_SECTORS)
    # length of the arc of a sector, in pixels
    length = 2 * np.pi / _SECTORS * ellipse.radius
    seen = count >= max(1.0, _LEAST_WIDTH_PX * length)
    middle = total[seen] / count[seen]
    width = count[seen] / length / ellipse.radius
    return _Rim(
        seen=seen,
        middle=middle,
        edge=middle + width / 2,
        num_inside=int(np.count_nonzero(distance < 1 - ellipse.rim_half_width)),
    )


def _fitted(pixels: Floats, ellipse: _Ellipse) -> _Ellipse | None:
    """Fits the ellipse to the pixels near it; None if they are too few, or if it gets too long.

    Each seen sector gives one point, so that a thick part of the rim counts no more than a thin
    part.
    """
    for _ in range(_FITS):
        rim = _rim_of(pixels, ellipse)
        if np.count_nonzero(rim.seen) < _LEAST_SECTORS:
            return None
        fit = _fit_of_points(rim.middle[:, None] * _DIRECTIONS[rim.seen])
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
    """The ellipse through points near the unit circle, (y, x), (P, 2); None if no ellipse fits.

    The least-squares solution of x² + y² = a(x² - y²) + 2bxy + 2cx + 2dy + e. With a = b = 0 the
    ellipse is a circle (I. Kåsa, IEEE Transactions on Instrumentation and Measurement 25, 1976).
    """
    y, x = points.T
    equations = [x * x - y * y, 2 * x * y, 2 * x, 2 * y, np.ones_like(y)]
    # two more equations: a = 0 and b = 0
    ridge = _RIDGE_WEIGHT * np.eye(2, 5)
    (a, b, c, d, e), *_ = np.linalg.lstsq(
        np.concatenate([np.stack(equations, axis=1), ridge]),
        np.concatenate([x * x + y * y, np.zeros(2)]),
        rcond=None,
    )
    # an ellipse far longer than `_MAX_ASPECT`, or another kind of curve
    if np.hypot(a, b) > 0.9:
        return None
    # For a point p this is p·Mp - 2 p·v = e. Completing the square gives
    # (p - centre)·M(p - centre) = scale.
    matrix = np.array([[1 + a, -b], [-b, 1 - a]])
    v = np.array([d, c])
    centre = np.linalg.solve(matrix, v)
    scale = e + v @ centre
    to_unit = np.linalg.cholesky(matrix).T / np.sqrt(scale)
    return _Ellipse(centre=centre, to_unit=to_unit)


def _is_ring(
    rim: _Rim, ellipse: _Ellipse, shape: tuple[int, int], min_seen: float
) -> bool:
    """True if enough of the rim is inside the image and seen, and the disk is not filled."""
    y, x = (_DIRECTIONS @ ellipse.from_unit.T + ellipse.centre).T
    shown = (y >= 0) & (y < shape[0]) & (x >= 0) & (x < shape[1])
    share_shown = np.count_nonzero(shown) / _SECTORS
    num_seen = np.count_nonzero(rim.seen & shown)
    inside_px = np.pi * ((1 - ellipse.rim_half_width) * ellipse.radius) ** 2
    return bool(
        share_shown >= _LEAST_SHOWN
        and num_seen >= max(_LEAST_SECTORS, min_seen * share_shown * _SECTORS)
        and rim.num_inside <= _MOST_FILLED * share_shown * inside_px
    )


def _fill(disks: MaskArray, ellipse: _Ellipse, rim: _Rim) -> None:
    """Fills the ellipse up to the rim's outer edge, which is interpolated in unseen sectors."""
    reach = rim.edge.max() * np.linalg.norm(ellipse.from_unit, axis=1)
    top, left = np.maximum(0, np.floor(ellipse.centre - reach)).astype(int)
    bottom, right = np.maximum(0, np.ceil(ellipse.centre + reach) + 1).astype(int)
    window = disks[top:bottom, left:right]
    height, width = window.shape
    y = np.arange(top, top + height)[:, None] - ellipse.centre[0]
    x = np.arange(left, left + width) - ellipse.centre[1]
    (yy, yx), (xy, xx) = ellipse.to_unit
    unit_y = yy * y + yx * x
    unit_x = xy * y + xx * x
    angles = np.arctan2(unit_y, unit_x)
    edge = np.interp(angles, _ANGLES[rim.seen], rim.edge, period=2 * np.pi)
    window |= np.hypot(unit_y, unit_x) <= edge
