"""Plants strokes of pens on pictures at 16 µm/px: each adds its optical density to what is there.

By the law of Beer and Lambert, a translucent layer multiplies the light below it. The strength
runs from a faint trace to an opaque layer, the colour over all pens and beyond them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from thinsection.types import MaskArray

Field = npt.NDArray[np.float32]
Path = npt.NDArray[np.float64]

# µm per pixel of the pictures.
MPP = 16.0
# Density of red, green and blue of dense layers, lowest and highest, by the name of the pen.
_INKS = {
    "blue": ((1.1, 0.5, 0.08), (2.6, 1.8, 0.7)),
    "green": ((0.9, 0.2, 0.2), (2.6, 0.9, 1.3)),
    "red": ((0.03, 0.9, 0.6), (0.4, 2.6, 2.0)),
    "black": ((1.2, 1.2, 1.2), (2.6, 2.6, 2.6)),
    "brown": ((0.4, 0.8, 1.1), (1.0, 1.6, 2.6)),
    "purple": ((0.6, 0.9, 0.2), (1.6, 2.2, 0.9)),
    "orange": ((0.02, 0.4, 1.0), (0.2, 1.0, 2.4)),
    "yellow": ((0.01, 0.05, 0.7), (0.12, 0.3, 2.0)),
    "pink": ((0.02, 0.7, 0.15), (0.2, 1.8, 0.8)),
    "any": ((0.02, 0.02, 0.02), (2.2, 2.2, 2.2)),
}
_CHANCES = (0.15, 0.15, 0.16, 0.15, 0.09, 0.09, 0.06, 0.04, 0.03, 0.08)
# A planted density below this one, averaged over the channels, is no ink and no tissue.
_LEAST_DENSITY = 0.05
# Share of a stroke's cover above which a pixel is ink, and below which it is not.
_INK_COVER = 0.45
_CLEAN_COVER = 0.08
# Edge length in pixels of the squares over which gaps of a dry pen are closed.
_GAP_PX = 5
# Density of the strongest channel from which a pen makes dots too.
_LEAST_DOT_DENSITY = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Inked:
    """A picture with ink."""

    # transmitted light, float32 (H, W, 3)
    light: Field
    # pixels of ink, and pixels of which it is not said, bool (H, W)
    ink: MaskArray
    unsure: MaskArray


def plant_strokes(
    light: Field, rng: np.random.Generator, *, grey: bool = False
) -> Inked:
    """Plants one to four strokes of one or two pens.

    Args:
        light: transmitted light, float32 (H, W, 3), in [0, 1].
        rng: source of all that is drawn.
        grey: the picture has no colours, so the ink has none either.
    """
    ink = np.zeros(light.shape[:2], bool)
    unsure = ink.copy()
    colours = [_draw_ink(rng, grey=grey) for _ in range(1 if rng.random() < 0.7 else 2)]
    light = light.copy()
    for _ in range(int(rng.integers(1, 5))):
        density = colours[int(rng.integers(len(colours)))]
        # a pale dot would be stained biology
        has_dots = float(density.max()) > _LEAST_DOT_DENSITY
        cover = _stroke_cover(rng, light.shape[:2], has_dots=has_dots)
        # the gaps of a dry pen are ink
        around = np.maximum(cover, ndimage.uniform_filter(cover, _GAP_PX))
        added = around * float(density.mean())
        light *= np.exp(-cover[..., None] * density).astype(np.float32)
        is_ink = (around > _INK_COVER) & (added > _LEAST_DENSITY)
        ink |= is_ink
        unsure |= (around > _CLEAN_COVER) & ~is_ink
    # stray light of the lens
    stray = rng.uniform(0, 0.03) * rng.uniform(0.5, 1, 3)
    light = light + stray.astype(np.float32) * (1 - light)
    return Inked(light=light, ink=ink, unsure=unsure & ~ink)


def _draw_ink(rng: np.random.Generator, *, grey: bool) -> Field:
    """Density of a layer, (3,): a pen's colour at a strength of its own."""
    name = str(rng.choice(list(_INKS), p=_CHANCES))
    low, high = _INKS["black" if grey else name]
    density = rng.uniform(low, high)
    if name == "black" or grey:
        density[:] = density.mean()
        if not grey:
            density *= 1 + rng.uniform(-0.15, 0.15) * np.array((1, 0, -1))
    # the densest channel, from a quarter of a thin layer to opaque
    strongest = np.exp(rng.uniform(np.log(0.28), np.log(3.0)))
    return np.asarray(density * strongest / density.max(), np.float32)


