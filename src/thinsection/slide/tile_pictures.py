"""Pictures of single tiles: `slide.tiles(tiles)[i]`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, overload

import numpy as np
from PIL import Image, ImageDraw

from thinsection.errors import InvalidInputError
from thinsection.files.pages import NOTEBOOK_EDGE_PX, notebook_html
from thinsection.slide.geometry import ReadPlan
from thinsection.slide.resize import Pyramid, read_resized, read_tiles
from thinsection.types import CoordsL0, RgbArray, TileArray, counted

_OUTLINE = (0, 110, 220)


class PlannedTiles(Protocol):
    """Tiles with the plan by which they are read: a `TileTable`, or tiles of a results folder."""

    @property
    def coords_l0(self) -> CoordsL0: ...

    @property
    def plan(self) -> ReadPlan | None: ...


class TilePictures:
    """The pictures of a slide's tiles, each read when it is asked for.

    `pictures[i]` is uint8 (tile_px, tile_px, 3), `pictures[i:j]` uint8 (b, tile_px, tile_px, 3).
    They are what `iter_tiles` gives. Memory: the tiles that are asked for.
    """

    def __init__(self, slide: Pyramid, tiles: PlannedTiles) -> None:
        plan = getattr(tiles, "plan", None)
        if not isinstance(plan, ReadPlan):
            raise InvalidInputError(
                "tiles must say how they are read, got "
                f"{type(tiles).__name__}; pass the result of tile_grid or of results.tiles"
            )
        is_of_slide = plan.level >= len(slide.levels) or math.isclose(
            slide.levels[plan.level].downsample, plan.downsample
        )
        if not is_of_slide or (tiles.coords_l0 > slide.size).any():
            raise InvalidInputError(
                f"tiles must be of this slide, got tiles of another one for {slide.slide_path!r}"
            )
        self._slide = slide
        self.plan = plan
        self.coords_l0 = tiles.coords_l0

    def __len__(self) -> int:
        return len(self.coords_l0)

    def __iter__(self) -> Iterator[RgbArray]:
        for place in range(len(self)):
            yield self[place]

    @overload
    def __getitem__(self, index: int) -> RgbArray: ...

    @overload
    def __getitem__(self, index: slice) -> TileArray: ...

    def __getitem__(self, index: int | slice) -> TileArray:
        if not isinstance(index, slice):
            place = range(len(self))[
                index
            ]  # raises IndexError, also of a negative number
            return np.asarray(self[place : place + 1][0])
        coords_l0 = self.coords_l0[index]
        edge = self.plan.tile_px
        pixels = np.empty((len(coords_l0), edge, edge, 3), dtype=np.uint8)
        if len(pixels):
            read_tiles(self._slide, self.plan, coords_l0, pixels)
        return pixels

    def __repr__(self) -> str:
        return f"TilePictures({counted(len(self), 'tile')} of {self.plan.tile_px} px)"

    def _repr_html_(self) -> str:
        """Returns a thumbnail of the slide with the tiles outlined."""
        width, height = self._slide.size
        factor = min(1.0, NOTEBOOK_EDGE_PX / max(width, height))
        size_th = (max(1, round(width * factor)), max(1, round(height * factor)))
        picture = Image.fromarray(read_resized(self._slide, size_th))
        draw = ImageDraw.Draw(picture)
        for x, y in self.coords_l0.tolist():
            right = x + self.plan.size_l0[0]
            bottom = y + self.plan.size_l0[1]
            box = [value * factor for value in (x, y, right, bottom)]
            draw.rectangle(box, outline=_OUTLINE)
        return notebook_html(np.asarray(picture), repr(self), ["pictures[0] is a tile"])
