"""Results folder in Python: slides, tables, embeddings, and columns of the caller."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.cells.table import PREFIX, CellTable
from thinsection.config import from_mapping, nearest
from thinsection.errors import (
    ChoiceError,
    InvalidInputError,
    StoreError,
    slide_boundary,
)
from thinsection.extras import importing, require_packages
from thinsection.files.atomic import atomic_path
from thinsection.files.pages import data_uri
from thinsection.files.tables import open_table
from thinsection.report.stored import thumbnail_file
from thinsection.results.cell_columns import add_cell_columns
from thinsection.results.cell_features import CellFeatures
from thinsection.results.choice import matching, newest_of, say_choice
from thinsection.results.column_files import (
    ColumnToStore,
    column_address,
    store_column,
    used_colors,
)
from thinsection.results.columns import (
    Colors,
    OwnColumn,
    Values,
    check_length,
    check_name,
    own_column,
    rows_in_order,
)
from thinsection.results.frames import (
    SlideRows,
    rows_of_table,
    to_anndata,
    to_geopandas,
    to_pandas,
    write_anndata,
)
from thinsection.results.recorded_slide import recorded_slide
from thinsection.results.records import Record, read_records
from thinsection.results.tables import grid_rows
from thinsection.results.whole_tables import columns_of_slides
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan
from thinsection.slide.ids import KnownIds
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, load_ledgers
from thinsection.store.outcome import read_failure
from thinsection.store.tile_tables import (
    TILES,
    EmbeddingRows,
    TileTableFile,
    tile_table_files,
)
from thinsection.store.tiles_h5 import (
    EmbeddedTiles,
    TilesFile,
    read_embedded_tiles,
    read_slide_embedding,
    read_tiles,
)
from thinsection.types import (
    Document,
    PlainValues,
    counted,
    format_bytes,
    shortened,
)

if TYPE_CHECKING:
    import anndata
    import geopandas
    import pandas

Listener = Callable[[str], None]  # receives a line of text
# beginning of the address of a table of cells; its name follows
_CELLS = f"{SLIDES}/{PREFIX}"
_SHOWN_SLIDES = 8  # thumbnails in `_repr_html_`
_SHOWN_PX = 96  # height of a thumbnail in pixels
_SHOWN_PATH = 60  # characters of the folder's path in `repr`


def open_results(out: str | Path) -> Results:
    """Opens a folder with results of `run`, `qc` or `aggregate`.

    Memory: some kB per slide. Raises StoreError: it is not a results folder.
    """
    folder = Path(out)
    check_results_folder(folder)
    ledgers = {ledger.slide_id: ledger for ledger in load_ledgers(folder)}
    return Results(folder=folder, ledgers=ledgers)


def cells_address(name: str) -> str:
    """Address of a table of cells in the ledgers."""
    return f"{_CELLS}{name}"


def check_results_folder(folder: Path) -> None:
    """Raises StoreError: it is not a results folder."""
    if not (folder / SLIDES).is_dir():
        raise StoreError(
            f"results must be a folder of `thinsection run` that contains {SLIDES}/, got "
            f"{str(folder)!r}"
        )


@dataclass(frozen=True)
class FolderRow:
    """One folder of results, for all slides."""

    address: str  # '256px_0.5mpp/features_uni2_h'
    num_slides: int  # slides with a result in this folder
    num_bytes: int  # bytes of its files
    facts: PlainValues  # facts of the last slide: encoder, dim and so on


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results folder; files are read only when a method needs them."""

    folder: Path
    # ledgers by slide id; `write_column` puts new ones in their place
    ledgers: dict[str, SlideLedger]
    # lines about choices; each is told once
    told_choices: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def slides(self) -> tuple[str, ...]:
        """Slide ids.

        Examples:
            >>> results.slides
            ('a', 'b')
        """
        return tuple(self.ledgers)

    def __getstate__(self) -> dict[str, object]:
        """State of a copy, for a process with another working folder."""
        return vars(self) | {"folder": self.folder.absolute()}

    def __len__(self) -> int:
        return len(self.ledgers)

    def __bool__(self) -> bool:
        """True also for a folder without slides."""
        return True

    def __iter__(self) -> Iterator[str]:
        """Yields the slide ids."""
        return iter(self.ledgers)

    def __contains__(self, slide_id: object) -> bool:
        return slide_id in self.ledgers

    @cached_property
    def folders(self) -> tuple[FolderRow, ...]:
        """Every folder of results: masks, grids, embeddings, slide embeddings, pictures.

        Examples:
            >>> [row.address for row in results.folders if "tiles" in row.address]
            ['128px_0.5mpp/tiles']
        """
        records: dict[str, list[StageRecord]] = {}  # records by address

        @cache
        def exists(name: str) -> bool:
            """Looks a folder up once: people delete the folder of a grid."""
            return (self.folder / name).is_dir()

        for ledger in self.ledgers.values():
            for address, record in ledger.stages.items():
                name = next(iter(record.files), "")
                # here, or at the URL of the run
                is_elsewhere = name in ledger.elsewhere.files
                if not name:
                    is_elsewhere = address.startswith(f"{SLIDES}/")
                folder = name.rpartition("/")[0] if name else address
                if is_elsewhere or exists(folder):
                    records.setdefault(address, []).append(record)
        rows = [
            FolderRow(
                address=address,
                num_slides=len(of_slides),
                num_bytes=sum(sum(record.files.values()) for record in of_slides),
                facts=of_slides[-1].facts,
            )
            for address, of_slides in records.items()
        ]
        # folders beside the slides come first
        rows.sort(key=lambda r: (not r.address.startswith(f"{SLIDES}/"), r.address))
        return tuple(rows)

    @property
    def grids(self) -> tuple[str, ...]:
        """Names of the tile grids.

        Examples:
            >>> results.grids
            ('128px_0.5mpp',)
        """
        names = (row.address.split("/")[0] for row in self.folders)
        return tuple(dict.fromkeys(name for name in names if name != SLIDES))

    @property
    def features(self) -> tuple[str, ...]:
        """Addresses of tile embeddings: 'GRID/features_NAME'.

        Examples:
            >>> results.features
            ('128px_0.5mpp/features_efficientnet_lite0...',)
        """
        return self._addresses("features_")

    @property
    def slide_features(self) -> tuple[str, ...]:
        """Addresses of slide embeddings: 'GRID/slide_features_NAME'.

        Examples:
            >>> results.slide_features
            ('128px_0.5mpp/slide_features_mean-efficientnet_lite0...',)
        """
        return self._addresses("slide_features_")

    @property
    def records(self) -> list[Record]:
        """The invocations that worked here, oldest first.

        Examples:
            >>> len(results.records)
            1
        """
        return read_records(self.folder)

    def choose_grid(
        self, name: str | None = None, *, chooser: str = 'grid="..."'
    ) -> str:
        """One of `grids`, by its name or a part of it; if several fit, that of the newest run.

        Args:
            name: the grid; None if there is one, or for the newest.
            chooser: how the user chooses, for the line about a choice.

        Raises ChoiceError: no such grid, or several fit and nothing decides.

        Examples:
            >>> results.choose_grid("128px")
            '128px_0.5mpp'
        """
        return self._choose(self.grids, name, "grid", chooser)

    def choose_features(
        self,
        name: str | None = None,
        known: Sequence[str] | None = None,
        *,
        chooser: str = 'features="..."',
    ) -> str:
        """One of `features`, by its name or a part of it; if several fit, that of the newest run.

        Args:
            name: the embeddings; None if there are one, or for the newest.
            known: addresses to choose from, in place of `features`.
            chooser: how the user chooses, for the line about a choice.

        Raises ChoiceError: no such embeddings, or several fit and nothing decides.

        Examples:
            >>> results.choose_features("efficientnet_lite0")
            '128px_0.5mpp/features_efficientnet_lite0...'
        """
        addresses = self.features if known is None else known
        return self._choose(addresses, name, "features", chooser)

    def choose_tiles(self, features: str | None = None) -> tuple[str, str]:
        """A grid, and the embeddings of its tiles; '' for these if there are none, nor a name.

        Raises ChoiceError: as `choose_features` and `choose_grid`.

        Examples:
            >>> results.choose_tiles()
            ('128px_0.5mpp', '128px_0.5mpp/features_efficientnet_lite0...')
        """
        if self.features or features:
            address = self.choose_features(features)
            return address.split("/")[0], address
        return self.choose_grid(chooser='features="..."'), ""

    def _choose(
        self, known: Sequence[str], name: str | None, kind: str, chooser: str
    ) -> str:
        """Address for a name; where several are possible, that of the newest invocation.

        Args:
            known: addresses to choose from: grids, or 'GRID/features_NAME'.
            name: what the user named; None for nothing.
            kind: what is chosen, in words: 'grid', 'features', 'slide features'.
            chooser: how a user chooses, such as 'grid="..."'.
        """
        addresses = matching(known, name)
        if len(addresses) == 1:
            return addresses[0]
        if not known:
            raise ChoiceError(
                f"{kind} must match one of those in the folder, got a folder without {kind}; "
                "run `thinsection run` first"
            )
        newest = newest_of(addresses, self.records) if addresses else []
        if len(newest) == 1:
            line = (
                f"using {newest[0]}, the newest of {len(addresses)}; {chooser} chooses"
            )
            if line not in self.told_choices:
                self.told_choices.add(line)
                say_choice(line)
            return newest[0]
        listed = ", ".join(map(self._described, addresses or known))
        example = (newest or addresses or known)[0]
        raise ChoiceError(
            f"{kind} must match one of {listed}, got {name!r}; "
            f"pass {chooser.replace('...', example)}"
        )

    def _described(self, address: str) -> str:
        """An address with what it is: '256px_0.5mpp (12 slides, 4,021 tiles)'."""
        tiles = address if "/" in address else f"{address}/{TILES}"
        records = [
            ledger.stages[tiles]
            for ledger in self.ledgers.values()
            if tiles in ledger.stages
        ]
        if not records:
            return address
        num_tiles = sum(int(record.facts.get("num_tiles") or 0) for record in records)
        words = counted(len(records), "slide")
        if num_tiles:
            words += f", {num_tiles:,} tiles"
        return f"{address} ({words})"

    def rows(self, labels: str | Path | None = None) -> list[Document]:
        """One row per slide and grid, as in summary.csv.

        `labels` is a CSV with a column slide_id; its other columns are joined by slide_id.

        Raises StoreError: the labels cannot be read.

        Examples:
            >>> [(row["slide_id"], row["grade"]) for row in results.rows("labels.csv")]
            [('a', 'high'), ('b', 'low')]
        """
        joined: dict[str, dict[str, str]] = {}
        if labels is not None:
            path = Path(labels)
            table = open_table(path, ("slide_id",), error=StoreError)
            names = (row["slide_id"] for row in table.rows)
            ids = KnownIds(self.ledgers).match(names, repr(str(path)))
            for cells in table.rows:
                slide = ids.get(cells["slide_id"])
                if slide is not None:
                    joined[slide] = cells | {"slide_id": slide}
        rows = []
        for slide_id, ledger in self.ledgers.items():
            for row in grid_rows(ledger):
                rows.append({"slide_id": slide_id} | row | joined.get(slide_id, {}))
        add_cell_columns(rows)
        return rows

    def table(self, labels: str | Path | None = None) -> pandas.DataFrame:
        """`rows` as a data frame. Raises MissingDependencyError: pandas is not installed.

        Examples:
            >>> results.table("labels.csv").set_index("slide_id").loc["b", "grade"]
            'low'
        """
        with importing("`table` (not for `rows`)", "pandas"):
            import pandas as pd
        return pd.DataFrame(self.rows(labels))

    def tiles(self, slide_id: str, grid: str | None = None) -> TilesFile:
        """Coordinates of a slide's tile grid, and the columns of every table with the same tiles.

        A column of categories has their codes; `tiles.values(name)` gives their names.

        `slide_id` is one of `slides`, `grid` one of `grids`; None for that of the newest run.

        Memory: 16 bytes per tile, and 4 per tile and column.

        Raises StoreError: a column is damaged or not one number for each tile.

        Examples:
            >>> stored = results.tiles("a")
            >>> stored.coords_l0.shape == (len(stored.columns["tissue_fraction"]), 2)
            True
        """
        first, *others = self.tile_tables(slide_id, grid)
        tiles = first.read()
        columns = dict(tiles.columns)
        categories = dict(tiles.categories)
        for table in others:
            more = table.read()
            if not np.array_equal(more.coords_l0, tiles.coords_l0):
                continue
            for name, values in more.columns.items():
                columns[table.label(name)] = values
            for name, named in more.categories.items():
                categories[table.label(name)] = named
        return replace(
            tiles,
            columns=columns,
            categories=categories,
            plan=self._plan(slide_id, grid),
        )

    def _plan(self, slide_id: str, grid: str | None) -> ReadPlan | None:
        """How the tiles of a grid are read; None for grids that another tool made."""
        address = self.choose_grid(grid)
        record = self.ledger(slide_id).stages.get(f"{address}/{TILES}")
        if record is None or "plan" not in record.facts:
            return None
        return from_mapping(ReadPlan, record.facts["plan"])

    def tile_tables(
        self, slide_id: str, grid: str | None = None
    ) -> tuple[TileTableFile, ...]:
        """Per-tile tables of a slide: tiles, measures, heatmaps; no values are read.

        Raises StoreError: the slide has no such grid.

        Examples:
            >>> len(results.tile_tables("a"))
            1
        """
        address = self.choose_grid(grid)
        # raises StoreError if the slide has no such grid
        self.file(slide_id, f"{address}/{TILES}")
        files = {
            stage_address: self.folder / next(iter(record.files))
            for stage_address, record in self.ledgers[slide_id].stages.items()
            if record.files
        }
        return tuple(tile_table_files(self.folder, address, slide_id, files))

    def tile_embeddings(
        self, slide_id: str, features: str | None = None
    ) -> EmbeddedTiles:
        """Embeddings (N, D) and coordinates of a slide's tiles.

        `features` is one of `features`, or its last part without 'features_'; None for that of the
        newest run.

        Memory: 4 N D bytes.

        Examples:
            >>> embedded = results.tile_embeddings("a")
            >>> embedded.features.shape == (len(embedded.coords_l0), 1280)
            True
        """
        address = self.choose_features(features)
        stored = read_embedded_tiles(self.file(slide_id, address))
        grid = address.split("/", maxsplit=1)[0]
        return replace(stored, plan=self._plan(slide_id, grid))

    def embedding_rows(
        self, slide_id: str, features: str | None = None
    ) -> EmbeddingRows:
        """Embeddings as in `tile_embeddings`, as rows that are read from the file on access.

        Examples:
            >>> rows = results.embedding_rows("a")
            >>> rows[[4, 0]].shape
            (2, 1280)
        """
        address = self.choose_features(features)
        return EmbeddingRows(self.file(slide_id, address))

    def slide_embeddings(
        self, name: str | None = None, *, on_left_out: Listener | None = None
    ) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
        """Ids and embeddings, float32 (S, D), of the slides that have a slide embedding.

        Args:
            name: one of `slide_features`, or its last part; None for that of the newest run.
            on_left_out: takes a line for each slide whose file or ledger is damaged, and the
                others are returned: `on_left_out=print`. With None the first damage is an error.

        Memory: 4 S D bytes.

        Raises StoreError: a file or a ledger is damaged, without `on_left_out`.

        Examples:
            >>> ids, embeddings = results.slide_embeddings()
            >>> ids, embeddings.shape
            (('a', 'b'), (2, 1280))
        """
        address = self._choose(
            self.slide_features, name, "slide features", 'name="..."'
        )
        slide_ids: list[str] = []
        embeddings: list[npt.NDArray[np.float32]] = []
        for slide_id, ledger in self.ledgers.items():
            with leaving_out(slide_id, on_left_out):
                ledger.check()
                record = ledger.stages.get(address)
                if record is None or not record.files:
                    continue
                path = self.folder / next(iter(record.files))
                vector = read_slide_embedding(path).slide_embedding
                if embeddings and vector.shape != embeddings[0].shape:
                    raise StoreError(
                        f"slide embedding must have {len(embeddings[0])} numbers as that of "
                        f"{slide_ids[0]!r}, got {len(vector)} in {str(path)!r}"
                    )
                slide_ids.append(slide_id)
                embeddings.append(vector)
        if not embeddings:
            return (), np.empty((0, 0), np.float32)
        return tuple(slide_ids), np.stack(embeddings)

    def cells(self, slide_id: str, name: str | None = None) -> CellTable:
        """Cells of a slide, as a table whose parts are read when a method needs them.

        Args:
            slide_id: one of `slides`.
            name: name of the cells, that of their folder or column; None if the slide has one
                table of cells.

        Raises:
            StoreError: the slide has no cells.
            ChoiceError: no table of this name, or several and no name.

        Examples:
            >>> table = results.cells("a", "qupath")  # doctest: +SKIP
            >>> table.to_geopandas().area.sum()  # doctest: +SKIP
            81230.5
        """
        known = self.cell_names(slide_id)
        if not known:
            raise StoreError(
                f"cells of {slide_id!r} must exist, got none; run again with cells=..."
            )
        fitting = known if name is None else [one for one in known if one == name]
        if len(fitting) != 1:
            raise ChoiceError(
                f"name must be one of the slide's cells {', '.join(known)}, got {name!r}"
            )
        return CellTable(self.file(slide_id, cells_address(fitting[0])))

    def write_cell_features(
        self, name: str, *, features: str | None = None, grid: str | None = None
    ) -> str:
        """Stores the densities, areas and shares of cells as features of the tiles.

        They can be trained on like embeddings, alone or joined to some: `train --features`. All
        slides get the same channels, those of all classes in this folder.

        Args:
            name: name of the cells.
            features: embeddings that come before the cells in each row; None stores cells alone.
            grid: without `features`, one of `grids`; None for that of the newest run.

        Returns:
            The address of the features: '256px_0.5mpp/features_uni2_h+cells_nuclei'.

        Memory: a block of embeddings, and the columns of one slide.

        Raises:
            StoreError: no slide has these cells on this grid.
            ChoiceError: no such embeddings or grid.

        Examples:
            >>> results.write_cell_features("cellvit", features="uni2_h")  # doctest: +SKIP
            '256px_0.5mpp/features_uni2_h+cells_cellvit'
        """
        embedding = None if features is None else self.choose_features(features)
        if embedding is not None:
            grid = embedding.split("/")[0]
        joined = CellFeatures(self.folder, self.choose_grid(grid), name, embedding)
        self.ledgers.update(joined.store(self.ledgers))
        self.__dict__.pop("folders", None)  # it is read again
        return joined.address

    def cell_names(self, slide_id: str) -> tuple[str, ...]:
        """Names of the tables of cells of a slide.

        Examples:
            >>> results.cell_names("a")
            ()
        """
        return tuple(
            address.removeprefix(_CELLS)
            for address, record in self.ledger(slide_id).stages.items()
            if address.startswith(_CELLS) and record.files
        )

    def open_slide(self, slide_id: str) -> Slide:
        """Opens a slide with the reader, picture, µm/px and look of its run.

        Args:
            slide_id: one of `slides`.

        Returns:
            The slide; close it, or use it in a `with` block.

        Raises:
            SlideOpenError: the file has moved; the message says how to find it again.
            InvalidInputError: no such slide, or its file is not the one that the run has read.

        Examples:
            >>> with results.open_slide("a") as opened:
            ...     opened.size
            (1300, 1000)
        """
        ledger = self.ledger(slide_id)
        ledger.check()
        return recorded_slide(ledger, lambda: self.records).open()

    def write_column(
        self,
        slide_id: str,
        name: str,
        values: Values,
        *,
        grid: str | None = None,
        coords_l0: npt.ArrayLike | None = None,
        categories: Sequence[str] | None = None,
        colors: Colors | None = None,
        overwrite: bool = False,
    ) -> None:
        """Stores a value for each tile of a slide as a column beside those of the run.

        The column is part of `tiles`, of the viewer, heatmaps and plots, of every export, and of
        `TileDataset`. `rows` and `table` have its mean or its shares per slide. A run that makes
        other tiles removes it.

        Args:
            slide_id: one of `slides`.
            name: name of the column, without '/', '\\' and ':'. It must differ from the names of
                other tables' columns in more than capitals.
            values: (N,), a value for each tile: finite numbers (NaN is no value), bool, words, a
                pandas Categorical, or places in `categories`, with -1 for no category.
            grid: one of `grids`; None for that of the newest run.
            coords_l0: corners (N, 2) of the values; None if they are in the order of `tiles`.
            categories: names of the categories, in their order.
            colors: colours of categories, by name or in their order: '#0072B2' or (0, 114, 178).
                Other categories keep the colours of the other slides, or get one of their own.
            overwrite: replace other values of this name. Equal values are never written again.

        Memory: 110 bytes per tile.

        Raises:
            InvalidInputError: values of another length, type or order, an infinite number, or a
                name that cannot be used.
            OverwriteError: other values are stored under this name.
            OutputError: the folder cannot be written; the message says what to do.

        Examples:
            >>> count = len(results.tiles("a").coords_l0)
            >>> words = ["tumour" if row % 2 else "stroma" for row in range(count)]
            >>> results.write_column("a", "kind", words, overwrite=True)
            >>> results.tiles("a").values("kind")[1].item()
            'tumour'
        """
        grid = self.choose_grid(grid)
        tiles = self._tile_table(slide_id, grid)
        own = column_address(grid, name)
        taken = self._column_names(slide_id, grid)
        check_name(name, [other for place, other in taken if place != own])
        column = own_column(
            name,
            values,
            categories=categories,
            colors=colors,
            used_colors=used_colors(
                [self.ledger(slide_id), *self.ledgers.values()], own
            ),
        )
        check_length(column, len(tiles.coords_l0), slide_id)
        if coords_l0 is not None:
            rows = rows_in_order(name, coords_l0, tiles, slide_id)
            column = replace(column, values=column.values[rows])
        self._store([self._to_store(slide_id, grid, tiles, column)], overwrite)

    def write_columns(
        self,
        table: Any,
        *,
        grid: str | None = None,
        columns: Sequence[str] | None = None,
        colors: Mapping[str, Colors] | None = None,
        partial: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Stores columns of a table with a row per tile, of one or several slides.

        Rows find their tiles by the index `<slide_id>:<x>x<y>` of `to_pandas` and of our AnnData,
        or by columns `slide_id`, `x` and `y`. All is checked before anything is written. A line on
        standard error names the slides without a row; they get no column.

        Args:
            table: of pandas, pyarrow or AnnData: `adata.obs[["leiden"]]`; of an `adata` itself
                the colours `adata.uns["leiden_colors"]` are taken, too.
            grid: one of `grids`; None for that of the newest run.
            columns: columns to store; None for all but `slide_id`, `x` and `y`.
            colors: colours of categories by column, as for `write_column`.
            partial: True if tiles of a slide may lack a row: they get no value.
            overwrite: replace other values of these names.

        Memory: the table, and 250 bytes per row and column.

        Raises:
            InvalidInputError: a row without a tile, a tile without a row, or as for `write_column`.
            OverwriteError: other values are stored under one of the names.
            OutputError: the folder cannot be written.

        Examples:
            >>> frame = results.to_pandas()[["slide_id", "x", "y"]]
            >>> frame["place"] = frame["x"] / 2
            >>> _ = results.write_columns(frame, overwrite=True)
        """
        rows = rows_of_table(table)
        if grid is None and rows.features.split("/")[0] in self.grids:
            grid = rows.features.split("/")[0]
        grid = self.choose_grid(grid)
        with_tiles = [
            slide_id
            for slide_id, ledger in self.ledgers.items()
            if f"{grid}/{TILES}" in ledger.stages
        ]
        items = []
        taken: dict[str, list[tuple[str, str]]] = {}  # addresses and names, by slide id
        # colours of a column's categories on slides of the folder and of the table, by column
        known_colors: dict[str, dict[str, str]] = {}
        tile_table = cache(self._tile_table)
        for slide_id, name, values, given_colors in columns_of_slides(
            rows,
            grid,
            with_tiles,
            tile_table,
            columns=columns,
            colors=colors,
            partial=partial,
        ):
            if slide_id not in taken:
                taken[slide_id] = self._column_names(slide_id, grid)
            own = column_address(grid, name)
            check_name(
                name, [other for place, other in taken[slide_id] if place != own]
            )
            taken[slide_id].append((own, name))
            if name not in known_colors:
                known_colors[name] = used_colors(self.ledgers.values(), own)
            own_colors = used_colors([self.ledger(slide_id)], own)
            column = own_column(
                name,
                values,
                colors=given_colors,
                used_colors=known_colors[name] | own_colors,
            )
            if column.categories is not None:
                new_colors = column.categories.color_by_name
                known_colors[name] = new_colors | known_colors[name]
            tiles = tile_table(slide_id, grid)
            items.append(self._to_store(slide_id, grid, tiles, column))
        self._store(items, overwrite)
        in_table = set(rows.slide_ids.tolist())
        missing = [
            slide_id
            for slide_id in with_tiles
            if slide_id not in in_table
            and self.ledgers[slide_id].stages[f"{grid}/{TILES}"].facts.get("num_tiles")
        ]
        if missing:
            shown = ", ".join(missing[:_SHOWN_SLIDES])
            more = ", ..." if len(missing) > _SHOWN_SLIDES else ""
            say_choice(
                f"{counted(len(missing), 'slide')} of {len(with_tiles)} have no row in the "
                f"table and get no column: {shown}{more}"
            )

    def _tile_table(self, slide_id: str, grid: str) -> TilesFile:
        """Coordinates of a slide's tiles, without columns of other tables."""
        return read_tiles(self.file(slide_id, f"{grid}/{TILES}"), embeddings=False)

    def _column_names(self, slide_id: str, grid: str) -> list[tuple[str, str]]:
        """Address of the table and name of each column of a slide."""
        names = []
        for table in self.tile_tables(slide_id, grid):
            names += [(table.address, table.label(column)) for column in table.columns]
        return names

    def _to_store(
        self, slide_id: str, grid: str, tiles: TilesFile, column: OwnColumn
    ) -> ColumnToStore:
        return ColumnToStore(
            out=self.folder,
            slide_id=slide_id,
            grid=grid,
            column=column,
            tiles=tiles,
            tiles_key=self.ledger(slide_id).stages[f"{grid}/{TILES}"].key,
        )

    def _store(self, items: Sequence[ColumnToStore], overwrite: bool) -> None:
        """Stores checked columns; nothing is written if other values stand in one's place."""
        for item in items:
            item.check_free(self.ledger(item.slide_id), overwrite=overwrite)
        for item in items:
            ledger = store_column(item, overwrite=overwrite, on_wait=say_choice)
            self.ledgers[item.slide_id] = ledger
        self.__dict__.pop("folders", None)  # it was listed before

    def to_pandas(
        self,
        grid: str | None = None,
        *,
        slides: Sequence[str] | None = None,
        on_left_out: Listener | None = None,
    ) -> pandas.DataFrame:
        """Tiles of a grid as a data frame: slide, x, y, patient, label, split and all columns.

        The index `<slide_id>:<x>x<y>` finds the tiles again, see `write_columns`.

        Args:
            grid: one of `grids`; None for that of the newest run.
            slides: ids of slides; None for all.
            on_left_out: called with a line for each damaged slide, which is left out; with None
                that is an error.

        Memory: the columns of all slides, twice while they are joined.

        Raises:
            MissingDependencyError: pandas is not installed.
            StoreError: a slide is damaged, without `on_left_out`.

        Examples:
            >>> frame = results.to_pandas()
            >>> frame["slide_id"].unique().tolist()
            ['a', 'b']
        """
        require_packages("data frames", "pandas")
        grid = self.choose_grid(grid)
        parts = list(self._slide_rows(grid, "", slides, on_left_out))
        return to_pandas(parts, with_corners=True, only_shared=False)

    def to_geopandas(
        self,
        grid: str | None = None,
        *,
        slides: Sequence[str] | None = None,
        on_left_out: Listener | None = None,
    ) -> geopandas.GeoDataFrame:
        """Tiles of a grid as squares in level-0 px, with the columns of `to_pandas`.

        Args:
            grid, slides, on_left_out: as for `to_pandas`.

        Memory: about 1 kB per tile.

        Raises:
            MissingDependencyError: geopandas is not installed.
            StoreError: a slide is damaged, without `on_left_out`.

        Examples:
            >>> frame = results.to_geopandas()  # doctest: +SKIP
            >>> frame.geometry.area.unique()  # doctest: +SKIP
            array([16384.])
        """
        require_packages("tables of shapes", "geopandas", "pandas")
        grid = self.choose_grid(grid)
        return to_geopandas(list(self._slide_rows(grid, "", slides, on_left_out)))

    def to_anndata(
        self,
        features: str | None = None,
        *,
        slides: Sequence[str] | None = None,
        on_left_out: Listener | None = None,
    ) -> anndata.AnnData:
        """Tile embeddings as AnnData: X, obsm['spatial'] = corners in level-0 px, obs = columns.

        `obs` has slide_id, patient_id, label, split and the columns that all slides share. Its
        index is `<slide_id>:<x>x<y>`, see `write_columns`. `uns["NAME_colors"]` has the colours of
        a column of categories.

        Args:
            features: one of `features`, or a part of it; None for that of the newest run.
            slides: ids of slides; None for all.
            on_left_out: called with a line for each damaged slide, which is left out; with None
                that is an error.

        Memory: the embeddings of all slides, and a block of rows.

        Raises:
            MissingDependencyError: anndata is not installed.
            StoreError: no embeddings in the folder, or a slide is damaged.
            InvalidInputError: several embeddings, and nothing decides.

        Examples:
            >>> results.to_anndata().shape == (len(results.to_pandas()), 1280)
            True
        """
        require_packages("AnnData", "anndata", "pandas")
        return to_anndata(*self._embedded_slides(features, slides, on_left_out))

    def write_h5ad(
        self,
        path: str | Path,
        features: str | None = None,
        *,
        on_left_out: Listener | None = None,
    ) -> int:
        """Writes the table of `to_anndata` as .h5ad, and returns the number of its tiles.

        Memory: some MiB of embeddings; about 300 bytes per tile of all slides, and its columns.

        Raises:
            ThinsectionError: as for `to_anndata`.

        Examples:
            >>> results.write_h5ad("tiles.h5ad") == len(results.to_pandas())
            True
        """
        require_packages("AnnData", "anndata", "pandas")
        parts, address = self._embedded_slides(features, None, on_left_out)
        with atomic_path(Path(path)) as tmp:
            return write_anndata(parts, address, tmp)

    def _embedded_slides(
        self,
        features: str | None,
        slides: Sequence[str] | None,
        on_left_out: Listener | None,
    ) -> tuple[list[SlideRows], str]:
        """Slides with embeddings of tiles, and the address of these.

        Raises StoreError: there are none.
        """
        address = ""
        if self.features:
            address = self.choose_features(features)
        grid = address.split("/")[0]
        parts = []
        for part in self._slide_rows(grid, address, slides, on_left_out):
            if len(part.tiles.coords_l0):
                parts.append(part)
        if not parts:
            raise StoreError(
                f"folder must contain tile embeddings, got none in {str(self.folder)!r}; run "
                "`thinsection run` first"
            )
        return parts, address

    def _slide_rows(
        self,
        grid: str,
        address: str,
        slides: Sequence[str] | None,
        on_left_out: Listener | None,
    ) -> Iterator[SlideRows]:
        """Yields the tiles of the slides that have them, with the embeddings at `address`."""
        chosen = self.ledgers
        if slides is not None:
            chosen = {slide_id: self.ledger(slide_id) for slide_id in slides}
        for slide_id, ledger in chosen.items():
            part = None
            with leaving_out(slide_id, on_left_out):
                ledger.check()
                if (address or f"{grid}/{TILES}") in ledger.stages:
                    part = self._rows_of(ledger, grid, address)
            if part is not None:
                yield part

    def _rows_of(self, ledger: SlideLedger, grid: str, address: str) -> SlideRows:
        """Tiles of one slide. Raises StoreError: its embeddings are of other tiles."""
        slide_id = ledger.slide_id
        tiles = self.tiles(slide_id, grid)
        if not address:
            return SlideRows(ledger=ledger, tiles=tiles)
        embeddings = self.embedding_rows(slide_id, address)
        embeddings.check()
        embedded = embeddings.tiles
        if len(embeddings) != len(tiles) or not np.array_equal(
            embedded.coords_l0, tiles.coords_l0
        ):
            raise StoreError(
                f"embeddings must be of the tiles of {grid}, got others in {address} of "
                f"{slide_id!r}; run the same command again"
            )
        return SlideRows(
            ledger=ledger,
            tiles=tiles,
            embeddings=embeddings,
            encoder=str(embedded.attributes.get("encoder", "")),
        )

    def failures(self) -> dict[str, str]:
        """Messages by slide id, for slides whose last run failed or whose ledger is damaged.

        Examples:
            >>> results.failures()
            {}
        """
        failures = {}
        for slide_id, ledger in self.ledgers.items():
            if ledger.damage:
                failures[slide_id] = ledger.damage
        for path in sorted((self.folder / SLIDES).iterdir()):
            if path.is_dir():
                failure = read_failure(self.folder, path.name)
                if failure is not None:
                    failures[path.name] = failure.error
        return failures

    def __repr__(self) -> str:
        size = format_bytes(sum(row.num_bytes for row in self.folders))
        folders = shortened((row.address for row in self.folders), most=140)
        place = str(self.folder)
        if len(place) > _SHOWN_PATH:
            place = f"...{place[-_SHOWN_PATH:]}"
        slides = counted(len(self), "slide")
        return f"Results({place!r}: {slides}, {size}, folders: {folders})"

    def __str__(self) -> str:
        """Returns a line for each folder, for `print`."""
        lines = [f"<Results {str(self.folder)!r}: {len(self.slides)} slides>"]
        for row in self.folders:
            size = format_bytes(row.num_bytes)
            lines.append(f"  {row.address:<60} {row.num_slides:>6} slides {size:>10}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        pictures = ""
        for slide_id in self.slides[:_SHOWN_SLIDES]:
            path = thumbnail_file(self.folder / SLIDES / slide_id)
            if path is not None:
                with Image.open(path) as picture:
                    source = data_uri(picture, 2 * _SHOWN_PX)
                title = html.escape(slide_id)
                pictures += (
                    f'<img height="{_SHOWN_PX}" title="{title}" src="{source}"> '
                )
        rows = ""
        for row in self.folders:
            rows += (
                f"<tr><td>{html.escape(row.address)}</td><td>{row.num_slides}</td>"
                f"<td>{format_bytes(row.num_bytes)}</td></tr>"
            )
        return (
            f"<b>{html.escape(str(self.folder))}</b>: {counted(len(self.slides), 'slide')}"
            f"<div>{pictures}</div>"
            f"<table><tr><th>folder</th><th>slides</th><th>size</th></tr>{rows}</table>"
        )

    def _addresses(self, prefix: str) -> tuple[str, ...]:
        addresses = [row.address for row in self.folders]
        return tuple(
            address
            for address in addresses
            if address.rpartition("/")[2].startswith(prefix)
        )

    def file(self, slide_id: str, address: str) -> Path:
        """File of a slide in a folder of results. Raises StoreError: the file does not exist.

        Examples:
            >>> results.file("a", "128px_0.5mpp/tiles").name
            'a.h5'
        """
        record = self.ledger(slide_id).stages.get(address)
        if record is None or not record.files:
            raise StoreError(
                f"{address} of {slide_id!r} must exist, got none; run that step first"
            )
        return self.folder / next(iter(record.files))

    def ledger(self, slide_id: str) -> SlideLedger:
        """Ledger of a slide. Raises InvalidInputError: the slide is not in this folder.

        Examples:
            >>> results.ledger("a").slide["width"]
            1300
        """
        if slide_id not in self.ledgers:
            hint = nearest(slide_id, self.slides)
            raise InvalidInputError(
                f"slide_id must be in this folder, got {slide_id!r}{hint}"
            )
        return self.ledgers[slide_id]


def leaving_out(
    slide_id: str, on_left_out: Listener | None
) -> AbstractContextManager[None, bool]:
    """Reports an error of a slide and leaves the slide out; without a listener, it is raised."""
    if on_left_out is None:
        return slide_boundary(slide_id, None)

    def leave_out(slide: str, reason: str) -> None:
        on_left_out(f"{slide}: left out: {reason}")

    return slide_boundary(slide_id, leave_out)
