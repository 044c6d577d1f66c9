"""Masked nearest neighbours in bounded memory, and token frames of structures."""

from thinsection.neighbors.api import explain, nearest_neighbors
from thinsection.neighbors.arguments import Neighbors
from thinsection.neighbors.choice import Choice
from thinsection.neighbors.frame_files import write_frames
from thinsection.neighbors.frame_table import FrameSummary, frame_table
from thinsection.neighbors.frames import (
    FrameAtoms,
    FrameOptions,
    frame_atoms,
    token_frame_atoms,
)
from thinsection.neighbors.graph import GraphSpec, TileGraph, parse_graph_spec, tile_graph
from thinsection.neighbors.mmcif import read_structure
from thinsection.neighbors.structure import Structure

__all__ = [
    "Choice",
    "FrameAtoms",
    "FrameOptions",
    "FrameSummary",
    "GraphSpec",
    "Neighbors",
    "Structure",
    "TileGraph",
    "explain",
    "frame_atoms",
    "frame_table",
    "nearest_neighbors",
    "parse_graph_spec",
    "read_structure",
    "tile_graph",
    "token_frame_atoms",
    "write_frames",
]
