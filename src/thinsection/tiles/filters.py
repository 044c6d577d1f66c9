"""Tile filters that look at pixels: uint8 tiles in, keep or not out.

`tissue` is not here: it needs no pixels and is applied to the grid before anything is read.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from thinsection.registry import Entry, Registry

TileFilter = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.bool_]]  # (B, H, W, 3) -> (B,)

MASK_FILTER = "tissue"  # applied on the grid, by tiles.grid


def contrast(tiles: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Keeps tiles with both dark and white px: (B, H, W, 3) -> (B,).

    Over all channel values of a tile: minimum < 135, maximum >= 255, 5th percentile < 162 and
    median < 225, percentiles with linear interpolation between order statistics.

    Memory: 2 KiB per tile, beside one tile's values widened to 8 bytes.

    Source: the tile rule of the OHSU GPU tutorial.
    """
    counts = np.stack([np.bincount(tile.ravel(), minlength=256) for tile in tiles])
    cumulative = counts.cumsum(axis=1)
    keep = (cumulative[:, 134] > 0) & (counts[:, 255] > 0)
    keep &= _percentile(cumulative, 5.0) < 162
    keep &= _percentile(cumulative, 50.0) < 225
    return np.asarray(keep)


def _percentile(cumulative: npt.NDArray[np.int64], percent: float) -> npt.NDArray[np.float64]:
    """NumPy's default percentile of each row's values, from cumulative histograms (B, 256)."""
    last = int(cumulative[0, -1]) - 1
    position = percent / 100 * last
    below = int(position)
    low, high = ((cumulative <= min(i, last)).sum(axis=1) for i in (below, below + 1))
    return np.asarray(low + (position - below) * (high - low), dtype=np.float64)


_OURS = (
    Entry(name=MASK_FILTER, help="Tiles that hold enough tissue.", target=None),
    Entry(name="contrast", help="Tiles with both dark and white px.", target=contrast),
)
FILTERS: Registry[TileFilter] = Registry("tile filter", "thinsection.tile_filters", _OURS)


def load_filters(names: Sequence[str]) -> tuple[TileFilter, ...]:
    """The pixel filters of these names, in order; 'tissue' is skipped.

    Raises:
        ConfigError: no filter of that name, with the nearest that is known.
    """
    return tuple(FILTERS.load(name) for name in names if name != MASK_FILTER)