def _stroke_cover(
    rng: np.random.Generator, shape: tuple[int, ...], *, has_dots: bool
) -> Field:
    """Thickness of one stroke's layer, 0 outside, about 1 inside, float32 (H, W)."""
    width_um = float(np.exp(rng.uniform(np.log(80), np.log(1500))))
    path = _draw_path(rng, shape, width_um / MPP, has_dots=has_dots)
    line = np.ones(shape, bool)
    fine = np.stack(
        [
            np.interp(np.linspace(0, 1, 3000), np.linspace(0, 1, len(path)), path[:, c])
            for c in (0, 1)
        ],
        axis=1,
    )
    grid = np.rint(fine).astype(int)
    inside = (grid >= 0).all(axis=1) & (grid < shape).all(axis=1)
    if not inside.any():
        return np.zeros(shape, np.float32)
    place = np.zeros(shape, np.int32)
    grid = grid[inside]
    line[grid[:, 0], grid[:, 1]] = False
    place[grid[:, 0], grid[:, 1]] = np.flatnonzero(inside)
    away, nearest = ndimage.distance_transform_edt(line, return_indices=True)
    t = place[nearest[0], nearest[1]]
    distance_um = away.astype(np.float32) * MPP
    rough = 1 + rng.uniform(0, 0.15) * slow_noise(rng, shape, rng.uniform(2, 10))
    soft_um = np.exp(rng.uniform(np.log(8), np.log(60 + width_um / 6)))
    cover = np.clip((width_um / 2 * rough - distance_um) / soft_um + 0.5, 0, 1)
    # ink gathers at the border of a stroke, and pressure changes along it
    if rng.random() < 0.5:
        depth = (width_um / 2 - distance_um) / max(25.0, width_um / 8)
        cover *= 1 + rng.uniform(-0.4, 0.5) * np.exp(-(depth**2))
    cover *= 1 + rng.uniform(0, 0.25) * slow_noise(rng, shape, rng.uniform(4, 30))
    draw = rng.random()
    if draw < 0.2:
        cover *= _streaks(rng, fine, t, shape)
    elif draw < 0.3:
        cover *= _straight_streaks(rng, shape)
    elif draw < 0.45:
        # an unfinished layer: the stroke fades out
        fade = np.clip(
            (t / 3000 - rng.uniform(0, 1)) * rng.uniform(-4, 4) + 0.8, 0, 1.2
        )
        cover *= fade
    return np.asarray(cover.clip(0, 2), np.float32)


