"""Items of a dataset of tiles: the pixels of a tile, its label, its place and its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from thinsection.errors import InvalidInputError
from thinsection.results.tile_labels import ChosenTiles
from thinsection.slide import Slide
from thinsection.tiles import TileTable
from thinsection.tiles.order import Numbers
from thinsection.types import RgbArray

Item = dict[str, Any]
Transform = Callable[[RgbArray], object]

_TRANSFORM_NOTE = (
    "raised in the transform of a TileDataset, which gets uint8 of shape (height, width, 3); if it "
    "takes pictures of Pillow, pass transform=lambda tile: augment(Image.fromarray(tile))"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class TileItems:
    """All tiles of a dataset, numbered from 0 to N - 1, and what becomes of them.

    The numbers follow the slides of the results folder, and the rows of their tile tables.

    Attributes:
        chosen: the slides with their tiles and labels; none is empty.
        tile_px: edge of a tile, px.
        has_labels: True if items have a label.
        columns: columns of the tile table that items contain.
        transform: gets uint8 (tile_px, tile_px, 3) and returns the image of the item.
        first_indices: int64 (S + 1,), number of the first tile of each slide, and N.

    Memory: 1 kB per slide; the labels, see `choose_tiles`.
    """

    chosen: Sequence[ChosenTiles]
    tile_px: int
    has_labels: bool
    columns: tuple[str, ...] = ()
    transform: Transform | None = None
    first_indices: Numbers = field(init=False)

    def __post_init__(self) -> None:
        counts = [len(tiles) for tiles in self.chosen]
        first_indices = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        object.__setattr__(self, "first_indices", first_indices)

    def __len__(self) -> int:
        return int(self.first_indices[-1])

    def slides_of(self, indices: Numbers | int) -> Numbers:
        """Number of each tile's slide."""
        return np.searchsorted(self.first_indices, indices, side="right") - 1

    def open(self, number: int) -> tuple[Slide, TileTable]:
        """Opens a slide by its number, and reads its tile table.

        Raises:
            SlideOpenError: the slide cannot be opened.
            StoreError: its tile table is damaged.
            InvalidInputError: another file, another size of tiles, or no such column.
        """
        tiled = self.chosen[number].slide
        slide = tiled.open()
        try:
            table = tiled.table(slide)
            if table.plan.tile_px != self.tile_px:
                raise InvalidInputError(
                    f"tile_px must be {self.tile_px} as in the other slides, got "
                    f"{table.plan.tile_px}"
                )
            missing = [name for name in self.columns if name not in table.columns]
            if missing:
                raise InvalidInputError(
                    f"columns must be of the tile table, got {missing[0]!r}"
                )
        except BaseException:
            slide.close()
            raise
        return slide, table

    def item(
        self,
        index: int,
        tile: RgbArray,
        coords_l0: Numbers,
        columns: Mapping[str, object],
    ) -> Item:
        """Returns the item of a tile.

        Args:
            index: number of the tile.
            tile: its pixels, which the item keeps or the transform gets.
            coords_l0: its corner, (2,).
            columns: its value in each of `columns`.
        """
        number = int(self.slides_of(index))
        chosen = self.chosen[number]
        tile_of_slide = index - int(self.first_indices[number])
        if self.transform is None:
            image: object = torch.from_numpy(tile).permute(2, 0, 1).contiguous()
        else:
            try:
                image = self.transform(tile)
            except Exception as error:
                error.add_note(_TRANSFORM_NOTE)
                raise
        item: Item = {"image": image}
        if self.has_labels:
            item["label"] = chosen.label_of(tile_of_slide)
        item["slide_id"] = chosen.slide_id
        item["coords_l0"] = coords_l0.copy()
        rows = chosen.table_rows(np.array([tile_of_slide]))
        item["row"] = int(rows[0])
        item["index"] = index
        item.update(columns)
        return item
