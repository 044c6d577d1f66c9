"""The tile grid of a slide, measures of its tiles, and the stains estimated from them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from thinsection.config import from_mapping
from thinsection.errors import BudgetError, InvalidInputError
from thinsection.files.atomic import atomic_path, write_table
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan
from thinsection.stages.labels import grid_label, join_label
from thinsection.stages.masks import MaskStage
from thinsection.stages.stage import (
    AnyStage,
    GridTiles,
    Output,
    Reads,
    SlideWork,
    Stage,
    TileWriter,
)
from thinsection.store import tiles_h5
from thinsection.store.outcome import KnownSlide
from thinsection.store.tile_tables import MEASURED
from thinsection.store.tiles_h5 import TilesWriter, read_tiles, tile_attributes
from thinsection.tiles import TileTable, load_filters, tile_grid
from thinsection.tiles.budget import MAX_SCRATCH, resample_scratch_bytes
from thinsection.tiles.filters import (
    MASK_FILTER,
    MEASURES,
    kept_by_rules,
    measure_tiles,
)
from thinsection.tiles.grid import TilesConfig, region_means
from thinsection.tiles.stream import EmbeddedBatch
from thinsection.tiles.table import Column, Columns
from thinsection.tiles.transforms import STAIN_COLUMNS, StainVectors
from thinsection.types import CoordsL0, PlainValues, TileArray, format_bytes

# name of the column with the share of a tile that the annotations of `roi` cover
ROI_SHARE = "roi_fraction"
# Lower bound of the share of a tile inside the annotations. At 0, a tile outside all of them would
# count as inside; and so would one whose share is only a rounding error.
_MIN_ROI_SHARE = 1e-9


@dataclass(frozen=True, kw_only=True)
class TilesStage(Stage[TileTable]):
    """`GRID/tiles/ID.h5`; value: the `TileTable`.

    `candidates` come from the opened slide. If pixel filters are on, the stream reads their tiles,
    and the filters decide which are kept; so the stage then reads tiles, and not only the slide.
    """

    title: ClassVar[str] = "tile"

    config: TilesConfig
    mask: MaskStage  # gives the tissue
    segments: tuple[AnyStage, ...] = ()  # their class shares become columns
    roi: AnyStage | None = None  # tiles must lie in these annotations

    @property
    def needs(self) -> tuple[AnyStage, ...]:
        if self.roi is None:
            return (self.mask, *self.segments)
        return (self.mask, *self.segments, self.roi)

    @cached_property
    def reads(self) -> Reads:
        return "tiles" if load_filters(self.config.tile_filter) else "slide"

    @cached_property
    def grid(self) -> str:
        """Folder of all results of this grid: '256px_0.5mpp'."""
        labels = [self.mask.label]
        labels += [f"seg-{stage.label}" for stage in self.segments]
        if self.roi is not None:
            labels.append(self.roi.label)
        return grid_label(self.config, join_label(*labels))

    @cached_property
    def address(self) -> str:
        return f"{self.grid}/tiles"

    def has_in_folder(self, stage: AnyStage) -> bool:
        """True for the stages whose results are in the folder of this grid, and for itself."""
        return stage.address.startswith(f"{self.grid}/")

    @cached_property
    def settings(self) -> PlainValues:
        # so that '0.50' equals '0.5'
        settings = asdict(self.config) | {"tile_mpp": self.config.mpp}
        if not self.config.region_px:
            # results from before there were regions keep their keys
            del settings["region_px"]
        return {"tiles": settings}

    def candidates(self, work: SlideWork, slide: Slide) -> TileTable:
        """Tiles with enough tissue, before any pixel filter.

        Raises BudgetError: one tile needs more pixels of the slide's levels than a worker may hold.
        """
        tissue = work.value(self.mask)
        if MASK_FILTER in self.config.tile_filter:
            table = tile_grid(slide, self.config, tissue=tissue)
        else:
            table = tile_grid(slide, self.config, tissue=None)
            fractions = tissue.fractions(table.coords_l0, table.plan.size_l0)
            table = table.with_columns({"tissue_fraction": fractions})
        for stage in self.needs:
            table = table.with_columns(stage.tile_columns(work, table))
        if self.roi is not None:
            min_share = max(self.config.min_tissue_fraction, _MIN_ROI_SHARE)
            shares = region_means(table.columns, table.columns[ROI_SHARE])
            table = table.select(shares >= min_share)
        table = table.select(kept_by_rules(table, self.config.tile_filter))
        if resample_scratch_bytes(table.plan) > MAX_SCRATCH:
            raise BudgetError(
                f"one tile must need at most {format_bytes(MAX_SCRATCH)} of memory to read, got "
                f"{table.plan.size_lv} px; the slide has no pyramid level near this tile_mpp: "
                "choose a finer one"
            )
        return table

    def make(self, work: SlideWork) -> Output[TileTable]:
        """Makes the grid and writes it; called only if no pixel filter is on."""
        slide = work.opened
        table = self.candidates(work, slide)
        return self.write(work, table, self.attributes(work, slide, table))

    def open(self, tiles: GridTiles) -> "GridWriter":
        return GridWriter(self, tiles)

    def attributes(
        self, work: SlideWork, slide: Slide, table: TileTable
    ) -> PlainValues:
        """Attributes of all files of the grid's tiles."""
        return tile_attributes(work.entry.slide_id, slide, table, config=self.config)

    def write(
        self, work: SlideWork, table: TileTable, attributes: PlainValues
    ) -> Output[TileTable]:
        """Writes the final table."""
        name = self.file(work.entry.slide_id)
        write_columns(work.path(name), table.coords_l0, table.columns, attributes)
        facts = {
            "num_tiles": len(table),
            "warnings": self._warning(work, table),
            "plan": asdict(table.plan),
            "tile_mpp": table.plan.tile_mpp,
        }
        return Output(files=(name,), facts=facts, value=table)

    def _warning(self, work: SlideWork, table: TileTable) -> str:
        slide = work.slide
        if len(table) == 0:
            if work.value(self.mask).mask.any():
                return "no tile contains enough tissue"
            return "no tissue was found"
        if self.config.resample == "fast" and slide is not None and not slide.reduced:
            return (
                "resampled exactly, because its segments are not JPEG that the tiff reader "
                "decodes"
            )
        return ""

    def load(self, work: SlideWork) -> TileTable:
        """The stored grid."""
        stored = read_tiles(work.path(self.file(work.entry.slide_id)))
        plan = from_mapping(ReadPlan, work.ledger.stages[self.address].facts["plan"])
        return TileTable(coords_l0=stored.coords_l0, plan=plan, columns=stored.columns)


