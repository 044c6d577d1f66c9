"""PyTorch's anti-aliased Lanczos filter for uint8 pictures, in NumPy and to the byte.

It saves the import of PyTorch where few tiles are resampled. A picture is reduced along x and then
along y. The weights of a result pixel are integers: those of the filter times 2**shift, rounded, at
the largest shift for which they fit into int16. A sum of such products is exact in float64, so the
order in which a matrix product adds does not matter.

Source: `HelperInterpLanczos` and `_compute_index_ranges_int16_weights` of PyTorch's
aten/src/ATen/native/cpu/UpSampleKernel.cpp, after Pillow's Resample.c.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.types import TileArray

_LOBES = 3  # of the filter, on each side
_INT16_LIMIT = 1 << 15
_MOST_SHIFT = 22
_BAND_PX = 32  # result pixels that one matrix makes
_Lines = npt.NDArray[np.uint8]  # (n, m): m values at each of n positions along an axis


class _Band(NamedTuple):
    """Weights of some result pixels of an axis, beside each other."""

    start: int  # first result pixel
    first: int  # first source pixel
    weights: npt.NDArray[
        np.float64
    ]  # (result pixels, source pixels), multiples of 2**-shift


def reduce_tiles(pixels: TileArray, out: TileArray) -> None:
    """Reduces (b, h, w, 3) into `out`, (b, h', w', 3), uint8.

    Memory: two tiles, and 8 bytes for each value of `_BAND_PX` lines of results and of the source
    lines that they need.
    """
    height, width = out.shape[1:3]
    for tile, reduced in zip(pixels, out, strict=True):
        columns = _reduced(_turned(tile), width)
        rows = _turned(columns.reshape(width, len(tile), 3))
        reduced[:] = _reduced(rows, height).reshape(reduced.shape)


def _turned(picture: npt.NDArray[np.uint8]) -> _Lines:
    """A picture (a, b, 3) with its axes changed, as lines (b, 3 a)."""
    turned = np.ascontiguousarray(picture.transpose(1, 0, 2))
    return turned.reshape(len(turned), -1)


def _reduced(lines: _Lines, target_px: int) -> _Lines:
    """Lines (n, m) reduced to (target_px, m)."""
    out = np.empty((target_px, lines.shape[1]), dtype=np.uint8)
    for start, first, weights in _bands(len(lines), target_px):
        num_rows, num_source = weights.shape
        sums = weights @ lines[first : first + num_source].astype(np.float64)
        sums += 0.5
        np.floor(sums, out=sums)
        np.clip(sums, 0, 255, out=sums)
        out[start : start + num_rows] = sums
    return out


@lru_cache(maxsize=8)
def _bands(source_px: int, target_px: int) -> tuple[_Band, ...]:
    """Weights of an axis with `source_px` pixels that gets `target_px`."""
    scale = source_px / target_px
    stretch = max(scale, 1.0)
    reach = _LOBES * stretch
    centre = scale * (np.arange(target_px) + 0.5)
    num_taps = 2 * math.ceil(reach) + 1
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), source_px)
    place = first[:, None] + np.arange(num_taps)
    distance = (place - centre[:, None] + 0.5) * (1 / stretch)
    weights = np.sinc(distance) * np.sinc(distance / _LOBES)
    weights[(abs(distance) >= _LOBES) | (place >= last[:, None])] = 0
    # the sum of one weight after the other, as in PyTorch
    weights /= weights.cumsum(axis=1)[:, -1:]
    shift = 0
    while (
        shift < _MOST_SHIFT
        and int(0.5 + weights.max() * (1 << (shift + 1))) < _INT16_LIMIT
    ):
        shift += 1
    weights *= 1 << shift
    weights = np.trunc(weights + np.copysign(0.5, weights)) / (1 << shift)
    bands = []
    for start in range(0, target_px, _BAND_PX):
        rows = slice(start, start + _BAND_PX)
        low = int(first[start])
        matrix = np.zeros((len(place[rows]), int(last[rows][-1]) - low))
        # taps beyond the picture weigh 0, so the place to which they add does not matter
        columns = np.minimum(place[rows] - low, matrix.shape[1] - 1)
        np.add.at(matrix, (np.arange(len(matrix))[:, None], columns), weights[rows])
        bands.append(_Band(start, low, matrix))
    return tuple(bands)
