"""Measures of tiles by their pixels: colours, stains and focus."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import filters, get_namespace
from thinsection.qc.checks.focus import Focus, detail_bands
from thinsection.types import TileArray

_CHANNELS = ("red", "green", "blue")
_COLOURS = tuple(
    f"px_{statistic}_{channel}"
    for statistic in ("mean", "std", "min", "max")
    for channel in _CHANNELS
)
_STAINS = ("px_hematoxylin", "px_eosin", "px_dab")
FOCUS = "px_focus"
MEASURES = (*_COLOURS, *_STAINS, FOCUS)  # columns of the tile table, float32


def measure_tiles(
    tiles: TileArray, names: Sequence[str] = MEASURES
) -> npt.NDArray[np.float32]:
    """Measures tiles uint8 (B, H, W, 3): float32 (B, names), in the order of `names`.

    `px_mean_*`, `px_std_*` (of the population), `px_min_*`, `px_max_*`: per channel,
    0 to 255. `px_hematoxylin`, `px_eosin`, `px_dab`: mean over the pixels of the
    amounts by `arrays.filters.stain_tables`, which may be below 0. `px_focus`: median
    over blocks of 32 px of the ratio that quality control's `focus` judges by.

    Memory: 6 KiB a tile, beside 20 H W bytes for the focus.
    """
    columns: dict[str, npt.NDArray[np.floating]] = {}
    if any(name != FOCUS for name in names):
        columns.update(_histogram_measures(tiles))
    if FOCUS in names:
        columns[FOCUS] = _focus_of_tiles(tiles)
    return np.stack([columns[name] for name in names], axis=1).astype(np.float32)


def _focus_of_tiles(tiles: TileArray) -> npt.NDArray[np.float64]:
    """Median ratio of fine to coarse detail per tile, (B,)."""
    focus = Focus()
    ns = get_namespace()
    medians = []
    for tile in tiles:
        gray = filters.gray32_from_rgb(ns, tile)
        fine, coarse = detail_bands(ns, gray, focus.block_px)
        medians.append(np.median(fine / (coarse + focus.floor)))
    return np.array(medians)


def _histogram_measures(
    tiles: TileArray,
) -> Mapping[str, npt.NDArray[np.floating]]:
    """Colours and stains by name, (B,) each: a histogram holds all they depend on."""
    histograms = [Image.fromarray(tile).histogram() for tile in tiles]
    # (B, channel, value)
    counts = np.array(histograms, dtype=np.int64).reshape(-1, 3, 256)
    values = np.arange(256)
    num_px = tiles.shape[1] * tiles.shape[2]
    sums = counts @ values
    mean = sums / num_px
    # sums of whole numbers are exact, so that equal pixels have a deviation of 0
    variance = (counts @ values**2 * num_px - sums**2) / num_px**2
    present = counts > 0
    lowest = present.argmax(axis=2)
    highest = 255 - present[:, :, ::-1].argmax(axis=2)
    densities, unmixing = filters.stain_tables("hed_from_rgb")
    amounts = (counts @ densities / num_px) @ unmixing
    columns = np.concatenate(
        [mean, np.sqrt(variance), lowest, highest, amounts], axis=1
    )
    return dict(zip((*_COLOURS, *_STAINS), columns.T))
