"""The tile grid of a slide: stored once, and read by every encoder and picture after it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from thinsection.errors import BudgetError
from thinsection.files.atomic import atomic_path
from thinsection.qc.tissue import box_fractions
from thinsection.slide.geometry import ReadPlan
from thinsection.stages.config import SCRATCH_LIMIT
from thinsection.stages.labels import grid_label
from thinsection.stages.masks import QcStage, TissueStage
from thinsection.stages.stage import Output, Reads, SlideWork, Stage
from thinsection.store.tiles_h5 import TilesWriter, read_tiles
from thinsection.stream.plan import scratch_bytes
from thinsection.tiles import TileTable, tile_grid
from thinsection.tiles.grid import MASK_FILTER, TilesConfig
from thinsection.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class TilesStage(Stage):
    """`GRID/tiles/ID.h5`; value: the `TileTable`.

    With pixel filters the grid is what they keep: the stage is fed by the stream then, which reads
    the `candidates` and hands the kept ones to `write`.
    """

    title: ClassVar[str] = "tile"

    config: TilesConfig
    mask: TissueStage | QcStage  # its value says where the tissue is

    @property
    def reads(self) -> Reads:
        filtered = any(name != MASK_FILTER for name in self.config.tile_filter)
        return "tiles" if filtered else "slide"

    @property
    def grid(self) -> str:
        """Folder of all that belongs to this grid: '256px_0.5mpp'."""
        return grid_label(self.config, self.mask.label)

    @property
    def address(self) -> str:
        return f"{self.grid}/tiles"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"tiles": asdict(self.config) | {"tile_mpp": self.config.mpp}}  # '0.50' is '0.5'

    def candidates(self, work: SlideWork) -> TileTable:
        """The tiles that hold enough tissue, before any pixel filter.

        BudgetError where one tile takes more pixels of the slide's levels than a worker may hold.
        """
        assert work.slide is not None
        found = work.value(self.mask)
        masked = MASK_FILTER in self.config.tile_filter
        tissue = (found.mask, found.frame) if masked else None
        table = tile_grid(work.slide, self.config, tissue=tissue)
        if not masked:
            fraction = box_fractions(found.mask, found.frame, table.coords_l0, table.plan.size_l0)
            table = table.with_columns({"tissue_fraction": fraction})
        table = table.with_columns(self.mask.tile_columns(work, table))
        if scratch_bytes(table.plan) > SCRATCH_LIMIT:
            rule = f"one tile must be read from at most {format_bytes(SCRATCH_LIMIT)}"
            remedy = "the slide lacks pyramid levels near this tile_mpp: ask for a finer one"
            raise BudgetError(f"{rule}, got {table.plan.size_lv} px; {remedy}")
        return table

    def write(self, work: SlideWork, table: TileTable) -> Output:
        """Writes the final table."""
        warning = ""
        if len(table) == 0:
            tissue = work.value(self.mask).mask.any()
            warning = "no tile holds enough tissue" if tissue else "no tissue was found"
        name = self.file(work.entry.slide_id)
        with (
            atomic_path(work.path(name)) as tmp,
            TilesWriter(tmp, dim=0, attributes=work.attributes) as writer,
        ):
            writer.append(table.coords_l0, None)
            for column, values in table.columns.items():
                writer.add_column(column, values)
        facts = {"num_tiles": len(table), "warnings": warning, "plan": asdict(table.plan)}
        return Output(files=(name,), facts=facts, value=table)

    def load(self, work: SlideWork) -> TileTable:
        """The stored grid."""
        stored = read_tiles(work.path(self.file(work.entry.slide_id)))
        facts = work.ledger.stages[self.address].facts["plan"]  # JSON has lists for its tuples
        plan: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()
        }
        return TileTable(coords_l0=stored.coords_l0, plan=ReadPlan(**plan), columns=stored.columns)
