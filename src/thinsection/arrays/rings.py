"""Disks whose rims are seen in a mask, whole or in part."""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.types import MaskArray

# Equal parts of a turn, in each of which a rim is seen or not.
_PARTS = 48
# The angle in the middle of each part, (_PARTS,), and its direction, (y, x), (_PARTS, 2).
_ANGLES = (np.arange(_PARTS) + 0.5) * (2 * np.pi / _PARTS)
_DIRECTIONS = np.stack([np.sin(_ANGLES), np.cos(_ANGLES)], axis=1)
# A smaller ring cannot be told from a spot.
_LEAST_RADIUS_PX = 3.0
# Radii that are looked for, each as a multiple of the one before.
_NEXT_RADIUS = 1.12
# Width of a cell of possible centres: a share of the radius, or pixels if that is more.
_CELL_SHARE = 0.2
_CELL_PX = 3.0
# Least votes for a circle, as a share of its whole circumference in pixels. A rim of 1 px must be
# seen that far, whatever `min_seen` is.
_LEAST_VOTES = 0.5
# Circles of one radius are alike if their centres are nearer than this share of it. Of these, the
# one with the most votes is looked at.
_ALIKE_SHARE = 0.1
# The circles with the most votes are looked at, and no more.
_MOST_CIRCLES = 2000
# A pixel this near to an ellipse is on its rim: a share of the radius, or pixels if that is more.
_NEAR_SHARE = 0.15
_NEAR_PX = 2.0
# Least mean width of the rim in a part that is seen. A few spots are less.
_LEAST_WIDTH_PX = 0.5
# Times that an ellipse is fitted again to the pixels on its rim.
_FITS = 4
# Weight of a = 0 and of b = 0 in a fit, as points of the rim. It keeps a fit of few points near
# the ellipse before it.
_FIRMNESS = 1.0
# Least number of parts with pixels for a fit.
_LEAST_PARTS = 5
# Longest ellipse: its longer axis over its shorter one.
_MAX_ASPECT = 2.0
# Least share of an ellipse that is inside the image.
_LEAST_SHOWN = 0.4
# Largest share of a ring's inside that has pixels. A filled disk is no ring.
_MOST_FILLED = 0.5
# Half the edge of the square in which the line of a pixel is measured.
_REACH_PX = 4
# A pixel is on a line if (spread along - spread across) / (their sum) is more than this.
_LEAST_DIRECTED = 0.25
# Pixels whose squares are read at once.
_CHUNK = 1024

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ellipse:
    """An ellipse, by its centre and the matrix that maps it to the unit circle."""

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
    def near(self) -> float:
        """Half the width of the rim, as a share of the radius."""
        return max(_NEAR_SHARE, _NEAR_PX / self.radius)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rim:
    """Pixels near an ellipse, by parts of its turn; distances are shares of its radius there."""

    # parts with enough pixels on the rim, (_PARTS,)
    seen: npt.NDArray[np.bool_]
    # distance of the rim's middle and of its outer edge in each part that is seen, (S,)
    middle: Floats
    edge: Floats
    # pixels inside the rim
    num_inside: int


def disks_of_rings(
    mask: MaskArray, *, min_seen: float, min_radius_px: float, max_radius_px: float
) -> MaskArray:
    """Disks inside rings, also inside rings that are seen only in part, bool (H, W), on a CPU.

    Each pixel votes for the centres of circles through it, which lie across its line (C. Kimme,
    D. Ballard and J. Sklansky, Communications of the ACM 18, 1975). The circles with the most
    votes become ellipses that fit the pixels near them. So arcs of one ring count together. The
    disk ends at the outer edge of the rim.

    Args:
        mask: bool (H, W).
        min_seen: least share of the rim that has pixels, of the part inside the image. Rings of
            which less than .4 is inside are left out.
        min_radius_px: smaller rings are left out: radius of the circle with the ellipse's area.
        max_radius_px: larger rings are left out.

    Memory: 5 bytes a pixel, 250 a pixel that is true, 100 a pixel of the largest ring, and 5 MB.
    """
    disks = np.zeros_like(mask)
    # in the order of rows
    pixels = np.argwhere(mask).astype(np.float64)
    for circle in _likely_circles(mask, min_radius_px, max_radius_px):
        # pixels whose row and column are within three radii of the centre
        y, x = circle.centre
        reach = 3 * circle.radius
        top, bottom = np.searchsorted(pixels[:, 0], [y - reach, y + reach])
        near = pixels[top:bottom]
        near = near[np.abs(near[:, 1] - x) <= reach]
        ellipse = _fitted(near, circle)
        if ellipse is None or not min_radius_px <= ellipse.radius <= max_radius_px:
            continue
        rim = _rim_of(near, ellipse)
        if _is_ring(rim, ellipse, mask.shape, min_seen):
            _fill(disks, ellipse, rim)
            # so that they do not count for a second ring
            distance = np.hypot(*_in_unit_plane(pixels, ellipse))
            pixels = pixels[distance > 1 + ellipse.near]
    return disks


