"""Nearest neighbours, structure files and their token frames, and OpenFold3's rescue: all in O(N).

Nothing here knows of slides, and nothing about slides needs this room.
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
