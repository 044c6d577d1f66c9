"""Check that tiles are read from the slide on which they were made.

Tiles of another slide have coordinates that fit, so that their pixels and values look right. A
table of `tile_grid` states the size and the name of its slide, and tiles of a results folder its
size. Values that are not stated are not compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from thinsection.errors import InvalidInputError
from thinsection.types import Size


class NamedPyramid(Protocol):
    """What is compared of an opened slide; one of another package may lack `slide_name`."""

    slide_path: str
    size: Size


def check_same_slide(slide: NamedPyramid, tiles: object) -> None:
    """Compares size and name of the slide of some tiles with those of an opened slide.

    Args:
        slide: the slide from which the tiles are to be read, or on which they are to be drawn.
        tiles: a `TileTable`, or tiles of a results folder.

    Raises:
        InvalidInputError: the tiles are of another slide.
    """
    file = Path(slide.slide_path).name
    size = getattr(tiles, "slide_size_l0", None)
    if size is not None and tuple(size) != tuple(slide.size):
        raise InvalidInputError(
            f"tiles must be of a slide of {_words(slide.size)}, got tiles of one of "
            f"{_words(size)} in {file!r}; pass the tiles of this slide"
        )
    name = getattr(slide, "slide_name", None)
    name_of_tiles = getattr(tiles, "slide_name", None)
    if name is not None and name_of_tiles is not None and name_of_tiles != name:
        raise InvalidInputError(
            f"tiles must be of slide {name!r}, got tiles of {name_of_tiles!r} in {file!r}; pass "
            "the tiles of this slide, or dataclasses.replace(tiles, slide_name=None) if both are "
            "the same slide"
        )


def _words(size: Size) -> str:
    width, height = size
    return f"{width} x {height} px"
