"""Measures of a slide's tiles, and the stains that are estimated from them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.files.atomic import write_table
from thinsection.stages.masks import Columns
from thinsection.stages.stage import Output, SlideWork, TileStage
from thinsection.stages.tiles import TilesStage, write_columns
from thinsection.store import tiles_h5
from thinsection.store.tile_tables import MEASURED
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


@dataclass(eq=False)
class TileMeasures:
    """Measures of a slide's tiles; decode threads add them in any order.

    Memory: 64 bytes per tile, and a sample of at most 2**20 pixels at 3 bytes each.
    """

    num_tiles: int
    tile_px: int
    values: npt.NDArray[np.float32] = field(init=False)  # (N, measures)

    def __post_init__(self) -> None:
        self.values = np.full((self.num_tiles, len(MEASURES)), np.nan, dtype=np.float32)
        count = min(self.num_tiles, _SAMPLED_TILES)
        places = np.linspace(0, self.num_tiles - 1, count)
        self._places = places.round().astype(np.int64)
        self._step = max(1, self.tile_px // _SAMPLE_PX)
        edge = len(range(0, self.tile_px, self._step))
        self._sample = np.empty((count, edge, edge, 3), dtype=np.uint8)

    def __call__(self, indices: npt.NDArray[np.int64], tiles: TileArray) -> None:
        """Adds tiles (b, tile_px, tile_px, 3) at their places in the table; safe in any thread."""
        if len(indices):
            self.values[indices] = measure_tiles(tiles)
        for row in np.flatnonzero(np.isin(indices, self._places)).tolist():
            slot = np.searchsorted(self._places, indices[row])
            self._sample[slot] = tiles[row, :: self._step, :: self._step]

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

    def write(
        self,
        work: SlideWork,
        measures: TileMeasures,
        kept: npt.NDArray[np.int64],
        attributes: PlainValues,
    ) -> Output[Columns]:
        """Writes the measures of the tiles that filters kept, in the order of the tile table."""
        table = work.value(self.tiles)
        columns = dict(zip(MEASURES, np.ascontiguousarray(measures.values[kept].T)))
        h5_name = self.file(work.entry.slide_id, ".h5")
        tsv_name = self.file(work.entry.slide_id, ".tsv")
        write_columns(work.path(h5_name), table.coords_l0, columns, attributes)
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
            facts |= _stain_facts(measures.sample(kept), work.entry.slide_id)
        return Output(files=(h5_name, tsv_name), facts=facts, value=columns)

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
