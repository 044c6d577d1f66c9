"""Masked nearest neighbours in bounded memory, and the spatial graph of tiles."""

from thinsection.neighbors.api import explain, nearest_neighbors
from thinsection.neighbors.arguments import Neighbors
from thinsection.neighbors.choice import Choice
from thinsection.neighbors.graph import GraphSpec, TileGraph, parse_graph_spec, tile_graph

__all__ = [
    "Choice",
    "GraphSpec",
    "Neighbors",
    "TileGraph",
    "explain",
    "nearest_neighbors",
    "parse_graph_spec",
    "tile_graph",
]
