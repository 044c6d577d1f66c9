"""From windows of a slide to a network's input channels.

'rgb' is normalised by mean and std. 'eosin_hematoxylin_density' are the amounts of the two stains
and the mean optical density, each between the slide's 1st and 99th percentile; the slide's stains
are found once, on a small picture of it.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.errors import require
from thinsection.types import MaskArray, RgbArray, TileArray

Planes = npt.NDArray[np.float32]  # (B, C, H, W)
Matrix = npt.NDArray[np.float64]
# Ruifrok and Johnston 2001; eosin's of length 1
_HEMATOXYLIN = (0.65, 0.70, 0.29)
_EOSIN = np.divide((0.07, 0.99, 0.11), np.linalg.norm((0.07, 0.99, 0.11)))
_MIN_MAGNITUDE = 16.0  # of density, scaled so that black has 255; below it is glass
_LOWEST_WHITE, _USUAL_WHITE = 200.0, 240.0
_BLACK = 1e-10  # where a channel is 0 its density is as good as unbounded
_GLASS_VALUE, _GLASS_SATURATION = (
    0.83 * 255,
    0.12,
)  # px that are brighter and paler are glass
_MIN_PX = 100  # of glass to measure its brightness, and of tissue to find stains in


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

    white: float  # what glass transmits, of 255
    rows: Matrix  # (3, 3): what gives the three channels of the density of R, G, B
    low: tuple[float, ...]  # 1st percentile of each over the slide, shown as 0
    high: tuple[float, ...]  # 99th, shown as 1

    def __call__(self, tiles: TileArray) -> Planes:
        """uint8 (B, H, W, 3) to float32 (B, 3, H, W); each window's channels span [0, 1]."""
        planes = np.empty((len(tiles), 3, *tiles.shape[1:3]), dtype=np.float32)
        table = _density(np.arange(256), self.white).astype(np.float32)
        for tile, plane in zip(tiles, planes):
            amounts = table[tile] @ self.rows.T.astype(np.float32)
            for n, (low, high) in enumerate(zip(self.low, self.high)):
                step = np.float32(255.0 / (high - low + 1e-8))
                steps = np.clip((amounts[..., n] - low) * step, 0, 255).astype(np.uint8)
                first, last = int(steps.min()), int(steps.max())
                plane[n] = (steps - np.float32(first)) / max(1, last - first)
        return planes

    @classmethod
    def of(cls, rgb: RgbArray, where: str) -> "StainChannels":
        """The stains of a slide, from a picture (H, W, 3) of it.

        Memory: 40 bytes per px of the picture. Raises InvalidInputError: it has not two stains.
        """
        brightest, dimmest = rgb.max(axis=2), rgb.min(axis=2)
        glass = brightest > _GLASS_VALUE
        glass &= brightest - dimmest < _GLASS_SATURATION * brightest
        white = _white(rgb, glass)
        vectors = stain_vectors(_density(rgb[~glass], white, _BLACK), white, where)
        third = np.cross(vectors[0], vectors[1])
        inverse = np.linalg.inv(
            np.stack([*vectors, third / np.linalg.norm(third)], axis=1)
        )
        rows = np.stack([inverse[0], inverse[1], np.full(3, 1 / 3)])
        low, high = np.percentile(
            _density(rgb, white).reshape(-1, 3) @ rows.T, (1, 99), axis=0
        )
        flat = high <= low + 1e-8
        low, high = np.where(flat, 0.0, low), np.where(flat, 1.0, high)
        return cls(white=white, rows=rows, low=tuple(low), high=tuple(high))


def stain_vectors(density: Matrix, white: float, where: str) -> tuple[Matrix, Matrix]:
    """Eosin and hematoxylin, unit vectors of density, of px (n, 3) of tissue.

    Source: Macenko et al., ISBI 2009, as HistomicsTK does it: axes of the px about the origin, and
        the 1st and 99th percentile of their angles, exact to a px.
    """
    scaled = density * (math.log(10) * 255 / math.log(white))
    axes = np.linalg.eigh(scaled.T @ scaled)[1][:, :0:-1]  # the two largest
    plane = scaled @ axes
    plane = plane[np.linalg.norm(plane, axis=1) > _MIN_MAGNITUDE]
    rule = f"a slide's stains must be found in >= {_MIN_PX} px that absorb light"
    require(len(plane) >= _MIN_PX, rule, f"{len(plane)} in {where!r}")
    # from the mean direction, which no angle is far from, so that none wraps around
    centre = plane.mean(axis=0)
    angles = np.arctan2(
        plane[:, 1] * centre[0] - plane[:, 0] * centre[1], plane @ centre
    )
    order = np.argsort(angles, kind="stable")
    ends = [
        axes @ plane[order[int(share * len(order) + 0.5)]] for share in (0.01, 0.99)
    ]
    first, second = (end / np.linalg.norm(end) for end in ends)
    one, other = (end @ _EOSIN - end @ _HEMATOXYLIN for end in (first, second))
    return (first, second) if one >= other else (second, first)


def _density(values: npt.NDArray, white: float, darkest: float = 1.0) -> Matrix:
    """Optical density, log10, of px values; what is brighter than glass has none."""
    return np.asarray(
        -np.log10(np.clip(values.astype(np.float64), darkest, white) / white)
    )


def _white(rgb: RgbArray, glass: MaskArray) -> float:
    """Mean value of glass, without px that a program filled in."""
    bright = rgb[glass]
    scanned = bright[(bright < 255).any(axis=1)]
    bright = scanned if len(scanned) >= _MIN_PX else bright
    mean = bright.mean(dtype=np.float64) if len(bright) >= _MIN_PX else _USUAL_WHITE
    return float(np.clip(mean, _LOWEST_WHITE, 255.0))
