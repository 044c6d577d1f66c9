"""Masked nearest neighbours in bounded memory, and the spatial graph of tiles."""

from thinsection.neighbors.api import SearchChoice, explain, nearest_neighbors
from thinsection.neighbors.flatten import Neighbors
from thinsection.neighbors.graph import GraphSpec, TileGraph, parse_graph_spec, tile_graph

__all__ = [
    "GraphSpec",
    "Neighbors",
    "SearchChoice",
    "TileGraph",
    "explain",
    "nearest_neighbors",
    "parse_graph_spec",
    "tile_graph",
]
