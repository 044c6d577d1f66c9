"""The cells of one slide in a Parquet file: what it holds, how it is written and read.

The file follows GeoParquet 1.1: polygons in WKB, and a column `bbox` that covers them. Its rows lie
in blocks of space (squares of 8,192 level-0 px), so that a reader skips the row groups that lie
elsewhere, and reading and writing take the same memory whatever the number of cells.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.cells.outlines import Flags
from thinsection.errors import InvalidInputError, StoreError, rewording
from thinsection.extras import importing
from thinsection.types import Document, Floats, Mpp

if TYPE_CHECKING:
    import anndata
    import geopandas
    import pyarrow as pa

FORMAT = 1
FOLDER = "cells"  # of a results folder: cells/NAME/ID.parquet
PREFIX = "cells_"  # before the name of cells in addresses and in names of columns
SOURCE_PREFIX = "source:"  # before the names of the file's own measurements
MEASURES = (
    "area_um2",
    "perimeter_um",
    "major_axis_um",
    "minor_axis_um",
    "circularity",
    "orientation_deg",
)
BBOX = ("xmin", "ymin", "xmax", "ymax")
MAX_BATCH_ROWS = 65_536
FACTS_KEY = b"thinsection"

Window = tuple[float, float, float, float]  # x0, y0, x1, y1 in level-0 px, half open


@dataclass(frozen=True, kw_only=True)
class CellCounts:
    """Number of cells of a file: read, kept, left out and changed."""

    read: int
    kept: int
    refused: Mapping[str, int] = field(default_factory=dict)  # by reason
    changed: Mapping[str, int] = field(default_factory=dict)  # kept, by what was done

    def sentence(self) -> str:
        """'5 of 7 cells; left out: 2 outside the slide; changed: 1 with holes'."""
        text = f"{self.kept:,} of {self.read:,} cells"
        for word, numbers in (("left out", self.refused), ("changed", self.changed)):
            if numbers:
                parts = [f"{number:,} {reason}" for reason, number in numbers.items()]
                text += f"; {word}: {', '.join(parts)}"
        return text


@dataclass(frozen=True)
class CellTable:
    """Cells of one slide, read from their file when a method needs them.

    Examples:
        >>> table = CellTable(Path("cells/qupath/a.parquet"))  # doctest: +SKIP
        >>> table.num_cells, table.classes  # doctest: +SKIP
        (592349, ('inflammatory', 'neoplastic'))
    """

    path: Path

    @cached_property
    def _file(self) -> Any:
        """Parquet metadata of the file; the file itself is closed again."""
        with importing("cells", "pyarrow"):
            import pyarrow.parquet as pq
        if not self.path.is_file():
            raise StoreError(f"cells must be a file, got {str(self.path)!r}")
        rule = "cells must be a readable Parquet file"
        with rewording(rule, self.path, OSError, ValueError, error=StoreError):
            return pq.read_metadata(self.path)

    @cached_property
    def facts(self) -> Document:
        """What the file says of itself: slide, resolution, source, counts.

        Raises StoreError: this package did not write it, or a newer version did.
        """
        text = (self._file.metadata or {}).get(FACTS_KEY)
        if text is None:
            raise StoreError(
                f"cells must be a table of `thinsection run --cells`, got {str(self.path)!r}"
            )
        facts: Document = json.loads(text)
        if facts.get("format") != FORMAT:
            raise StoreError(
                f"format of cells must be {FORMAT}, got {facts.get('format')!r} in "
                f"{str(self.path)!r}; import them again"
            )
        return facts

    @property
    def name(self) -> str:
        """Name of the cells, which is that of their folder."""
        return str(self.facts["name"])

    @property
    def slide_id(self) -> str:
        """Slide on which the cells lie."""
        return str(self.facts["slide_id"])

    @property
    def slide_mpp(self) -> Mpp:
        """Resolution of the slide's level 0."""
        mpp_x, mpp_y = self.facts["slide_mpp"]
        return float(mpp_x), float(mpp_y)

    @property
    def size_l0(self) -> tuple[int, int]:
        """Size of the slide, px of level 0."""
        width, height = self.facts["size_l0"]
        return int(width), int(height)

    @property
    def bounds_l0(self) -> Window:
        """Least x and y, and largest x and y, of all outlines."""
        x0, y0, x1, y1 = self.facts["bounds_l0"]
        return float(x0), float(y0), float(x1), float(y1)

    @property
    def counts(self) -> CellCounts:
        """How many cells the source had, and how many of them are here."""
        return CellCounts(**self.facts["counts"])

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return int(self._file.num_rows)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes, in alphabetical order."""
        return tuple(self.facts["classes"])

    @property
    def schema(self) -> "pa.Schema":
        """Arrow schema of the columns."""
        return self._file.schema.to_arrow_schema()

    @property
    def measures(self) -> list[str]:
        """Names of the columns of measures, those of the source last."""
        names = self.schema.names
        own = [name for name in names if name in MEASURES]
        return own + [name for name in names if name.startswith(SOURCE_PREFIX)]

    def batches(
        self, columns: Sequence[str] | None = None, within_l0: Window | None = None
    ) -> Iterator["pa.RecordBatch"]:
        """Yields the cells, at most 65,536 at a time, block by block.

        Args:
            columns: names of columns; None for all.
            within_l0: x0, y0, x1, y1: only cells whose centre lies there, half open.

        Memory: one row group and one batch of the columns.
        """
        import pyarrow.parquet as pq

        names = list(self.schema.names if columns is None else columns)
        unknown = set(names) - set(self.schema.names)
        if unknown:
            raise InvalidInputError(
                f"columns must be among {self.schema.names}, got {sorted(unknown)}"
            )
        read_names = list(names)
        if within_l0 is not None:
            read_names += [name for name in ("x_l0", "y_l0") if name not in names]
        groups = self._groups(within_l0)
        if not groups:
            return
        with pq.ParquetFile(self.path, pre_buffer=False) as file:
            for group in groups:
                for batch in file.iter_batches(
                    MAX_BATCH_ROWS,
                    row_groups=[group],
                    columns=read_names,
                    use_threads=False,
                ):
                    if within_l0 is None:
                        yield batch
                        continue
                    inside = are_within(centers_of(batch), within_l0)
                    if inside.any():
                        yield _kept(batch, inside).select(names)

    def _groups(self, within_l0: Window | None) -> list[int]:
        """Row groups that may hold cells of a window."""
        metadata = self._file
        numbers = range(metadata.num_row_groups)
        if within_l0 is None:
            return list(numbers)
        names = metadata.schema.to_arrow_schema().names
        x_column = names.index("x_l0")
        y_column = names.index("y_l0")
        x0, y0, x1, y1 = within_l0
        groups = []
        for number in numbers:
            group = metadata.row_group(number)
            x = group.column(x_column).statistics
            y = group.column(y_column).statistics
            if x.max >= x0 and x.min < x1 and y.max >= y0 and y.min < y1:
                groups.append(number)
        return groups

    def to_table(
        self, columns: Sequence[str] | None = None, within_l0: Window | None = None
    ) -> "pa.Table":
        """The cells as an Arrow table; arguments as of `batches`.

        Memory: all cells of the columns.
        """
        import pyarrow as pa

        fields = self.schema
        if columns is not None:
            fields = pa.schema([fields.field(name) for name in columns])
        batches = [
            batch.cast(fields.remove_metadata())
            for batch in self.batches(columns, within_l0)
        ]
        return pa.Table.from_batches(batches, fields.remove_metadata())

    def to_geopandas(
        self, columns: Sequence[str] | None = None, within_l0: Window | None = None
    ) -> "geopandas.GeoDataFrame":
        """The cells as a GeoDataFrame, with their outlines as geometry and the id as index.

        Memory: all cells of the columns.
        """
        with importing("`to_geopandas`", "geopandas"):
            import geopandas
        import shapely

        names = [name for name in self.schema.names if name != "bbox"]
        names = names if columns is None else list(columns)
        read_names = list(dict.fromkeys(["id", "geometry", *names]))
        frame = self.to_table(read_names, within_l0).to_pandas().set_index("id")
        for name in ("geometry", "nucleus"):
            if name in frame:
                frame[name] = shapely.from_wkb(frame[name])
        return geopandas.GeoDataFrame(frame, geometry="geometry")

    def to_anndata(self, within_l0: Window | None = None) -> "anndata.AnnData":
        """The cells as AnnData: measures and the source's measurements in X, centres in obsm.

        `obs` has the class, the probability and the slide; `obsm["spatial"]` level-0 px.

        Memory: 4 bytes per cell and measure, and some 100 bytes per cell.
        """
        with importing("`to_anndata`", "anndata", "pandas"):
            import anndata
            import pandas as pd
        measured = self.measures
        columns = ["id", "x_l0", "y_l0", "class", "probability", *measured]
        table = self.to_table(columns, within_l0)
        values = np.empty((len(table), len(measured)), dtype=np.float32)
        for number, name in enumerate(measured):
            values[:, number] = table[name].to_numpy()
        observed = pd.DataFrame(
            {
                "class": table["class"].to_pandas(),
                "probability": table["probability"].to_numpy(),
                "slide_id": pd.Categorical.from_codes(
                    np.zeros(len(table), dtype=np.int8), [self.slide_id]
                ),
            }
        )
        observed.index = table["id"].to_pandas().astype(str).to_numpy()
        named = pd.DataFrame(index=measured)
        return anndata.AnnData(
            X=values, obs=observed, var=named, obsm={"spatial": centers_of(table)}
        )


def centers_of(rows: "pa.RecordBatch | pa.Table") -> Floats:
    """Centres (N, 2) of cells, level-0 px, from their columns x_l0 and y_l0."""
    x, y = (numbers_of(rows.column(name)) for name in ("x_l0", "y_l0"))
    return np.stack((x, y), axis=1)


def numbers_of(column: "pa.Array | pa.ChunkedArray") -> npt.NDArray[Any]:
    """Numbers of a column without nulls; read-only where it is one piece.

    pyarrow's own `to_numpy` imports pandas, which takes longer than reading a million numbers.
    """
    chunks = getattr(column, "chunks", [column])
    if len(chunks) == 1:
        return np.from_dlpack(chunks[0])
    if not chunks:
        return np.empty(0, dtype=column.type.to_pandas_dtype())
    return np.concatenate([np.from_dlpack(chunk) for chunk in chunks])


def class_codes(rows: "pa.RecordBatch") -> npt.NDArray[np.int32]:
    """Place of each cell's class among `CellTable.classes`; -1 for none."""
    indices = rows.column("class").indices
    if not indices.null_count:
        return numbers_of(indices)
    # `fill_null` would import pandas, see `numbers_of`
    validity, values = indices.buffers()
    end = indices.offset + len(indices)
    is_given = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    codes = np.frombuffer(values, np.int32)[indices.offset : end]
    return np.where(is_given[indices.offset : end], codes, np.int32(-1))


def are_within(centers_l0: Floats, window: Window) -> Flags:
    """True for each centre (N, 2) that lies in a window."""
    low = np.array(window[:2])
    high = np.array(window[2:])
    inside = (centers_l0 >= low) & (centers_l0 < high)
    return np.asarray(inside.all(axis=1))


def _kept(batch: "pa.RecordBatch", kept: Flags) -> "pa.RecordBatch":
    import pyarrow as pa

    if kept.all():
        return batch
    # `pa.array` would import pandas, see `numbers_of`
    bits = pa.py_buffer(np.packbits(kept, bitorder="little"))
    return batch.filter(pa.Array.from_buffers(pa.bool_(), len(kept), [None, bits]))
