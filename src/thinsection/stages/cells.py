"""Cells of another tool: their table, and their counts in the tiles of each grid."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from thinsection.cells.config import CellsConfig, name_of_source
from thinsection.cells.count import (
    COUNTED,
    TileCounts,
    count_cells,
    per_mm2,
    tissue_mm2,
)
from thinsection.cells.place import CellSlide
from thinsection.cells.sources import digest_of, import_cells
from thinsection.cells.table import FOLDER, PREFIX, CellTable
from thinsection.errors import InvalidInputError, MissingMppError
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.labels import slug
from thinsection.stages.masks import MaskStage
from thinsection.stages.stage import AnyStage, Output, Reads, SlideWork, Stage
from thinsection.stages.tiles import TilesStage, write_columns
from thinsection.store.identity import file_times
from thinsection.store.ledger import SLIDES, SlideLedger
from thinsection.store.tiles_h5 import read_tiles
from thinsection.tiles.table import Column, Columns
from thinsection.types import CoordsL0, Floats, PlainValues, Size

# facts about the file of cells: SHA-256 of its bytes, and its time stamps at that moment
_SUM_FACT = "cells_sum"
_TIMES_FACT = "cells_times"


@dataclass(frozen=True, kw_only=True)
class CellsStage(Stage[CellTable]):
    """`cells/NAME/ID.parquet`: the cells of one slide in a file of another tool; a `CellTable`.

    The tissue only decides whether the file fits the slide, and changes nothing in the table. So
    grids of several kinds of tissue share it, and it `needs` none.
    """

    title: ClassVar[str] = "cells"
    reads: ClassVar[Reads] = "store"

    config: CellsConfig
    source: str  # one of `config.cells`
    mask: MaskStage

    @property
    def needs(self) -> tuple[AnyStage, ...]:
        return ()

    @property
    def name(self) -> str:
        """Name of the cells: that of their folder or column."""
        return slug(name_of_source(self.source))

    @cached_property
    def address(self) -> str:
        return f"{SLIDES}/{self.annotation_setting}"

    @property
    def annotation_setting(self) -> str:
        return f"{PREFIX}{self.name}"

    @cached_property
    def settings(self) -> PlainValues:
        return {
            "cells": 1,
            "frame": self.config.cells_frame,
            "columns": list(self.config.cells_columns),
        }

    def annotation_hash(self, entry: SlideEntry, ledger: SlideLedger) -> str:
        """SHA-256 of the file; it is not read again while its time stamps stay the same."""
        path = self.config.file(self.source, entry)
        record = ledger.stages.get(self.address)
        if record is not None and record.facts.get(_TIMES_FACT) == file_times(path):
            return str(record.facts[_SUM_FACT])
        return digest_of(path)

    def file(self, slide_id: str, suffix: str = ".parquet") -> str:
        return f"{FOLDER}/{self.name}/{slide_id}{suffix}"

    def make(self, work: SlideWork) -> Output[CellTable]:
        """Reads the file, checks that it fits the slide, and writes the table.

        Memory: as `import_cells`.
        """
        path = self.config.file(self.source, work.entry)
        times = file_times(path)
        name = self.file(work.entry.slide_id)
        table = import_cells(
            path,
            work.path(name),
            name=self.name,
            slide=_cell_slide(work),
            frame=self.config.cells_frame,
            tissue=work.value(self.mask),
            columns=self.config.cells_columns,
            digest=work.source.annotation_hashes[self.annotation_setting],
        )
        counts = count_cells(
            table.batches(COUNTED), _WholeSlide(table.size_l0), table.classes
        )
        facts = _slide_facts(self.annotation_setting, counts)
        facts |= {
            # the hash of the pixels distinguishes another file of cells from another slide
            "pixels": work.source.key,
            _SUM_FACT: work.source.annotation_hashes[self.annotation_setting],
            _TIMES_FACT: times,
            "warnings": _warning(self.name, table),
        }
        return Output(files=(name,), facts=facts, value=table)

    def load(self, work: SlideWork) -> CellTable:
        """The stored table."""
        return CellTable(work.path(self.file(work.entry.slide_id)))


def _warning(name: str, table: CellTable) -> str:
    """Sentence on cells that were left out or changed; '' for none."""
    counts = table.counts
    if counts.refused or counts.changed:
        return f"cells of {name}: {counts.sentence()}"
    return ""


def _cell_slide(work: SlideWork) -> CellSlide:
    """The slide, as a table of cells needs it. Raises MissingMppError: no resolution."""
    slide = work.ledger.slide
    if not slide.get("mpp_x"):
        raise MissingMppError(
            f"slide_mpp is missing in {work.entry.slide_id!r}, and cells have areas in µm²; pass "
            "slide_mpp=... or add a slide_mpp column to the cohort"
        )
    return CellSlide(
        slide_id=work.entry.slide_id,
        size_l0=(slide["width"], slide["height"]),
        slide_mpp=(slide["mpp_x"], slide["mpp_y"]),
    )


@dataclass(frozen=True)
class _WholeSlide:
    """One tile that covers the slide."""

    size_l0: Size

    @property
    def coords_l0(self) -> CoordsL0:
        """Corner of the slide."""
        return np.zeros((1, 2), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class CellCountsStage(Stage[Columns]):
    """`GRID/cells_NAME/ID.h5`: counts, densities and areas of the cells in each tile.

    It is a table beside that of the tiles, so that cells may come later, without new embeddings.
    """

    title: ClassVar[str] = "cells"
    reads: ClassVar[Reads] = "store"

    tiles: TilesStage
    cells: CellsStage

    @cached_property
    def address(self) -> str:
        return f"{self.tiles.grid}/{self.cells.annotation_setting}"

    @cached_property
    def settings(self) -> PlainValues:
        return {"counts": 1}

    @property
    def needs(self) -> tuple[AnyStage, ...]:
        return (self.tiles, self.tiles.mask, self.cells)

    def make(self, work: SlideWork) -> Output[Columns]:
        """Counts the cells. Memory: as `count_cells`."""
        table = work.value(self.cells)
        tiles = read_tiles(work.path(self.tiles.file(work.entry.slide_id)))
        counts = count_cells(table.batches(COUNTED), tiles, table.classes)
        area_mm2 = tissue_mm2(tiles, tiles.columns["tissue_fraction"], table.slide_mpp)
        columns = {
            column: values.astype(np.int32 if values.dtype.kind == "i" else np.float32)
            for column, values in cell_columns(counts, area_mm2).items()
        }
        name = self.file(work.entry.slide_id)
        write_columns(work.path(name), tiles.coords_l0, columns, tiles.attributes)
        prefix = self.cells.annotation_setting
        facts: dict[str, object] = {f"{prefix}:in_no_tile": counts.num_in_no_tile}
        facts |= self._density_facts(work, table)
        return Output(files=(name,), facts=facts, value=columns)

    def load(self, work: SlideWork) -> Columns:
        """The stored columns."""
        return read_tiles(work.path(self.file(work.entry.slide_id))).columns

    def _density_facts(self, work: SlideWork, table: CellTable) -> PlainValues:
        """Area of the slide's tissue, and its cells per mm² of it."""
        prefix = self.cells.annotation_setting
        tissue = work.value(self.tiles.mask)
        whole = _WholeSlide(tissue.frame.size_l0)
        fraction = np.array([tissue.tissue_fraction])
        area_mm2 = tissue_mm2(whole, fraction, table.slide_mpp)
        facts: dict[str, object] = {f"{prefix}:tissue_mm2": _plain(area_mm2)}
        for label, count in work.ledger.stages[self.cells.address].facts.items():
            if label.startswith(f"{prefix}:count"):
                density = per_mm2(np.array([count]), area_mm2)
                facts[label.replace(":count", ":per_mm2", 1)] = _plain(density)
        return facts


