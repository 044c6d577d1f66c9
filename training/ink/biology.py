"""Biology that looks like ink, put into a background at each step; its label stays tissue.

Areas without texture, stain that is added to tissue, layers of keratin, hair follicles, and smooth
dark pieces. Pictures are transmitted light at 16 µm/px; colours are optical densities of red, green
and blue.
"""

import numpy as np
from scipy import ndimage

from thinsection.types import MaskArray
from training.ink.strokes import MPP, Field, slow_noise

_COLOURS = {
    "haematoxylin": (0.65, 0.70, 0.29),
    "eosin": (0.10, 0.95, 0.30),
    "purple": (0.50, 0.85, 0.25),
    "dab": (0.27, 0.57, 0.78),
    "fast red": (0.15, 0.85, 0.50),
    "alcian": (0.85, 0.35, 0.18),
    "schiff": (0.22, 0.88, 0.40),
    "collagen": (0.85, 0.48, 0.14),
    "keratin": (0.18, 0.75, 0.50),
    "blood": (0.18, 0.82, 0.55),
    "pale mucin": (0.55, 0.55, 0.33),
    "melanin": (0.45, 0.62, 0.72),
}
# Colours of tissue that lies alone on glass.
_PIECES = ("haematoxylin", "eosin", "purple", "dab", "keratin", "blood")
_KINDS = ("smooth", "added", "stronger", "layers", "grains", "follicles")
_KIND_CHANCES = (0.42, 0.12, 0.12, 0.12, 0.12, 0.1)
# Chance that all tissue is smooth and dark, and that pieces of tissue are added on glass.
_DARK_CHANCE = 0.08
_PIECES_CHANCE = 0.08
# Mean density above which a pixel is tissue.
_TISSUE_DENSITY = 0.06


def plant_biology(
    light: Field, rng: np.random.Generator, *, grey: bool
) -> tuple[Field, MaskArray]:
    """The picture with one or two kinds of biology, and where they are.

    Args:
        light: transmitted light, float32 (H, W, 3), in [0, 1].
        rng: source of all that is drawn.
        grey: the picture has no colours.
    """
    density = -np.log(light.clip(0.004, 1))
    planted = np.zeros(light.shape[:2], bool)
    if rng.random() < _DARK_CHANCE:
        density = _smooth_and_dark(density, rng, grey=grey)
        planted |= density.mean(axis=2) > _TISSUE_DENSITY
    if rng.random() < _PIECES_CHANCE:
        where = _lobes(rng, light.shape[:2], hard=True)
        colour = _colour(rng, _PIECES, grey=grey)
        inside = colour * _strength(rng, 0.2, 1.8) * _texture(rng, where.shape, 0.15)
        density = density * (1 - where[..., None]) + inside * where[..., None]
        planted |= where > 0.5
    seen = ndimage.uniform_filter(density.mean(axis=2), 3)
    tissue = np.clip((seen - _TISSUE_DENSITY) * 30, 0, 1)
    for _ in range(int(rng.integers(1, 3))):
        kind = str(rng.choice(_KINDS, p=_KIND_CHANCES))
        where, inside = _draw(kind, density, rng, grey=grey)
        where = (where * tissue)[..., None]
        density = density * (1 - where) + inside * where
        planted |= where[..., 0] > 0.5
    return np.exp(-density).astype(np.float32), planted


