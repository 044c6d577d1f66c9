"""The tile grid, the tile table, tile filters and tile transforms."""

from thinsection.tiles.grid import (
    TileFilter,
    TilesConfig,
    TileTable,
    load_filters,
    tile_grid,
)
from thinsection.tiles.transforms import fit_stain

__all__ = [
    "TileFilter",
    "TileTable",
    "TilesConfig",
    "fit_stain",
    "load_filters",
    "tile_grid",
]