class GridWriter(TileWriter):
    """Writes the table of the candidates that the pixel filters keep."""

    def __init__(self, stage: TilesStage, tiles: GridTiles) -> None:
        self._stage = stage
        self._tiles = tiles
        self._kept = [np.empty(0, dtype=np.int64)]

    def append(self, batch: EmbeddedBatch[GridTiles]) -> None:
        self._kept.append(batch.indices)

    def finish(self) -> Output[TileTable]:
        """Writes the table of the tiles that were kept."""
        tiles = self._tiles
        assert tiles.table is not None
        table = tiles.table.select(np.concatenate(self._kept))
        return self._stage.write(tiles.work, table, tiles.attributes)


def write_columns(
    path: Path,
    coords_l0: CoordsL0,
    columns: Columns,
    attributes: PlainValues,
) -> None:
    """Writes a per-tile table with its attributes, atomically."""
    with (
        atomic_path(path) as tmp,
        TilesWriter(tmp, dim=0, attributes=attributes) as writer,
    ):
        writer.append(coords_l0, None)
        for name, values in columns.items():
            writer.add_column(name, values)


_SAMPLED_TILES = 256  # tiles spread evenly over the table, to estimate stain vectors
_SAMPLE_PX = 32  # rows and columns per tile, at least, spread evenly


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
        sampled_rows = np.linspace(0, num_tiles - 1, count)
        self._sampled_rows = sampled_rows.round().astype(np.int64)
        self._step = max(1, tile_px // _SAMPLE_PX)
        edge = len(range(0, tile_px, self._step))
        self._sample = np.empty((count, edge, edge, 3), dtype=np.uint8)

    def measure(self, indices: npt.NDArray[np.int64], tiles: TileArray) -> None:
        """Adds the measures of tiles at their rows of the table; safe in any thread."""
        if len(indices):
            self.values[indices] = measure_tiles(tiles)
        for i in np.flatnonzero(np.isin(indices, self._sampled_rows)).tolist():
            slot = np.searchsorted(self._sampled_rows, indices[i])
            self._sample[slot] = tiles[i, :: self._step, :: self._step]

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
        # sorted, as in a table that is read back from its file
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
        return self._sample[np.isin(self._sampled_rows, kept)].reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class MeasuresStage(Stage[Columns]):
    """`GRID/measures/ID.h5` and `.tsv`: a row per tile; facts: medians and stains of the slide.

    The stream feeds it, in the pass that encoders need or in a pass of its own.
    """

    title: ClassVar[str] = "measures"
    reads: ClassVar[Reads] = "tiles"

    tiles: TilesStage
    # results folder whose slides define the usual values; None takes those of the run's folder
    reference: Path | None = None

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

    def check_run(self) -> None:
        """Raises ConfigError, StoreError: the reference has no measures of this grid."""
        if self.reference is not None:
            # imported here: it loads the HTML templates' code, which other runs do not need
            from thinsection.stages.own_tables import check_reference

            check_reference(self.reference, self.address)

    def write_tables(self, out: Path, slides: Sequence[KnownSlide]) -> dict[str, str]:
        """Writes `measures_GRID.csv`: each slide's distance from the usual values."""
        from thinsection.stages.own_tables import write_measures

        write_measures(out, slides, self.address, self.reference)
        return {}


def _stain_facts(pixels: npt.NDArray[np.uint8], slide_id: str) -> dict[str, object]:
    """Macenko's stain vectors and strengths; only a warning if there are not two stains."""
    try:
        stains = StainVectors.estimate(pixels, slide_id)
    except InvalidInputError as error:
        reason = str(error).partition("; ")[0]
        return {"warnings": reason.replace("stain normalisation", "stain vectors")}
    values = (*stains.hematoxylin, *stains.eosin, *stains.strengths)
    return dict(zip(STAIN_COLUMNS, values))