def _draw(
    kind: str, density: Field, rng: np.random.Generator, *, grey: bool
) -> tuple[Field, Field]:
    """Where an area is, [0, 1], and its density, float32 (H, W) and (H, W, 3)."""
    shape = density.shape[:2]
    if kind == "follicles":
        return _follicles(density, rng, grey=grey)
    # a band of added stain would be a stroke
    chances = (0.7, 0, 0.3) if kind == "added" else (0.55, 0.15, 0.3)
    draw = (_lobes, _band, _zone)[int(rng.choice(3, p=chances))]
    where = draw(rng, shape)
    colour = _colour(rng, tuple(_COLOURS), grey=grey)
    match kind:
        case "smooth":
            inside = colour * _strength(rng, 0.12, 1.8) * _texture(rng, shape, 0.1)
            inside = inside + density * rng.uniform(0, 0.25)
        case "added":
            grain = rng.uniform(0, 0.4)
            inside = colour * _strength(rng, 0.15, 1.5) * _texture(rng, shape, grain)
            inside = inside + density * rng.uniform(0.6, 1.0)
        case "stronger":
            gain = np.exp(rng.uniform(0.2, 1.1) + rng.normal(0, 0.15, 1 if grey else 3))
            inside = density * gain
        case "layers":
            waves = slow_noise(rng, shape, rng.uniform(3, 12)) * rng.uniform(4, 20)
            layers = 1 + rng.uniform(0.1, 0.4) * np.sin(waves)
            inside = colour * _strength(rng, 0.2, 1.2) * layers[..., None]
        case _:
            inside = colour * _strength(rng, 0.3, 2.0) * _texture(rng, shape, 0.5)
            inside = inside + density * rng.uniform(0.1, 0.8)
    return where, np.asarray(inside, np.float32)


def _smooth_and_dark(density: Field, rng: np.random.Generator, *, grey: bool) -> Field:
    """The tissue in one colour, dark and with little texture."""
    sigma = rng.uniform(1, 5)
    smooth = ndimage.gaussian_filter(density, (sigma, sigma, 0))
    share = rng.uniform(0.5, 1)
    mixed = density * (1 - share) + smooth * share
    colour = _colour(rng, ("haematoxylin", "purple", "eosin"), grey=grey)
    share = rng.uniform(0.2, 1)
    mixed = mixed * (1 - share) + mixed.mean(axis=2, keepdims=True) * colour * share
    # the tissue ends as sharply as before
    tissue = ndimage.uniform_filter(density.mean(axis=2), 3) > _TISSUE_DENSITY
    mixed *= np.where(tissue, rng.uniform(1.2, 4), 1)[..., None]
    return np.asarray(np.where(tissue[..., None], mixed, density), np.float32)


def _follicles(
    density: Field, rng: np.random.Generator, *, grey: bool
) -> tuple[Field, Field]:
    """Hair follicles or glands side by side: a pale or brown core in a dark sheath."""
    shape = density.shape[:2]
    y, x = np.mgrid[: shape[0], : shape[1]].astype(np.float32)
    turn = rng.uniform(0, 2 * np.pi)
    width_px = np.exp(rng.uniform(np.log(80), np.log(450))) / MPP
    length_px = width_px * rng.uniform(1.5, 8)
    spacing_px = width_px * rng.uniform(1.2, 4)
    start = rng.uniform(0, 1, 2) * shape
    depth = np.full(shape, -np.inf, np.float32)
    for number in range(int(rng.integers(1, 7))):
        own_turn = turn + rng.normal(0, 0.15)
        row = start[0] + number * spacing_px * np.cos(turn)
        column = start[1] - number * spacing_px * np.sin(turn)
        along = (y - row) * np.sin(own_turn) + (x - column) * np.cos(own_turn)
        across = (y - row) * np.cos(own_turn) - (x - column) * np.sin(own_turn)
        t = (along / length_px).clip(0, 1)
        bulb = 1 + rng.uniform(0, 0.8) * t**4
        away = np.hypot(across, along - t * length_px)
        depth = np.maximum(depth, width_px / 2 * bulb - away)
    where = (depth + 0.5).clip(0, 1)
    core = (depth - width_px / 2 * rng.uniform(0.3, 0.8)).clip(0, 1)[..., None]
    sheath = _colour(rng, ("haematoxylin", "purple", "eosin"), grey=grey)
    sheath = sheath * _strength(rng, 0.3, 1.8) * _texture(rng, shape, 0.2)
    middle = _colour(rng, ("keratin", "dab", "eosin", "melanin"), grey=grey)
    middle = middle * _strength(rng, 0.1, 1.5)
    return where, np.asarray(sheath * (1 - core) + middle * core, np.float32)


