"""The tile grid, tile filters and the tile table."""

from thinsection.tiles.filters import TileFilter, load_filters
from thinsection.tiles.grid import TilesConfig, grid_coords, tile_grid
from thinsection.tiles.table import TileTable, check_coords

__all__ = [
    "TileFilter",
    "TileTable",
    "TilesConfig",
    "check_coords",
    "grid_coords",
    "load_filters",
    "tile_grid",
]
