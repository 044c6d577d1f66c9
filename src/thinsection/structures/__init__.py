"""Token frames of structures in O(N) memory, and structure files (mmCIF)."""

from thinsection.structures.frames import (
    FrameAtoms,
    FrameOptions,
    frame_atoms,
    token_frame_atoms,
)
from thinsection.structures.mmcif import read_structure
from thinsection.structures.structure import Structure
from thinsection.structures.tables import FrameSummary, frame_table, write_frames

__all__ = [
    "FrameAtoms",
    "FrameOptions",
    "FrameSummary",
    "Structure",
    "frame_atoms",
    "frame_table",
    "read_structure",
    "token_frame_atoms",
    "write_frames",
]