def _lobes(
    rng: np.random.Generator, shape: tuple[int, ...], *, hard: bool = False
) -> Field:
    """Lobed areas that lie together, [0, 1]."""
    y, x = np.mgrid[: shape[0], : shape[1]].astype(np.float32)
    radius_px = np.exp(rng.uniform(np.log(50), np.log(900))) / MPP
    count = int(rng.integers(1, 2 + max(1, int(300 / radius_px))))
    middle = rng.uniform(0, 1, 2) * shape
    spread_px = radius_px * rng.uniform(1, 6)
    rough = slow_noise(rng, shape, max(1.0, radius_px / 6)) * rng.uniform(0, 0.15)
    where = np.zeros(shape, np.float32)
    for number in range(min(count, 16)):
        row, column = middle + rng.normal(0, 1, 2) * spread_px * (number > 0)
        size_px = radius_px * rng.uniform(0.6, 1.3)
        flat = rng.uniform(0.6, 1.6)
        dy = (y - row) * flat
        dx = (x - column) / flat
        angle = np.arctan2(dy, dx)
        edge = 1 + rng.uniform(0, 0.3) * np.cos(3 * angle + rng.uniform(0, 6))
        edge += rng.uniform(0, 0.15) * np.cos(7 * angle + rng.uniform(0, 6)) + rough
        soft_px = rng.uniform(0.5, 1.5 if hard else 4)
        inside = (size_px * edge - np.hypot(dy, dx)) / soft_px + 0.5
        where = np.maximum(where, inside.clip(0, 1))
    return where


def _band(rng: np.random.Generator, shape: tuple[int, ...]) -> Field:
    """A bent band whose width changes, [0, 1]."""
    width_px = np.exp(rng.uniform(np.log(60), np.log(500))) / MPP
    field = slow_noise(rng, shape, width_px * rng.uniform(1.5, 5))
    slope = np.hypot(*np.gradient(field)) + 2e-4
    away = np.abs(field - rng.normal(0, 0.6)) / slope
    varied = width_px * (1 + 0.35 * slow_noise(rng, shape, width_px + 2))
    return np.asarray(
        ((varied / 2 - away) / rng.uniform(0.5, 3) + 0.5).clip(0, 1), np.float32
    )


def _zone(rng: np.random.Generator, shape: tuple[int, ...]) -> Field:
    """A large part of the picture with a soft or a hard border, [0, 1]."""
    field = slow_noise(rng, shape, rng.uniform(10, 50))
    level = rng.uniform(-1, 1.2)
    steep = np.exp(rng.uniform(np.log(1.5), np.log(40)))
    return np.asarray(((field - level) * steep + 0.5).clip(0, 1), np.float32)


def _texture(rng: np.random.Generator, shape: tuple[int, ...], most: float) -> Field:
    """Factor of a density: wide shades and fine grain, (H, W, 1)."""
    shades = 1 + rng.uniform(0, 0.15) * slow_noise(rng, shape, rng.uniform(5, 30))
    grain = rng.uniform(0, most) * rng.standard_normal(shape)
    grain = ndimage.gaussian_filter(grain, rng.uniform(0, 1))
    return np.asarray((shades + grain).clip(0.1, None)[..., None], np.float32)


def _strength(rng: np.random.Generator, low: float, high: float) -> float:
    """Mean density of an area."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _colour(rng: np.random.Generator, names: tuple[str, ...], *, grey: bool) -> Field:
    """Colour near one of these, of mean 1, (3,)."""
    name = names[int(rng.integers(len(names)))]
    colour = np.array(_COLOURS[name]) * np.exp(rng.normal(0, 0.15, 3))
    if grey:
        colour[:] = 1
    return np.asarray(colour / colour.mean(), np.float32)
