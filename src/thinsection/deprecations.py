"""Names that still work, what is used in their place, and the version in which they go.

`DEPRECATIONS` is the one list. The warnings and the page "Upgrading" are made from it, and a test
fails if a name is still there in the version in which it should be gone.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Deprecation:
    """One former name."""

    name: str  # as users write it: 'thinsection.neighbors.tile_graph'
    instead: str  # what they write in its place
    since: str  # first version that warns
    removed: str  # version without the name

    @property
    def words(self) -> str:
        """The warning."""
        return (
            f"{self.name} is deprecated since {self.since} and is removed in {self.removed}; "
            f"use {self.instead}"
        )


def _moved(face: str, home: str, names: str) -> Iterator[Deprecation]:
    """Names of a module that are now in another one, deprecated since 0.2.0."""
    for name in names.split():
        yield Deprecation(
            name=f"thinsection.{face}.{name}",
            instead=f"thinsection.{home}.{name}",
            since="0.2.0",
            removed="0.3.0",
        )


DEPRECATIONS = (
    *_moved(
        "neighbors",
        "frames",
        "Neighbors SearchChoice explain nearest_neighbors",
    ),
    *_moved("neighbors", "tiles.graph", "TileGraph tile_graph"),
    *_moved(
        "structures",
        "frames",
        "FrameAtoms FrameOptions FrameSummary Structure frame_atoms frame_table read_structure "
        "token_frame_atoms write_frames",
    ),
    *_moved("rescue", "frames", "openfold3"),
    *_moved("slide.deid", "deid", "Report deidentify deidentify_dicom examine"),
    *_moved("encode.memory", "machine", "keep_freed_memory"),
    Deprecation(
        name="thinsection.jobs.backend.Ended",
        instead="job.ended(kind, report=...), where 'over' is now 'fatal'",
        since="0.2.0",
        removed="0.3.0",
    ),
)
_BY_NAME = {one.name: one for one in DEPRECATIONS}


def warn_deprecated(name: str, *, stacklevel: int = 2) -> None:
    """Warns of the use of a name of `DEPRECATIONS`.

    Args:
        name: the former name.
        stacklevel: 2 for the caller of the function that calls this.
    """
    warnings.warn(_BY_NAME[name].words, DeprecationWarning, stacklevel=stacklevel + 1)


def moved_names(face: str) -> Callable[[str], object]:
    """`__getattr__` of a module whose names have moved; each says its new place when it is used.

    Args:
        face: name of the module.
    """

    def getattr_of_face(name: str) -> object:
        moved = _BY_NAME.get(f"{face}.{name}")
        if moved is None:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        warn_deprecated(moved.name)
        home, _, name_there = moved.instead.rpartition(".")
        return getattr(import_module(home), name_there)

    return getattr_of_face


def names_moved_from(face: str) -> list[str]:
    """Names of a module that have moved, for its `__all__`."""
    start = f"{face}."
    return [
        one.name.removeprefix(start)
        for one in DEPRECATIONS
        if one.name.startswith(start)
    ]
