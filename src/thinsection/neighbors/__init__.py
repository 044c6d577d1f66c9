"""Masked nearest neighbours in bounded memory, and the spatial graph of tiles."""

from thinsection.neighbors.api import SearchChoice, explain, nearest_neighbors
from thinsection.neighbors.graph import TileGraph, tile_graph
from thinsection.neighbors.query import Neighbors

__all__ = [
    "Neighbors",
    "SearchChoice",
    "TileGraph",
    "explain",
    "nearest_neighbors",
    "tile_graph",
]
