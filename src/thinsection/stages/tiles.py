"""The tile grid of a slide."""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from thinsection.config import from_mapping
from thinsection.errors import BudgetError
from thinsection.files.atomic import atomic_path
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan
from thinsection.stages.labels import grid_label, join_label
from thinsection.stages.masks import Columns, QcStage, TissueStage
from thinsection.stages.regions import ROI_SHARE, RegionsStage
from thinsection.stages.segments import SegmentStage
from thinsection.stages.stage import (
    AnyStage,
    GridTiles,
    Output,
    Reads,
    SlideStage,
    SlideWork,
    TileWriter,
)
from thinsection.store.tiles_h5 import TilesWriter, read_tiles, tile_attributes
from thinsection.tiles import TileTable, load_filters, tile_grid
from thinsection.tiles.batches import EmbeddedBatch
from thinsection.tiles.budget import MAX_SCRATCH, read_bytes
from thinsection.tiles.filters import MASK_FILTER, kept_by_rules
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.regions import region_means
from thinsection.types import CoordsL0, PlainValues, format_bytes

# share of a tile inside an annotation; with 0, a tile outside all of them would count as inside,
# and with less the rounding of areas would
_LEAST_SHARE = 1e-9


@dataclass(frozen=True, kw_only=True)
class TilesStage(SlideStage[TileTable]):
    """`GRID/tiles/ID.h5`; value: the `TileTable`.

    `candidates` come from the opened slide. If pixel filters are on, the stream reads their tiles,
    and the filters decide which are kept; so the stage then reads tiles, and not only the slide.
    """

    title: ClassVar[str] = "tile"

    config: TilesConfig
    mask: TissueStage | QcStage  # gives the tissue
    segments: tuple[SegmentStage, ...] = ()  # their class shares become columns
    roi: RegionsStage | None = None  # tiles must lie in these annotations

    @property
    def needs(self) -> tuple[TissueStage | QcStage | SegmentStage | RegionsStage, ...]:
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

    def holds(self, stage: AnyStage) -> bool:
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
            least = max(self.config.min_tissue_fraction, _LEAST_SHARE)
            shares = region_means(table.columns, table.columns[ROI_SHARE])
            table = table.select(shares >= least)
        table = table.select(kept_by_rules(table, self.config.tile_filter))
        if read_bytes(table.plan) > MAX_SCRATCH:
            raise BudgetError(
                f"one tile must be read from at most {format_bytes(MAX_SCRATCH)}, got "
                f"{table.plan.size_lv} px; the slide has no pyramid level near this tile_mpp: "
                "choose a finer one"
            )
        return table

    def run(self, work: SlideWork, slide: Slide) -> Output[TileTable]:
        """Lays the grid and writes it, where no pixel filter is on."""
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
    """The candidates that pixel filters keep."""

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
