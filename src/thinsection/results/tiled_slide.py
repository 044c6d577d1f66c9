"""Slides of a results folder with their tile grids, to read the same tiles from the slide files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from thinsection.config import from_mapping, nearest
from thinsection.errors import InvalidInputError, StoreError
from thinsection.results.folder import Listener, Results, leaving_out
from thinsection.results.recorded_slide import RecordedSlide, recorded_slide
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, best_level
from thinsection.store.ledger import SlideLedger
from thinsection.store.tile_tables import TileTableFile
from thinsection.store.tiles_h5 import Attributes, TilesFile, read_tiles
from thinsection.tiles import TileTable
from thinsection.tiles.categories import (
    NONE,
    Categories,
    joined_categories,
    recoded,
)
from thinsection.tiles.table import Column


@dataclass(frozen=True, kw_only=True)
class ColumnFile:
    """Place of a column that is not in the tile table: its table, and its name there."""

    path: Path
    column: str


@dataclass(frozen=True, kw_only=True)
class TiledSlide(RecordedSlide):
    """A slide and its tile grid: plain values that travel between processes.

    Attributes:
        grid: name of the tile grid.
        tiles_path: file of the tile grid.
        num_tiles: number of tiles in the grid.
        plan: how the tiles are read; None for a grid of another tool.
        more_columns: columns of other tables that `table` adds, by name.
        categories: categories of columns, shared by all slides. `table` gives their codes as
            float32, and NaN for no category.
    """

    grid: str
    tiles_path: Path
    num_tiles: int
    plan: ReadPlan | None
    more_columns: Mapping[str, ColumnFile] = field(default_factory=dict)
    categories: Mapping[str, Categories] = field(default_factory=dict)

    def table(self, slide: Slide) -> TileTable:
        """Tile table of the opened slide, with its columns. Raises StoreError: it is damaged."""
        stored = read_tiles(self.tiles_path, embeddings=False)
        if len(stored.coords_l0) != self.num_tiles:
            raise StoreError(
                f"number of tiles must be {self.num_tiles}, got {len(stored.coords_l0)} in "
                f"{str(self.tiles_path)!r}; run again"
            )
        columns = dict(stored.columns)
        for name, place in self.more_columns.items():
            columns[name] = self._column(name, place, stored)
        plan = self.plan or _plan_of_peer(slide, stored.attributes)
        return TileTable(
            coords_l0=stored.coords_l0,
            plan=plan,
            columns=columns,
            slide_size_l0=self.size_l0,
        )

    def _column(self, name: str, place: ColumnFile, stored: TilesFile) -> Column:
        """Column of another table with the same tiles; of categories the shared codes."""
        table = read_tiles(place.path, embeddings=False)
        has_column = place.column in table.columns
        if not has_column or not np.array_equal(table.coords_l0, stored.coords_l0):
            raise StoreError(
                f"column {name!r} must be of the tiles of the grid, got others in "
                f"{str(place.path)!r}; write it again"
            )
        values = table.columns[place.column]
        if name not in self.categories:
            return values
        if place.column not in table.categories:
            raise StoreError(
                f"column {name!r} must hold categories as on the other slides, got numbers in "
                f"{str(place.path)!r}; write it again"
            )
        codes = recoded(values, table.categories[place.column], self.categories[name])
        # datasets of tiles hold numbers; NaN is no value, as in other columns
        return np.where(codes == NONE, np.nan, codes).astype(np.float32)


def tiled_slides(
    results: Results, grid: str, on_left_out: Listener | None = None
) -> Iterator[TiledSlide]:
    """Yields the slides of a results folder that have tiles in a grid, in the folder's order.

    Args:
        results: an opened results folder.
        grid: one of `results.grids`.
        on_left_out: called with a line for each slide without tiles; with None that is an error.
    """
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, on_left_out):
            ledger.check()
            yield tiled_slide(results, ledger, grid)


def tiled_slide(results: Results, ledger: SlideLedger, grid: str) -> TiledSlide:
    """Returns one slide of a results folder with its tile grid.

    Raises:
        StoreError: the slide has no tiles in this grid.
        InvalidInputError: the slide was imported without the path of its file.
    """
    tiles_path = results.file(ledger.slide_id, f"{grid}/tiles")
    recorded = recorded_slide(ledger, lambda: results.records)
    facts = ledger.stages[f"{grid}/tiles"].facts
    return TiledSlide(
        entry=recorded.entry,
        size_l0=recorded.size_l0,
        reader=recorded.reader,
        rendering=recorded.rendering,
        grid=grid,
        tiles_path=tiles_path,
        num_tiles=int(facts["num_tiles"]),
        plan=from_mapping(ReadPlan, facts["plan"]) if "plan" in facts else None,
    )


def with_columns(
    results: Results, grid: str, slides: Sequence[TiledSlide], names: Sequence[str]
) -> list[TiledSlide]:
    """Slides whose tile tables also have columns of other tables: own columns, measures, heatmaps.

    Categories of the slides are joined, so that a code means the same on each of them.

    Args:
        results: an opened results folder.
        grid: one of `results.grids`.
        slides: slides of this grid, at least one.
        names: columns as in `results.tiles`.

    Raises InvalidInputError: the first slide lacks a column.
    """
    if not names:
        return list(slides)
    first, *others = results.tile_tables(slides[0].entry.slide_id, grid)
    tables: dict[str, tuple[TileTableFile, str]] = {}  # by name of the column
    for table in others:
        for column in table.columns:
            tables[table.label(column)] = table, column
    categories: dict[str, Categories] = {}
    more_columns: dict[str, dict[str, ColumnFile]] = {}  # by slide id
    for name in names:
        if name not in tables and name not in first.columns:
            known = (*first.columns, *tables)
            raise InvalidInputError(
                f"columns must be of the tile tables, got {name!r}{nearest(name, known)}; "
                f"they have {', '.join(known) or 'none'}"
            )
        if name not in tables:
            continue
        table, column = tables[name]
        has_categories = column in table.categories()
        parts = []
        for slide in slides:
            slide_id = slide.entry.slide_id
            path = results.folder / table.address / f"{slide_id}.h5"
            place = ColumnFile(path=path, column=column)
            more_columns.setdefault(slide_id, {})[name] = place
            if has_categories and path.is_file():
                # a damaged file is reported when its slide is read
                with suppress(StoreError):
                    stored = replace(table, path=path).categories()
                    if column in stored:
                        parts.append(stored[column])
        if has_categories:
            categories[name] = joined_categories(parts)
    return [
        replace(
            slide,
            more_columns=more_columns.get(slide.entry.slide_id, {}),
            categories=categories,
        )
        for slide in slides
    ]


def _plan_of_peer(slide: Slide, attributes: Attributes) -> ReadPlan:
    """Read plan for tiles of another tool, from the attributes that our import has written."""
    edge = int(attributes["patch_size_level0"])
    tile_px = int(attributes["patch_size"])
    stride_x, stride_y = (int(step) for step in attributes["stride_l0"])
    level = best_level(slide.levels, edge / tile_px)
    edge_lv = round(edge / level.downsample)
    mpp = attributes.get("tile_mpp")
    return ReadPlan(
        tile_px=tile_px,
        tile_mpp=None if mpp is None else float(mpp),
        level=level.index,
        downsample=level.downsample,
        size_lv=(edge_lv, edge_lv),
        size_l0=(edge, edge),
        stride_l0=(stride_x, stride_y),
    )
