"""Measures of a slide's tiles, and the stains that are estimated from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.files.atomic import write_table
from thinsection.stages.masks import Columns
from thinsection.stages.stage import (
    GridTiles,
    Output,
    SlideWork,
    TileStage,
    TileWriter,
)
from thinsection.stages.tiles import TilesStage, write_columns
from thinsection.store import tiles_h5
from thinsection.store.tile_tables import MEASURED
from thinsection.tiles.batches import EmbeddedBatch
from thinsection.tiles.measures import MEASURES, measure_tiles
from thinsection.tiles.table import Column
from thinsection.tiles.transforms import StainVectors
from thinsection.types import PlainValues, TileArray

_SAMPLED_TILES = 256  # tiles spread evenly over the table, to estimate stain vectors
_SAMPLE_PX = 32  # rows and columns per tile, at least, spread evenly
STAIN_COLUMNS = (
    "macenko_hematoxylin_red",
    "macenko_hematoxylin_green",
    "macenko_hematoxylin_blue",
    "macenko_eosin_red",
    "macenko_eosin_green",
    "macenko_eosin_blue",
    "macenko_hematoxylin_strength",
    "macenko_eosin_strength",
)


class TileMeasures(TileWriter):
    """Measures of a slide's tiles; decode threads add them in any order.

    Memory: 64 bytes per tile, and a sample of at most 2**20 pixels at 3 bytes each.
    """

    reads_pixels: ClassVar[bool] = True

    def __init__(self, stage: "MeasuresStage", tiles: GridTiles) -> None:
        assert tiles.table is not None
        self._stage = stage
        self._tiles = tiles
        num_tiles = tiles.num_tiles
        tile_px = tiles.table.plan.tile_px
        # (N, measures)
        self.values = np.full((num_tiles, len(MEASURES)), np.nan, dtype=np.float32)
        self._kept = [np.empty(0, dtype=np.int64)]
        count = min(num_tiles, _SAMPLED_TILES)
        places = np.linspace(0, num_tiles - 1, count)
        self._places = places.round().astype(np.int64)
        self._step = max(1, tile_px // _SAMPLE_PX)
        edge = len(range(0, tile_px, self._step))
        self._sample = np.empty((count, edge, edge, 3), dtype=np.uint8)

    def measure(self, indices: npt.NDArray[np.int64], tiles: TileArray) -> None:
        """Adds tiles at their places in the table; safe in any thread."""
        if len(indices):
            self.values[indices] = measure_tiles(tiles)
        for row in np.flatnonzero(np.isin(indices, self._places)).tolist():
            slot = np.searchsorted(self._places, indices[row])
            self._sample[slot] = tiles[row, :: self._step, :: self._step]

    def append(self, batch: EmbeddedBatch[GridTiles]) -> None:
        self._kept.append(batch.indices)

    def finish(self) -> Output[Columns]:
        """Writes the measures of the tiles that filters kept, in the order of the tile table."""
        work = self._tiles.work
        slide_id = work.entry.slide_id
        kept = np.concatenate(self._kept)
        table = work.value(self._stage.tiles)
        columns = dict(zip(MEASURES, np.ascontiguousarray(self.values[kept].T)))
        h5_name = self._stage.file(slide_id, ".h5")
        tsv_name = self._stage.file(slide_id, ".tsv")
        write_columns(
            work.path(h5_name), table.coords_l0, columns, self._tiles.attributes
        )
        text_columns: dict[str, Column] = {
            "x_l0": table.coords_l0[:, 0],
            "y_l0": table.coords_l0[:, 1],
        }
        # the order of columns in a table that was read back
        text_columns |= dict(sorted(table.columns.items()))
        text_columns |= columns
        rows = zip(*text_columns.values())
        write_table(work.path(tsv_name), rows, tuple(text_columns))
        facts: dict[str, object] = {"warnings": ""}
        if len(kept):
            for name, values in columns.items():
                facts[name] = float(np.median(values))
            facts |= _stain_facts(self.sample(kept), slide_id)
        return Output(files=(h5_name, tsv_name), facts=facts, value=columns)

    def sample(self, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Pixels (n, 3) of those sampled tiles that the filters kept."""
        return self._sample[np.isin(self._places, kept)].reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class MeasuresStage(TileStage[Columns]):
    """`GRID/measures/ID.h5` and `.tsv`: a row per tile; facts: medians and stains of the slide.

    The stream feeds it, in the pass that encoders need or in a pass of its own.
    """

    title: ClassVar[str] = "measures"

    tiles: TilesStage

    @cached_property
    def address(self) -> str:
        return f"{self.tiles.grid}/{MEASURED}"

    @cached_property
    def settings(self) -> PlainValues:
        return {"measures": list(MEASURES), "version": 1}

    def open(self, tiles: GridTiles) -> TileMeasures:
        return TileMeasures(self, tiles)

    def load(self, work: SlideWork) -> Columns:
        """The stored columns, in the order of `MEASURES`."""
        stored = tiles_h5.read_tiles(work.path(self.file(work.entry.slide_id))).columns
        return {name: stored[name] for name in MEASURES}


def _stain_facts(pixels: npt.NDArray[np.uint8], slide_id: str) -> dict[str, object]:
    """Macenko's stain vectors and strengths; only a reason if there are not two stains."""
    try:
        stains = StainVectors.estimate(pixels, slide_id)
    except InvalidInputError as error:
        reason = str(error).partition("; ")[0]
        return {"warnings": reason.replace("stain normalisation", "stain vectors")}
    values = (*stains.hematoxylin, *stains.eosin, *stains.strengths)
    return dict(zip(STAIN_COLUMNS, values))
