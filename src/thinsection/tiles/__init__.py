"""The tile grid, the tile table, measures, filters and transforms of tiles."""

from thinsection.tiles.filters import TileFilter, load_filters
from thinsection.tiles.grid import TilesConfig, tile_grid
from thinsection.tiles.nesting import parent_rows
from thinsection.tiles.table import TileTable
from thinsection.tiles.transforms import fit_stain

__all__ = [
    "TileFilter",
    "TileTable",
    "TilesConfig",
    "fit_stain",
    "load_filters",
    "parent_rows",
    "tile_grid",
]
