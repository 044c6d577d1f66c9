"""Masked nearest neighbours in bounded memory, and the spatial graph of tiles."""

from thinsection.neighbors.api import (
    Neighbors,
    SearchChoice,
    explain,
    nearest_neighbors,
)
from thinsection.neighbors.graph import TileGraph, tile_graph

__all__ = [
    "Neighbors",
    "SearchChoice",
    "TileGraph",
    "explain",
    "nearest_neighbors",
    "tile_graph",
]
