"""Measures of the tiles and of the slide, taken while the tiles are in hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.files.atomic import write_table
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.stages.tiles import TilesStage, write_columns
from thinsection.store.tile_tables import MEASURED
from thinsection.store.tiles_h5 import read_tiles
from thinsection.tiles import TileTable
from thinsection.tiles.measures import MEASURES, measure_tiles
from thinsection.tiles.transforms import StainVectors
from thinsection.types import TileArray

_SAMPLED = 256  # tiles, spread evenly over the table, from which stain vectors are estimated
_SAMPLE_PX = 32  # of each, at least so many rows and columns, spread evenly
_PARTS = ("hematoxylin", "eosin")
STAIN_COLUMNS = (
    *(f"macenko_{stain}_{channel}" for stain in _PARTS for channel in ("red", "green", "blue")),
    *(f"macenko_{stain}_strength" for stain in _PARTS),
)


@dataclass(eq=False)
class TileMeasures:
    """Measures of a slide's tiles while decode workers take them, in whatever order.

    Memory: 64 bytes per tile, and a sample of at most 2**20 px, 3 bytes each.
    """

    num_tiles: int
    tile_px: int
    values: npt.NDArray[np.float32] = field(init=False)  # (N, measures)

    def __post_init__(self) -> None:
        self.values = np.full((self.num_tiles, len(MEASURES)), np.nan, dtype=np.float32)
        count, self._step = min(self.num_tiles, _SAMPLED), max(1, self.tile_px // _SAMPLE_PX)
        self._places = np.linspace(0, self.num_tiles - 1, count).round().astype(np.int64)
        edge = len(range(0, self.tile_px, self._step))
        self._sample = np.empty((count, edge, edge, 3), dtype=np.uint8)

    def __call__(self, indices: npt.NDArray[np.int64], tiles: TileArray) -> None:
        """Takes tiles (b, tile_px, tile_px, 3) at their places in the table; from any thread."""
        if len(indices):
            self.values[indices] = measure_tiles(tiles)
        for row in np.flatnonzero(np.isin(indices, self._places)).tolist():
            slot = np.searchsorted(self._places, indices[row])
            self._sample[slot] = tiles[row, :: self._step, :: self._step]

    def sampled(self, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Px (n, 3) of the sampled tiles that were kept."""
        return self._sample[np.isin(self._places, kept)].reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class MeasuresStage(Stage):
    """`GRID/measures/ID.h5` and `.tsv`: a row per tile; facts: what they say of the slide.

    Fed by the stream, in the pass that encoders need, or in one of its own.
    """

    title: ClassVar[str] = "measures"
    reads = "tiles"

    tiles: TilesStage

    @property
    def address(self) -> str:
        return f"{self.tiles.grid}/{MEASURED}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"measures": list(MEASURES), "version": 1}

    def begin(self, work: SlideWork, table: TileTable) -> TileMeasures:
        """What takes the tiles of the table."""
        made = TileMeasures(num_tiles=len(table), tile_px=table.plan.tile_px)
        work.values[f"{self.address}, of all tiles"] = made
        return made

    def write(self, work: SlideWork, kept: npt.NDArray[np.int64]) -> Output:
        """Writes the measures of the tiles that filters kept, in the order of the tile table."""
        table: TileTable = work.value(self.tiles)
        made: TileMeasures = work.values.pop(f"{self.address}, of all tiles")
        columns = dict(zip(MEASURES, np.ascontiguousarray(made.values[kept].T)))
        name, text = (self.file(work.entry.slide_id, suffix) for suffix in (".h5", ".tsv"))
        write_columns(work.path(name), table.coords_l0, columns, work.attributes)
        shown = dict(zip(("x_l0", "y_l0"), table.coords_l0.T))
        shown |= dict(sorted(table.columns.items())) | columns  # as a table that was read back
        write_table(work.path(text), zip(*shown.values()), tuple(shown))
        facts: dict[str, Any] = {"warnings": ""}
        if len(kept):
            facts |= {column: float(np.median(values)) for column, values in columns.items()}
            facts |= _stains(made.sampled(kept), work.entry.slide_id)
        return Output(files=(name, text), facts=facts, value=columns)

    def load(self, work: SlideWork) -> Mapping[str, npt.NDArray]:
        """The stored columns, in the order of `MEASURES`."""
        stored = read_tiles(work.path(self.file(work.entry.slide_id))).columns
        return {name: stored[name] for name in MEASURES}


def _stains(px: npt.NDArray[np.uint8], slide_id: str) -> dict[str, Any]:
    """Macenko's stain vectors and strengths; none, and why, where there are not two stains."""
    try:
        found = StainVectors.of(px, slide_id)
    except InvalidInputError as error:
        reason = str(error).partition("; ")[0].replace("stain normalisation", "stain vectors")
        return {"warnings": reason}
    return dict(zip(STAIN_COLUMNS, (*found.hematoxylin, *found.eosin, *found.strengths)))
