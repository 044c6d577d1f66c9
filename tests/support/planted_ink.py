"""Translucent and opaque ink of seven colours over real tissue in five stains, with known truth.

The tissue is that of generator C (`held_out_tissue`), whose sections no training of the ink network
has, stained anew. Strokes are drawn by the shapes of C: each adds its density to what is below it.
Seeds below 20,000 are for tuning, those from 20,000 for reported results.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import ndimage
from tests.support.held_out_shapes import Canvas, Field
from tests.support.held_out_tissue import draw_pieces, photograph

from thinsection.types import MaskArray, RgbArray

MPP = 8.0
STAINS = ("he", "ihc", "pas", "trichrome", "faint")
# Density of red, green and blue of a dense layer: blue, green and red as on real pens, the others
# as their makers' colours look.
INKS = {
    "blue": (1.9, 1.2, 0.25),
    "green": (1.8, 0.5, 0.7),
    "red": (0.15, 1.7, 1.25),
    "black": (2.0, 2.05, 2.1),
    "brown": (0.6, 1.2, 1.9),
    "purple": (1.0, 1.7, 0.5),
    "orange": (0.05, 0.75, 1.8),
}
# Share of the density of a dense layer.
STRENGTHS = (0.25, 0.5, 1.0)
_HAEMATOXYLIN = (0.65, 0.70, 0.29)
_EOSIN = (0.07, 0.99, 0.11)
_COLLAGEN = (0.85, 0.48, 0.14)
_MUSCLE = (0.15, 0.85, 0.45)
_SCHIFF = (0.22, 0.88, 0.40)
# Mean density over 24 µm above which a pixel is tissue.
_TISSUE_DENSITY = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class InkedTissue:
    """A picture of 8 µm/px with strokes of one pen."""

    rgb: RgbArray
    # ink on tissue, and tissue at least 40 µm from ink
    ink: MaskArray
    clean: MaskArray


def inked_tissue(
    seed: int,
    *,
    stain: str,
    color: str,
    strength: float,
    size: tuple[int, int] = (560, 420),
) -> InkedTissue:
    """Tissue `seed` in a stain, with two to four strokes; some cross glass, some lie in tissue."""
    rng = np.random.default_rng([seed, 52, STAINS.index(stain)])
    canvas = Canvas(rng, (size[1], size[0]), MPP, grey=False)
    draw_pieces(canvas, "ihc" if stain == "ihc" else "he")
    canvas.density = _stained_anew(canvas, stain)
    return ink_over(canvas, color, strength)


def inked_picture(
    rgb: RgbArray, mpp: float, seed: int, *, color: str, strength: float
) -> InkedTissue:
    """A picture at 8 µm/px with two to four strokes; its brightest pixels are glass."""
    factor = MPP / mpp
    size = (round(rgb.shape[1] / factor), round(rgb.shape[0] / factor))
    small = np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.BOX))
    rng = np.random.default_rng([seed, 53])
    canvas = Canvas(rng, small.shape[:2], MPP, grey=False)
    glass = np.percentile(small, 99, axis=(0, 1))
    canvas.density = -np.log((small / glass).clip(1 / 255, 1)).astype(np.float32)
    return ink_over(canvas, color, strength)


def ink_over(canvas: Canvas, color: str, strength: float) -> InkedTissue:
    """Strokes over the tissue of a canvas."""
    seen = ndimage.uniform_filter(
        canvas.density.mean(axis=2), max(1, round(24 / canvas.mpp))
    )
    tissue = seen > _TISSUE_DENSITY
    cover = np.zeros(canvas.shape, np.float32)
    for _ in range(int(canvas.rng.integers(2, 5))):
        cover = np.maximum(cover, _stroke(canvas, tissue))
    canvas.density += np.array(INKS[color], np.float32) * (cover * strength)[..., None]
    near = ndimage.distance_transform_edt(cover < 0.1) * canvas.mpp <= 40
    return InkedTissue(
        rgb=photograph(canvas, "he"),
        ink=(cover > 0.5) & tissue,
        clean=tissue & ~near,
    )


def _stained_anew(canvas: Canvas, stain: str) -> Field:
    """The same tissue in another stain."""
    density = canvas.density
    if stain in ("he", "ihc"):
        return density
    if stain == "faint":
        return density * np.float32(canvas.rng.uniform(0.3, 0.5))
    basis = np.array([_HAEMATOXYLIN, _EOSIN])
    basis = np.vstack([basis, np.cross(*basis)])
    amounts = (density @ np.linalg.inv(basis)).clip(0, None)
    first = amounts[..., :1] * np.array(_HAEMATOXYLIN)
    if stain == "pas":
        return np.asarray(first + amounts[..., 1:2] * np.array(_SCHIFF), np.float32)
    share = 1 / (1 + np.exp(-4 * canvas.slow_noise(300)))[..., None]
    second = share * np.array(_COLLAGEN) + (1 - share) * np.array(_MUSCLE)
    return np.asarray(first + amounts[..., 1:2] * second, np.float32)


def _stroke(canvas: Canvas, tissue: MaskArray) -> Field:
    """Cover of a stroke, a ring or a dot: deeper at its rim, or dry in streaks."""
    rng = canvas.rng
    width_um = canvas.draw_log(150, 700)
    shape = rng.choice(("stroke", "ring", "dot"), p=(0.6, 0.25, 0.15))
    if shape == "ring":
        width_um = min(width_um, 350)
        path = canvas.ring(rng.uniform(400, 1_300))
    else:
        length_um = width_um / 4 if shape == "dot" else rng.uniform(900, 4_000)
        path = canvas.arc(length_um, inside=tissue)
    band = canvas.stroke(path, width_um) > 0.5
    depth_um = ndimage.distance_transform_edt(band) * canvas.mpp
    cover = np.clip(depth_um / rng.uniform(8, 40), 0, 1)
    cover *= 1 + rng.uniform(0, 0.3) * np.exp(-((depth_um / 40) ** 2))
    if rng.random() < 0.3:
        for _ in range(int(rng.integers(2, 7))):
            aside = path + rng.normal(0, width_um / 4 / canvas.mpp, 2)
            dry = canvas.stroke(
                aside[int(rng.uniform(0, 0.7) * len(aside)) :], rng.uniform(15, 50)
            )
            cover *= 1 - canvas.soften(dry > 0.5, 6)
    return np.asarray(cover * (1 + 0.08 * canvas.slow_noise(150)), np.float32).clip(
        0, None
    )
