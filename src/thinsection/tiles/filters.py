"""Measures of tiles by their pixels, and filters: by tissue, by pixels, by rules on columns."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import filters, get_namespace
from thinsection.config import nearest
from thinsection.errors import ConfigError, InvalidInputError, naming_part
from thinsection.qc.rules import QcRule, parse_rule
from thinsection.registry import Entry, Registry
from thinsection.tiles.table import TileTable
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

    `px_mean_*`, `px_std_*` (of the population), `px_min_*`, `px_max_*` are measured per channel, in
    0 to 255. `px_hematoxylin`, `px_eosin`, `px_dab` are means over the pixels of the amounts by
    `arrays.filters.stain_tables`, which may be below 0. `px_focus` is the median, over blocks of 32
    px, of the ratio by which the quality check `focus` judges.

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
    # imported here, because most runs do not need this quality check
    from thinsection.qc.checks.focus import Focus, detail_bands

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
    """Colours and stains by name, (B,) each, computed from histograms of channel values."""
    histograms = [Image.fromarray(tile).histogram() for tile in tiles]
    # (B, channel, value)
    counts = np.array(histograms, dtype=np.int64).reshape(-1, 3, 256)
    values = np.arange(256)
    num_px = tiles.shape[1] * tiles.shape[2]
    sums = counts @ values
    mean = sums / num_px
    # sums of whole numbers are exact, so a tile of equal pixels has a deviation of exactly 0
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


TileMask = npt.NDArray[np.bool_]  # (B,), True = keep the tile
TileFilter = Callable[[TileArray], TileMask]  # tiles are (B, H, W, 3)

# It needs no pixels: it is applied to the grid, before anything is read.
MASK_FILTER = "tissue"


def contrast(tiles: TileArray) -> TileMask:
    """Keeps tiles with both dark and white pixels: (B, H, W, 3) -> (B,).

    Over all channel values of a tile: minimum < 135, maximum >= 255, 5th percentile
    < 162 and median < 225, percentiles with linear interpolation between order
    statistics.

    Memory: 2 KiB per tile, beside one tile's values widened to 8 bytes.

    Source: the tile rule of the OHSU GPU tutorial.
    """
    counts = np.stack([np.bincount(tile.ravel(), minlength=256) for tile in tiles])
    cumulative = counts.cumsum(axis=1)
    has_dark = cumulative[:, 134] > 0
    has_white = counts[:, 255] > 0
    dark_enough = _percentile(cumulative, 5.0) < 162
    not_empty = _percentile(cumulative, 50.0) < 225
    return np.asarray(has_dark & has_white & dark_enough & not_empty)


def _percentile(
    cumulative: npt.NDArray[np.int64], percent: float
) -> npt.NDArray[np.float64]:
    """NumPy's default percentile per row, from cumulative histograms (B, 256)."""
    last = int(cumulative[0, -1]) - 1
    position = percent / 100 * last
    index = int(position)
    lower = _order_statistic(cumulative, index)
    upper = _order_statistic(cumulative, min(index + 1, last))
    return np.asarray(lower + (position - index) * (upper - lower), dtype=np.float64)


def _order_statistic(
    cumulative: npt.NDArray[np.int64], index: int
) -> npt.NDArray[np.int64]:
    """The value at an index of the sorted values of each row."""
    return np.asarray((cumulative <= index).sum(axis=1))


FILTERS: Registry[TileFilter] = Registry(
    "tile filter",
    "thinsection.tile_filters",
    (
        Entry(name=MASK_FILTER, help="Tiles that hold enough tissue.", target=None),
        Entry(
            name="contrast", help="Tiles with both dark and white px.", target=contrast
        ),
    ),
)


def load_filters(names: Sequence[str]) -> tuple[TileFilter, ...]:
    """The pixel filters of these names, rules on pixels last.

    'tissue' and rules on other columns need no pixels and are left out; a rule that
    cannot be parsed raises ConfigError all the same.
    """
    rules = parse_rules(names)
    loaded = [
        FILTERS.load(name)
        for name in names
        if name != MASK_FILTER and not is_rule(name)
    ]
    for rule in rules:
        if rule.column in MEASURES:
            loaded.append(partial(rule_filter, rule))
    return tuple(loaded)


def passing(tile_filter: TileFilter, tiles: TileArray) -> TileMask:
    """Tiles that a filter keeps, bool (B,).

    Raises:
        InvalidInputError: a filter of another package returns something else.
    """
    name = getattr(tile_filter, "__name__", "")
    with naming_part("tile filter", name, tile_filter):
        keep = tile_filter(tiles)
        form = (getattr(keep, "dtype", None), getattr(keep, "shape", None))
        if form != (np.bool_, (len(tiles),)):
            raise InvalidInputError(
                f"tile filter {name!r} must return bool of shape ({len(tiles)},), True for a tile "
                f"that stays, got {type(keep).__name__} {form[0]} {form[1]}"
            )
    return keep


def rule_filter(rule: QcRule, tiles: TileArray) -> TileMask:
    """Keeps tiles for which a rule on one of `MEASURES` holds."""
    return np.asarray(rule.holds(measure_tiles(tiles, (rule.column,))[:, 0]))


def is_rule(name: str) -> bool:
    """True if a filter compares a column with a number: 'epithelium>0.3'."""
    return any(symbol in name for symbol in "<>=")


def parse_rules(names: Sequence[str]) -> list[QcRule]:
    """The rules among the names of filters."""
    return [parse_rule(name) for name in names if is_rule(name)]


def kept_by_rules(table: TileTable, names: Sequence[str]) -> TileMask:
    """Keeps tiles, (N,), for which all rules on columns of the table hold.

    Rules on `MEASURES` are pixel filters and are left out.

    Raises:
        ConfigError: the table lacks the column of a rule.
    """
    keep = np.ones(len(table), dtype=np.bool_)
    for rule in parse_rules(names):
        if rule.column in MEASURES:
            continue
        if rule.column not in table.columns:
            hint = nearest(rule.column, (*table.columns, *MEASURES))
            raise ConfigError(
                f"tile_filter must name a column, got {rule.column!r}{hint}"
            )
        keep &= rule.holds(table.columns[rule.column])
    return keep
