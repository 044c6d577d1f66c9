"""Tile filters: by tissue, by pixels, and by rules on columns of the tile table."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest
from thinsection.errors import ConfigError
from thinsection.qc.rules import QcRule, parse_rule
from thinsection.registry import Entry, Registry
from thinsection.tiles.measures import MEASURES, measure_tiles
from thinsection.tiles.table import TileTable
from thinsection.types import TileArray

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
    """The value at a place of each row's sorted values."""
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


def rule_filter(rule: QcRule, tiles: TileArray) -> TileMask:
    """Keeps tiles for which a rule on one of `MEASURES` holds."""
    return np.asarray(rule.holds(measure_tiles(tiles, (rule.column,))[:, 0]))


def is_rule(name: str) -> bool:
    """True where a filter compares a column with a number: 'epithelium>0.3'."""
    return any(symbol in name for symbol in "<>=")


def parse_rules(names: Sequence[str]) -> list[QcRule]:
    """The rules among the names of filters."""
    return [parse_rule(name) for name in names if is_rule(name)]


def kept_by_rules(table: TileTable, names: Sequence[str]) -> TileMask:
    """Keeps tiles, (N,), for which all rules on columns of the table hold.

    Rules on `MEASURES` are pixel filters and are left out.

    Raises:
        ConfigError: a rule names a column that the table has not.
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
