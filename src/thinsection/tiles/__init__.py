"""The tile grid, the tile table, tile filters and tile transforms."""

from thinsection.tiles.filters import TileFilter, load_filters
from thinsection.tiles.grid import (
    TilesConfig,
    TileTable,
    Tissue,
    check_coords,
    grid_coords,
    tile_grid,
)
from thinsection.tiles.transforms import (
    StainConfig,
    StainTransform,
    TileTransform,
    fit_stain,
    stain_target,
)

__all__ = [
    "StainConfig",
    "StainTransform",
    "TileFilter",
    "TileTable",
    "TileTransform",
    "TilesConfig",
    "Tissue",
    "check_coords",
    "fit_stain",
    "grid_coords",
    "load_filters",
    "stain_target",
    "tile_grid",
]
