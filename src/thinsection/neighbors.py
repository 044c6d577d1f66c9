"""Deprecated names of what `thinsection.frames` and `thinsection.tiles.graph` hold."""

from thinsection.extras import moved_names

_HOMES = {
    "Neighbors": "thinsection.frames",
    "SearchChoice": "thinsection.frames",
    "TileGraph": "thinsection.tiles.graph",
    "explain": "thinsection.frames",
    "nearest_neighbors": "thinsection.frames",
    "tile_graph": "thinsection.tiles.graph",
}

__all__ = list(_HOMES)
__getattr__ = moved_names(__name__, _HOMES)
