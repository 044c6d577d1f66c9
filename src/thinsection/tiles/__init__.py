"""Tiles: their grid and table, filters, measures, transforms, and the stream that decodes them."""

from thinsection.tiles.budget import StepTimer, StreamConfig
from thinsection.tiles.filters import TileFilter, load_filters
from thinsection.tiles.grid import TilesConfig, tile_grid
from thinsection.tiles.stream import TileBatch, TileStream, iter_tiles
from thinsection.tiles.table import TileTable, parent_rows
from thinsection.tiles.transforms import fit_stain

__all__ = [
    "StepTimer",
    "StreamConfig",
    "TileBatch",
    "TileFilter",
    "TileStream",
    "TileTable",
    "TilesConfig",
    "fit_stain",
    "iter_tiles",
    "load_filters",
    "parent_rows",
    "tile_grid",
]
