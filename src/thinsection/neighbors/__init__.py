"""Masked nearest neighbours in bounded memory, and token frames of structures."""

from thinsection.neighbors.api import explain, nearest_neighbors
from thinsection.neighbors.arguments import Neighbors
from thinsection.neighbors.choice import Choice
from thinsection.neighbors.frames import (
    FrameAtoms,
    FrameOptions,
    frame_atoms,
    token_frame_atoms,
)
from thinsection.neighbors.graph import GraphSpec, TileGraph, parse_graph_spec, tile_graph

__all__ = [
    "Choice",
    "FrameAtoms",
    "FrameOptions",
    "GraphSpec",
    "Neighbors",
    "TileGraph",
    "explain",
    "frame_atoms",
    "nearest_neighbors",
    "parse_graph_spec",
    "tile_graph",
    "token_frame_atoms",
]