def _streaks(
    rng: np.random.Generator,
    path: Path,
    t: npt.NDArray[np.int32],
    shape: tuple[int, ...],
) -> Field:
    """Share of ink that a dry pen leaves: lines along the path."""
    tangent = np.gradient(path, axis=0)
    tangent /= np.linalg.norm(tangent, axis=1, keepdims=True) + 1e-9
    y, x = np.mgrid[: shape[0], : shape[1]]
    side = (y - path[t, 0]) * tangent[t, 1] - (x - path[t, 1]) * tangent[t, 0]
    table = rng.standard_normal((256, 24))
    table = ndimage.gaussian_filter(
        table, (rng.uniform(0.5, 3), rng.uniform(0.5, 2)), mode="wrap"
    )
    table /= table.std() + 1e-9
    rows = (side * rng.uniform(0.4, 1.2)).astype(int) % 256
    columns = (t * 24 // 3001) % 24
    return np.asarray(
        np.clip(table[rows, columns] * 1.5 + rng.uniform(0, 1.2), 0.02, 1), np.float32
    )


def _straight_streaks(rng: np.random.Generator, shape: tuple[int, ...]) -> Field:
    """Share of ink that a dry pen leaves: lines in one direction, whatever the path is."""
    turn = rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[: shape[0], : shape[1]]
    across = y * np.cos(turn) - x * np.sin(turn)
    along = y * np.sin(turn) + x * np.cos(turn)
    table = rng.standard_normal((256, 24))
    table = ndimage.gaussian_filter(
        table, (rng.uniform(0.4, 2), rng.uniform(0.5, 2)), mode="wrap"
    )
    table /= table.std() + 1e-9
    rows = (across * rng.uniform(0.4, 1.2)).astype(int) % 256
    columns = (along * rng.uniform(0.05, 0.3)).astype(int) % 24
    return np.asarray(
        np.clip(table[rows, columns] * 1.5 + rng.uniform(0, 1.2), 0.02, 1), np.float32
    )


def _draw_path(
    rng: np.random.Generator, shape: tuple[int, ...], width: float, *, has_dots: bool
) -> Path:
    """Points (N, 2) of a line, a ring, a dot, a zigzag or letters."""
    kinds = ("line", "ring", "zigzag", "letters", "dot")
    chances = (0.45, 0.25, 0.08, 0.1, 0.12) if has_dots else (0.57, 0.25, 0.08, 0.1, 0)
    kind = str(rng.choice(kinds, p=chances))
    middle = rng.uniform(-0.05, 1.05, 2) * shape
    t = np.linspace(0, 1, 200)
    if kind == "dot":
        return np.stack([middle, middle + 0.3])
    if kind == "ring":
        radii = width * np.exp(rng.uniform(np.log(1.2), np.log(6), 2))
        angle = 2 * np.pi * t * rng.uniform(0.6, 1.1) + rng.uniform(0, 6)
        wobble = 1 + rng.uniform(0, 0.2) * np.cos(angle * rng.integers(2, 5) + 1)
        rows = middle[0] + radii[0] * np.sin(angle) * wobble
        columns = middle[1] + radii[1] * np.cos(angle) * wobble
        return np.stack([rows, columns], axis=1)
    turn = rng.uniform(0, 2 * np.pi)
    along = np.array([np.sin(turn), np.cos(turn)])
    across = along[::-1] * (1, -1)
    length = width * np.exp(rng.uniform(np.log(3), np.log(30)))
    if kind == "letters":
        steps = rng.normal(0, width * 2.5, (int(rng.integers(4, 10)), 2))
        knots = middle + np.cumsum(steps, axis=0)
        at = np.linspace(0, len(knots) - 1, 200)
        return np.stack(
            [np.interp(at, np.arange(len(knots)), knots[:, c]) for c in (0, 1)], axis=1
        )
    side = (
        length
        * rng.uniform(0, 0.25)
        * np.cos(2 * np.pi * t * rng.uniform(0.3, 1.3) + rng.uniform(0, 6))
    )
    if kind == "zigzag":
        side = (
            width
            * rng.uniform(1, 4)
            * (np.abs((t * rng.integers(3, 12)) % 2 - 1) - 0.5)
        )
    return middle + np.outer((t - 0.5) * length, along) + np.outer(side, across)


def slow_noise(rng: np.random.Generator, shape: tuple[int, ...], sigma: float) -> Field:
    """Smooth noise of mean 0 and deviation 1, float32 (H, W)."""
    step = max(1, int(sigma / 2))
    grid = [edge // step + 3 for edge in shape]
    field = ndimage.gaussian_filter(
        rng.standard_normal(grid), sigma / step, mode="wrap"
    )
    field = (field - field.mean()) / (field.std() + 1e-6)
    field = np.kron(field, np.ones((step, step))) if step > 1 else field
    field = ndimage.uniform_filter(field, step) if step > 1 else field
    return np.asarray(field[: shape[0], : shape[1]], np.float32)
