"""Nearest neighbours, structure files with their token frames, and OpenFold3 patches, all in O(N).

This package and the packages about slides do not depend on each other.
"""

from thinsection.frames.mmcif import read_structure
from thinsection.frames.neighbors import (
    Neighbors,
    SearchChoice,
    explain,
    nearest_neighbors,
)
from thinsection.frames.openfold3 import openfold3
from thinsection.frames.structure import Structure
from thinsection.frames.tables import FrameSummary, frame_table, write_frames
from thinsection.frames.token_frames import (
    FrameAtoms,
    FrameOptions,
    frame_atoms,
    token_frame_atoms,
)

__all__ = [
    "FrameAtoms",
    "FrameOptions",
    "FrameSummary",
    "Neighbors",
    "SearchChoice",
    "Structure",
    "explain",
    "frame_atoms",
    "frame_table",
    "nearest_neighbors",
    "openfold3",
    "read_structure",
    "token_frame_atoms",
    "write_frames",
]
