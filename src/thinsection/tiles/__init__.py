"""The tile grid, the tile table, tile filters and tile transforms."""

from thinsection.tiles.grid import TileFilter, TilesConfig, TileTable, load_filters, tile_grid
from thinsection.tiles.transforms import StainConfig, TileTransform, fit_stain, stain_target

__all__ = [
    "StainConfig",
    "TileFilter",
    "TileTable",
    "TileTransform",
    "TilesConfig",
    "fit_stain",
    "load_filters",
    "stain_target",
    "tile_grid",
]