def _likely_circles(
    mask: MaskArray, min_radius_px: float, max_radius_px: float
) -> list[_Ellipse]:
    """Circles with many votes, the most first, and no two that are alike."""
    pixels, across = _directions(mask)
    if not len(pixels):
        return []
    candidates = [np.empty((0, 4))]
    radius = max(min_radius_px, _LEAST_RADIUS_PX)
    while radius <= max_radius_px * _NEXT_RADIUS:
        votes, centres = _crowded_cells(pixels, across, radius, mask.shape)
        radii = np.full(len(votes), radius)
        shares = votes / (2 * np.pi * radius)
        candidates.append(np.column_stack([shares, centres, radii]))
        radius *= _NEXT_RADIUS
    # votes as a share of the circumference, y, x, radius
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
    """Pixels that lie on a line, and the direction across it, (y, x), both float64 (M, 2).

    The direction is that in which the pixels around vary least. Where they vary alike in all
    directions, there is no line.
    """
    rows, columns = np.nonzero(mask)
    dy, dx = np.mgrid[-_REACH_PX : _REACH_PX + 1, -_REACH_PX : _REACH_PX + 1].reshape(
        2, -1
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
        number, y, x, yy, xx, yx = sums.astype(np.float64).T
        # a pixel has a spread of its own, 1/12 along each axis
        spread_y = yy / number - (y / number) ** 2 + 1 / 12
        spread_x = xx / number - (x / number) ** 2 + 1 / 12
        together = yx / number - y * x / number**2
        difference = np.hypot(spread_y - spread_x, 2 * together)
        is_line[part] = difference > _LEAST_DIRECTED * (spread_y + spread_x)
        angle = 0.5 * np.arctan2(2 * together, spread_x - spread_y)
        across[part] = np.stack([np.cos(angle), -np.sin(angle)], axis=1)
    pixels = np.stack([rows[is_line], columns[is_line]], axis=1).astype(np.float64)
    return pixels, across[is_line]


def _crowded_cells(
    pixels: Floats, across: Floats, radius: float, shape: tuple[int, int]
) -> tuple[Floats, Floats]:
    """Votes, (C,), and middle, (y, x), (C, 2), of each cell with enough votes.

    Four grids, shifted by half a cell, so that one of them has any centre well inside a cell.
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
            places = (pixels + side * across + radius) / cell + shift
            rows, columns = places.astype(np.int64).T
            votes += np.bincount(rows * width + columns, minlength=height * width)
        crowded = np.flatnonzero(votes >= _LEAST_VOTES * 2 * np.pi * radius)
        counts.append(votes[crowded])
        cells = np.column_stack(np.divmod(crowded, width))
        middles.append((cells + 0.5 - shift) * cell - radius)
    return np.concatenate(counts).astype(np.float64), np.concatenate(middles)


def _in_unit_plane(pixels: Floats, ellipse: _Ellipse) -> Floats:
    """Pixels, (y, x), where the ellipse is the unit circle, (2, N)."""
    places: Floats = ellipse.to_unit @ (pixels - ellipse.centre).T
    return places


def _rim_of(pixels: Floats, ellipse: _Ellipse) -> _Rim:
    """Rim of an ellipse, from the pixels around it."""
    y, x = _in_unit_plane(pixels, ellipse)
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
        seen=seen,
        middle=middle,
        edge=middle + width / 2,
        num_inside=int(np.count_nonzero(distance < 1 - ellipse.near)),
    )


def _fitted(pixels: Floats, ellipse: _Ellipse) -> _Ellipse | None:
    """The ellipse through the pixels near it; None if there are too few, or if it is too long.

    Each part of the turn has one point, so that thick parts count no more than thin ones.
    """
    for _ in range(_FITS):
        rim = _rim_of(pixels, ellipse)
        if np.count_nonzero(rim.seen) < _LEAST_PARTS:
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
    # far longer than `_MAX_ASPECT`, or no ellipse
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
    y, x = (_DIRECTIONS @ ellipse.from_unit.T + ellipse.centre).T
    shown = (y >= 0) & (y < shape[0]) & (x >= 0) & (x < shape[1])
    share_shown = np.count_nonzero(shown) / _PARTS
    num_seen = np.count_nonzero(rim.seen & shown)
    inside_px = np.pi * ((1 - ellipse.near) * ellipse.radius) ** 2
    return bool(
        share_shown >= _LEAST_SHOWN
        and num_seen >= max(_LEAST_PARTS, min_seen * share_shown * _PARTS)
        and rim.num_inside <= _MOST_FILLED * share_shown * inside_px
    )


def _fill(disks: MaskArray, ellipse: _Ellipse, rim: _Rim) -> None:
    """Fills the ellipse up to the rim's outer edge, which is interpolated where it is not seen."""
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
