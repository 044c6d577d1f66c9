"""The colour of a pen whose strokes are known in part, and how much of it lies on each pixel.

By the law of Beer and Lambert, the densities of red, green and blue in tissue are sums over its
stains. Two stains span a plane. A pen whose hue leaves this plane adds what no amount of the stains
adds, however dense or pale the tissue below it is.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# The fewest pixels of a known stroke, and of tissue.
_LEAST_STROKE_PX = 40
_LEAST_TISSUE_PX = 400
# Tissue with a larger multiple of the usual amount is left out when the plane is fitted again; it
# may be ink that is not known yet.
_OUTLIER = 4.0
_NUM_FITS = 4
# Variance of noise in a density.
_FLOOR = 1e-5
# A pen is told from the stains if the deviation of its amount in tissue is at most this density.
_MOST_NOISE = 0.06
# Pigment, dirt and the edge of the slide are grey too: largest cosine of the angle to grey.
_GREY = 0.97
# Standard deviation of a normal distribution in median absolute deviations.
_DEVIATION = 1.4826

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PenColour:
    """A pen on a slide."""

    # direction of its densities, of length 1, float32 (3,)
    hue: _Floats
    # densities @ normal is the density of the pen, float32 (3,)
    normal: _Floats
    # standard deviation of that in tissue without ink
    noise: float


def pen_colour(strokes: _Floats, tissue: _Floats) -> PenColour | None:
    """The colour of a pen, or None if it is grey or cannot be told from the stains.

    Args:
        strokes: densities of red, green and blue on known strokes of one pen, (N, 3).
        tissue: those of tissue most of which has no ink, (M, 3).

    Memory: 16 bytes per row of `tissue`.
    """
    if len(strokes) < _LEAST_STROKE_PX or len(tissue) < _LEAST_TISSUE_PX:
        return None
    hue = np.median(strokes, axis=0)
    hue /= max(1e-6, float(np.linalg.norm(hue)))
    if hue.sum() > _GREY * 3**0.5:
        return None
    normal, noise = pen_filter(hue, tissue, variance=_FLOOR)
    if noise > _MOST_NOISE:
        return None
    return PenColour(hue=hue.astype(np.float32), normal=normal, noise=noise)


def pen_filter(
    added: _Floats, tissue: _Floats, *, variance: float
) -> tuple[_Floats, float]:
    """The filter that answers 1 to a pen and least to tissue, and its usual answer there.

    Args:
        added: density that the pen adds to red, green and blue, (3,).
        tissue: densities of tissue most of which has no ink, (M, 3); may be empty.
        variance: of densities that the tissue does not show; with a larger one, the filter
            answers more alike to all that has the hue of the pen.

    Memory: 16 bytes per row of `tissue`.
    """
    kept = tissue
    noise = 0.0
    for _ in range(_NUM_FITS):
        moments = kept.T @ kept / max(1, len(kept)) + variance * np.eye(3)
        normal = np.linalg.solve(moments, added)
        normal /= normal @ added
        if not len(tissue):
            break
        amounts = np.abs(tissue @ normal)
        noise = _DEVIATION * float(np.median(amounts))
        kept = tissue[amounts <= _OUTLIER * noise]
    return normal.astype(np.float32), noise
