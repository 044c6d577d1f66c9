"""Input channels of a network, computed from windows of a slide.

'rgb' is normalised by mean and std. 'eosin_hematoxylin_density' are the amounts of the two
stains and the mean optical density, each scaled between its 1st and 99th percentile on the
slide. The stains of a slide are estimated once, on a small picture of the slide.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.types import MaskArray, RgbArray, TileArray

Planes = npt.NDArray[np.float32]  # (B, C, H, W)
Matrix = npt.NDArray[np.float64]

# Stain vectors of Ruifrok and Johnston 2001; eosin is scaled to length 1.
_HEMATOXYLIN = (0.65, 0.70, 0.29)
_EOSIN = np.divide((0.07, 0.99, 0.11), np.linalg.norm((0.07, 0.99, 0.11)))
# Least density of tissue, scaled so that black has 255.
_MIN_MAGNITUDE = 16.0
# Brightness of glass, of 255: lowest value, and value if it cannot be measured.
_LOWEST_WHITE = 200.0
_USUAL_WHITE = 240.0
# Fraction of light that replaces 0, for which the density would be infinite.
_BLACK = 1e-10
# Pixels that are brighter than this value and less saturated are glass.
_GLASS_VALUE = 0.83 * 255
_GLASS_SATURATION = 0.12
# Fewest pixels of glass to measure its brightness, and of tissue to estimate stains.
_MIN_PX = 100
# A channel with a smaller range is constant.
_FLAT = 1e-8


@dataclass(frozen=True, kw_only=True)
class RgbChannels:
    """(value / 255 - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, tiles: TileArray) -> Planes:
        """uint8 (B, H, W, 3) to float32 (B, 3, H, W)."""
        scale = 1.0 / (255.0 * np.array(self.std, dtype=np.float32))
        shift = np.divide(self.mean, self.std).astype(np.float32)
        return np.ascontiguousarray((tiles * scale - shift).transpose(0, 3, 1, 2))


@dataclass(frozen=True, kw_only=True)
class StainChannels:
    """Eosin, hematoxylin and optical density, in steps of 1/255, [0, 1]."""

    white: float  # brightness of glass, of 255
    rows: Matrix  # (3, 3), maps the densities of R, G, B to the three channels
    low: tuple[float, ...]  # 1st percentile of each channel over the slide, shown as 0
    high: tuple[float, ...]  # 99th percentile, shown as 1

    def __call__(self, tiles: TileArray) -> Planes:
        """uint8 (B, H, W, 3) to float32 (B, 3, H, W) in [0, 1]."""
        planes = np.empty((len(tiles), 3, *tiles.shape[1:3]), dtype=np.float32)
        densities = _density(np.arange(256), self.white).astype(np.float32)
        unmixing = self.rows.T.astype(np.float32)
        for tile, plane in zip(tiles, planes):
            amounts = densities[tile] @ unmixing
            for channel, (low, high) in enumerate(zip(self.low, self.high)):
                scale = np.float32(255.0 / (high - low + _FLAT))
                scaled = (amounts[..., channel] - low) * scale
                steps = np.clip(scaled, 0, 255).astype(np.uint8)
                first = int(steps.min())
                last = int(steps.max())
                plane[channel] = (steps - np.float32(first)) / max(1, last - first)
        return planes

    @classmethod
    def fit(cls, rgb: RgbArray, slide_path: str) -> "StainChannels":
        """Estimates the stains of a slide from a picture (H, W, 3) of it.

        Memory: 40 bytes per pixel of the picture.

        Raises:
            InvalidInputError: the picture does not have two stains.
        """
        brightest = rgb.max(axis=2)
        dimmest = rgb.min(axis=2)
        is_pale = brightest - dimmest < _GLASS_SATURATION * brightest
        glass = (brightest > _GLASS_VALUE) & is_pale
        white = _measure_white(rgb, glass)
        tissue_density = _density(rgb[~glass], white, _BLACK)
        eosin, hematoxylin = stain_vectors(tissue_density, white, slide_path)
        residual = np.cross(eosin, hematoxylin)
        residual = residual / np.linalg.norm(residual)
        unmixing = np.linalg.inv(np.stack([eosin, hematoxylin, residual], axis=1))
        rows = np.stack([unmixing[0], unmixing[1], np.full(3, 1 / 3)])
        amounts = _density(rgb, white).reshape(-1, 3) @ rows.T
        low, high = np.percentile(amounts, (1, 99), axis=0)
        flat = high <= low + _FLAT
        low = np.where(flat, 0.0, low)
        high = np.where(flat, 1.0, high)
        return cls(white=white, rows=rows, low=tuple(low), high=tuple(high))


def stain_vectors(
    density: Matrix, white: float, slide_path: str
) -> tuple[Matrix, Matrix]:
    """Estimates unit density vectors of eosin and hematoxylin from tissue pixels (n, 3).

    Source: Macenko et al., ISBI 2009, as in HistomicsTK: principal axes of the pixels about the
        origin, and the 1st and 99th percentile of their angles, each the angle of a pixel.
    """
    scaled = density * (math.log(10) * 255 / math.log(white))
    # the two axes of largest variance
    axes = np.linalg.eigh(scaled.T @ scaled)[1][:, :0:-1]
    plane = scaled @ axes
    plane = plane[np.linalg.norm(plane, axis=1) > _MIN_MAGNITUDE]
    if len(plane) < _MIN_PX:
        raise InvalidInputError(
            f"a slide must have >= {_MIN_PX} stained pixels to estimate its stains, got "
            f"{len(plane)} in {slide_path!r}"
        )
    # angles are measured from the mean direction, which is close to all pixels, so they do not wrap
    centre = plane.mean(axis=0)
    across = plane[:, 1] * centre[0] - plane[:, 0] * centre[1]
    order = np.argsort(np.arctan2(across, plane @ centre), kind="stable")
    first = _unit(axes @ plane[order[int(0.01 * len(order) + 0.5)]])
    last = _unit(axes @ plane[order[int(0.99 * len(order) + 0.5)]])
    if _eosin_likeness(first) >= _eosin_likeness(last):
        return first, last
    return last, first


def _unit(vector: Matrix) -> Matrix:
    return np.asarray(vector / np.linalg.norm(vector))


def _eosin_likeness(vector: Matrix) -> float:
    return float(vector @ _EOSIN - vector @ _HEMATOXYLIN)


def _density(
    values: npt.NDArray[np.integer], white: float, darkest: float = 1.0
) -> Matrix:
    """Optical density, log10, of pixel values; it is 0 for values brighter than glass."""
    transmitted = np.clip(values.astype(np.float64), darkest, white) / white
    return np.asarray(-np.log10(transmitted))


def _measure_white(rgb: RgbArray, glass: MaskArray) -> float:
    """Mean value of glass pixels, without pixels that a program filled in."""
    bright = rgb[glass]
    scanned = bright[(bright < 255).any(axis=1)]
    if len(scanned) >= _MIN_PX:
        bright = scanned
    mean = _USUAL_WHITE
    if len(bright) >= _MIN_PX:
        mean = bright.mean(dtype=np.float64)
    return float(np.clip(mean, _LOWEST_WHITE, 255.0))
