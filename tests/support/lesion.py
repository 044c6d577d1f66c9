"""A lesion for tests: crowded dark nuclei painted over a part of a slide."""

from pathlib import Path

import numpy as np

from thinsection.slide import open_slide
from thinsection.testing.synthetic import PyramidKind, write_levels
from thinsection.types import RgbArray

_LIGHT = np.array([0.42, 0.30, 0.58])  # that a nucleus lets through
_ROUND = np.hypot(*np.mgrid[-7:8, -7:8])

Box = tuple[int, int, int, int]  # left, top, right, bottom, level-0 px


def plant(rgb: RgbArray, box: Box, seed: int) -> RgbArray:
    """The picture with nuclei of 5 to 7 px, one for every 120 px², in the box."""
    rng, (left, top, right, bottom) = np.random.default_rng(seed), box
    light = np.ones(rgb.shape[:2])
    for _ in range((right - left) * (bottom - top) // 120):
        x, y = rng.integers(left + 7, right - 7), rng.integers(top + 7, bottom - 7)
        nucleus = light[y - 7 : y + 8, x - 7 : x + 8]
        nucleus[rng.uniform(5, 7) > _ROUND] = 0
    shown = rgb * np.where(light[..., None] > 0, 1, _LIGHT)
    return np.asarray(shown.round().astype(np.uint8))


def write_with_lesion(
    source: Path, target: Path, box: Box | None, *, mpp: float, seed: int = 0
) -> None:
    """Level 0 of a slide as a pyramid of its own, with a lesion in the box."""
    with open_slide(source, slide_mpp=(mpp, mpp)) as slide:
        rgb = slide.read_region((0, 0), 0, slide.size)
    rgb = rgb if box is None else plant(rgb, box, seed)
    write_levels(
        target, [rgb, rgb[::4, ::4]], PyramidKind(downsamples=(1, 4), mpp=(mpp, mpp))
    )


def inside(coords_l0: np.ndarray, edge: int, box: Box) -> np.ndarray:
    """Share of each tile (N,) that lies in the box."""
    x, y = coords_l0.T
    across = np.minimum(x + edge, box[2]) - np.maximum(x, box[0])
    down = np.minimum(y + edge, box[3]) - np.maximum(y, box[1])
    return np.asarray(np.clip(across, 0, None) * np.clip(down, 0, None) / edge**2)
