"""Biology of generator C that looks like artefacts; all of it is tissue.

Each kind is given the canvas and returns the density that the slide has there, (H, W, 3), and
its area in [0, 1]. Densities are of red, green and blue.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import ndimage
from tests.support.held_out_shapes import Canvas, Field

Drawn = tuple[Field, Field]
_NUCLEUS = (0.95, 1.15, 0.5)
_EOSIN = (0.1, 0.75, 0.25)
_BLOOD = (0.12, 1.15, 0.85)
_MELANIN = (0.75, 1.25, 1.7)
_SOOT = (2.2, 2.2, 2.1)
_BROWN = (0.45, 0.95, 1.3)
_ALCIAN = (0.75, 0.32, 0.18)


def _flat(canvas: Canvas, color: tuple[float, float, float], depth: float) -> Field:
    """One density everywhere, with slight unevenness."""
    uneven = 1 + 0.06 * canvas.slow_noise(80)
    return np.array(color, np.float32) * (depth * uneven)[..., None]


def _times(cover: Field, color: tuple[float, float, float], depth: float) -> Field:
    return np.array(color, np.float32) * (cover * depth)[..., None]


def _lymphoid(canvas: Canvas) -> Drawn:
    """Follicles: crowded dark nuclei, paler in the middle."""
    area = canvas.patches(260, 3)
    nuclei = canvas.grains(area, 3.2, 13_000)
    centre = canvas.soften(area > 0.99, 60) * 0.3
    pale = _flat(canvas, (0.22, 0.35, 0.15), 0.7)
    return pale + _times(nuclei * (1 - centre), _NUCLEUS, 0.85), area


def _overstained(canvas: Canvas) -> Drawn:
    """A zone that took up twice the stain."""
    area = canvas.soften(canvas.patches(650, 1) > 0.5, 30)
    return canvas.density * np.float32(canvas.rng.uniform(1.5, 2.2)), area


def _mucin(canvas: Canvas) -> Drawn:
    """Lakes with strings, pale or in Alcian blue."""
    area = canvas.patches(180, 7)
    strings = np.abs(canvas.slow_noise(18)) * 0.5 + 0.6
    color = _ALCIAN if canvas.rng.random() < 0.5 else (0.2, 0.22, 0.1)
    return _times(strings, color, canvas.rng.uniform(0.4, 0.9)), area


def _necrosis(canvas: Canvas) -> Drawn:
    """An area without structure but for some debris."""
    area = canvas.patches(480, 2)
    debris = canvas.grains(area, 2, 800)
    ghost = 0.2 * canvas.density
    return ghost + _flat(canvas, _EOSIN, 0.6) + _times(debris, _NUCLEUS, 0.4), area


def _vessels(canvas: Canvas) -> Drawn:
    """Tubes full of red cells, straight or bent."""
    area = np.zeros(canvas.shape, np.float32)
    for _ in range(int(canvas.rng.integers(5, 14))):
        arc = canvas.arc(canvas.rng.uniform(80, 500), inside=canvas.masks["tissue"])
        area = np.maximum(area, canvas.stroke(arc, canvas.rng.uniform(30, 120)))
    cells = canvas.grains(area, 3, 12_000)
    return _flat(canvas, _BLOOD, 0.7) + _times(cells, _BLOOD, 0.3), area


def _haemorrhage(canvas: Canvas) -> Drawn:
    """Red cells that lie between the tissue."""
    area = canvas.soften(canvas.patches(420, 2) > 0.5, 40)
    cells = canvas.grains(area, 3, 14_000)
    return 0.4 * canvas.density + _times(cells, _BLOOD, 0.8), area


def _melanin(canvas: Canvas) -> Drawn:
    """Clumps of brown-black granules."""
    area = canvas.patches(90, 14)
    granules = canvas.grains(area, 5, 6_000)
    return 0.7 * canvas.density + _times(granules, _MELANIN, 0.9), area


def _anthracosis(canvas: Canvas) -> Drawn:
    """Streaks of soot."""
    area = np.zeros(canvas.shape, np.float32)
    for _ in range(10):
        arc = canvas.arc(canvas.rng.uniform(100, 400), inside=canvas.masks["tissue"])
        area = np.maximum(area, canvas.stroke(arc, canvas.rng.uniform(30, 90)))
    soot = canvas.grains(area, 5, 4_500)
    return canvas.density + _times(soot, _SOOT, 0.8), area


def _dab(canvas: Canvas) -> Drawn:
    """Nests of positive cells: brown membranes about pale nuclei."""
    area = canvas.patches(200, 8)
    pale = canvas.grains(area, 4, 4_000)
    brown = _times(1 - 0.7 * pale.clip(0, 1), _BROWN, canvas.rng.uniform(0.4, 0.9))
    return 0.3 * canvas.density + brown, area


def _keratin(canvas: Canvas) -> Drawn:
    """Pearls of layers about a middle."""
    area = np.zeros(canvas.shape, np.float32)
    layers = np.zeros(canvas.shape, np.float32)
    y, x = np.mgrid[: canvas.shape[0], : canvas.shape[1]]
    for _ in range(9):
        row, column = canvas.place(canvas.masks["tissue"])
        away_um = np.hypot(y - row, x - column) * canvas.mpp
        away_um = away_um * (1 + 0.15 * canvas.slow_noise(150))
        pearl = np.clip((canvas.rng.uniform(70, 220) - away_um) / 6, 0, 1)
        rings = 0.75 + 0.25 * np.sin(away_um / 14 * 2 * math.pi)
        layers = np.where(pearl > area, rings, layers)
        area = np.maximum(area, pearl).astype(np.float32)
    return _times(layers, (0.1, 0.7, 0.5), 0.8), area


def _fat(canvas: Canvas) -> Drawn:
    """Cells of 50 to 110 µm that are clear as glass, with thin membranes."""
    area = canvas.patches(520, 2)
    size = canvas.rng.uniform(50, 110) / canvas.mpp
    rows, columns = np.mgrid[0 : canvas.shape[0] : size, 0 : canvas.shape[1] : size]
    columns[1::2] += size / 2
    middles = np.stack([rows.ravel(), columns.ravel()], axis=1)
    middles = middles + canvas.rng.normal(0, size / 7, middles.shape)
    spots = np.ones(canvas.shape, bool)
    places = middles.round().astype(int).clip(0, np.array(canvas.shape) - 1)
    spots[places[:, 0], places[:, 1]] = False
    nearest = ndimage.distance_transform_edt(
        spots, return_distances=False, return_indices=True
    )
    cell = nearest[0] * canvas.shape[1] + nearest[1]
    wall = np.zeros(canvas.shape, np.float32)
    wall[:-1] = cell[:-1] != cell[1:]
    wall[:, :-1] = np.maximum(wall[:, :-1], cell[:, :-1] != cell[:, 1:])
    return _times(wall, _EOSIN, canvas.rng.uniform(0.4, 0.8)), area


def _calcium(canvas: Canvas) -> Drawn:
    """Dark purple lumps that cracked in the cut."""
    area = canvas.patches(70, 10)
    whole = np.abs(canvas.slow_noise(25)) > 0.12
    depth = np.where(whole, 1.0, 0.15).astype(np.float32)
    return _times(depth, (1.3, 1.7, 0.8), canvas.rng.uniform(0.6, 1)), area


def _muscle(canvas: Canvas) -> Drawn:
    """Dense parallel bundles of fibres."""
    area = canvas.patches(420, 2)
    turn = canvas.rng.uniform(0, math.pi)
    y, x = np.mgrid[: canvas.shape[0], : canvas.shape[1]] * canvas.mpp
    across = y * math.cos(turn) - x * math.sin(turn)
    across = across + 20 * canvas.slow_noise(300)
    fibres = 0.85 + 0.2 * np.sin(across / 22 * 2 * math.pi)
    return _times(np.asarray(fibres, np.float32), (0.2, 1.0, 0.45), 0.9), area


LOOKALIKES: dict[str, Callable[[Canvas], Drawn]] = {
    "lymphoid follicle": _lymphoid,
    "over-stained zone": _overstained,
    "mucin": _mucin,
    "necrosis": _necrosis,
    "congested vessels": _vessels,
    "haemorrhage": _haemorrhage,
    "melanin": _melanin,
    "anthracosis": _anthracosis,
    "DAB": _dab,
    "keratin": _keratin,
    "fat": _fat,
    "calcium": _calcium,
    "muscle": _muscle,
}
