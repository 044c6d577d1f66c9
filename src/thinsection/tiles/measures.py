"""What is measured of every tile's px: colours, extremes, focus, amounts of stain."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import filters, get_namespace
from thinsection.qc.checks.artefacts import Focus, detail_bands
from thinsection.qc.engine import QcRule
from thinsection.types import TileArray

_CHANNELS = ("red", "green", "blue")
_COLOURS = tuple(f"px_{what}_{c}" for what in ("mean", "std", "min", "max") for c in _CHANNELS)
_STAINS = ("px_hematoxylin", "px_eosin", "px_dab")
FOCUS = "px_focus"
MEASURES = (*_COLOURS, *_STAINS, FOCUS)  # columns of the tile table, float32


def measure_tiles(tiles: TileArray, names: Sequence[str] = MEASURES) -> npt.NDArray[np.float32]:
    """Measures of tiles uint8 (B, H, W, 3) by name, float32 (B, names), in the order of `names`.

    `px_mean_*`, `px_std_*` (of the population), `px_min_*`, `px_max_*`: of a channel, 0 to 255.
    `px_hematoxylin`, `px_eosin`, `px_dab`: mean over the px of the amounts that
    `arrays.filters.stains_from_rgb` has, before they are clipped at 0.
    `px_focus`: median over blocks of 32 px of the ratio that quality control's `focus` judges by.

    Memory: 6 KiB a tile, beside 20 H W bytes for the focus.
    """
    found: dict[str, npt.NDArray[np.floating]] = {}
    if any(name != FOCUS for name in names):
        found = _of_histograms(tiles)
    if FOCUS in names:
        focus, ns = Focus(), get_namespace()
        bands = (detail_bands(ns, tile, focus.block_px) for tile in tiles)
        found[FOCUS] = np.array([np.median(one / (two + focus.floor)) for one, two in bands])
    return np.stack([found[name] for name in names], axis=1).astype(np.float32)


def rule_filter(rule: QcRule, tiles: TileArray) -> npt.NDArray[np.bool_]:
    """Which tiles, (B,), a rule on one of `MEASURES` holds for."""
    return np.asarray(rule.holds(measure_tiles(tiles, (rule.column,))[:, 0]))


def _of_histograms(tiles: TileArray) -> dict[str, npt.NDArray[np.floating]]:
    """Colours and stains: a histogram has all that they depend on."""
    histograms = [Image.fromarray(tile).histogram() for tile in tiles]
    counts = np.array(histograms, dtype=np.int64).reshape(-1, 3, 256)  # (B, channel, value)
    values, num_px = np.arange(256), tiles.shape[1] * tiles.shape[2]
    mean = counts @ values / num_px
    # sums of whole numbers are exact: equal px have a deviation of 0
    variance = (counts @ values**2 * num_px - (counts @ values) ** 2) / num_px**2
    there = counts > 0
    lowest, highest = there.argmax(axis=2), 255 - there[:, :, ::-1].argmax(axis=2)
    densities, unmixing = _stain_tables()
    amounts = (counts @ densities / num_px) @ unmixing
    columns = np.concatenate([mean, np.sqrt(variance), lowest, highest, amounts], axis=1)
    return dict(zip((*_COLOURS, *_STAINS), columns.T))


_stain_tables = cache(partial(filters.stain_tables, "hed_from_rgb"))
