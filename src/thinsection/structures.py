"""Deprecated names of what `thinsection.frames` holds."""

from thinsection.extras import moved_names

_NAMES = (
    "FrameAtoms",
    "FrameOptions",
    "FrameSummary",
    "Structure",
    "frame_atoms",
    "frame_table",
    "read_structure",
    "token_frame_atoms",
    "write_frames",
)

__all__ = list(_NAMES)
__getattr__ = moved_names(__name__, dict.fromkeys(_NAMES, "thinsection.frames"))