def cell_columns(counts: TileCounts, area_mm2: Floats) -> dict[str, Column]:
    """Columns of tiles by name: `count`, `per_mm2`, `area_um2_mean`, `area_um2_std`, by class.

    Args:
        counts: cells of N tiles.
        area_mm2: area of the tissue in each tile, (N,).

    Raises:
        InvalidInputError: two classes would give columns of the same name.
    """
    words = {name: slug(name) for name in counts.classes}
    if len(set(words.values())) < len(words):
        raise InvalidInputError(
            "classes of cells must give different column names, got "
            f"{', '.join(map(repr, counts.classes))}; rename one of them"
        )
    mean, std = counts.areas_um2()
    shares = counts.shares()
    columns: dict[str, Column] = {
        "count": counts.count.sum(axis=1),
        "per_mm2": per_mm2(counts.num_held.sum(axis=1), area_mm2),
        "area_um2_mean": mean,
        "area_um2_std": std,
    }
    for place, word in enumerate(words.values()):
        columns[f"count_{word}"] = counts.count[:, place]
        columns[f"per_mm2_{word}"] = per_mm2(counts.num_held[:, place], area_mm2)
        columns[f"share_{word}"] = shares[:, place]
    return columns


def _slide_facts(prefix: str, counts: TileCounts) -> dict[str, object]:
    """The same values of the whole slide, and the number of cells with a known area."""
    facts: dict[str, object] = {}
    for name, values in cell_columns(counts, np.full(1, np.nan)).items():
        if not name.startswith("per_mm2"):
            facts[f"{prefix}:{name}"] = _plain(values)
    facts[f"{prefix}:with_area"] = int(counts.num_areas[0])
    return facts


def _plain(values: Column) -> float | int | None:
    """The only value of a column for JSON; None for NaN."""
    value: float | int = values[0].item()
    return value if np.isfinite(value) else None
