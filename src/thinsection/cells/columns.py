"""Reads cells from Parquet files: GeoParquet, tables of centres, and tables of outline points.

GeoPandas, histolytics and SpatialData write GeoParquet. Xenium writes a row for each point of an
outline. Other tables have two columns with the centres.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinsection.cells.batch import MAX_CELLS, MAX_POINTS, CellBatch
from thinsection.cells.outlines import POINT_BYTES, Outlines, decode_wkb
from thinsection.config import nearest
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.types import MIB, Floats

if TYPE_CHECKING:
    import pyarrow as pa

# names of columns that are found without being named, the first one first
_KNOWN_NAMES = {
    "id": ("id", "cell_id", "uid", "object_id", "label_id", "instance_id", "name"),
    "class": ("class", "class_name", "cell_type", "classification", "type", "label"),
    "geometry": ("geometry", "wkb", "polygon", "outline"),
    "x": ("x_l0", "x", "x_centroid", "centroid_x", "center_x", "cx"),
    "y": ("y_l0", "y", "y_centroid", "centroid_y", "center_y", "cy"),
    "probability": ("probability", "prob", "score", "confidence", "type_prob"),
}
MEANINGS = tuple(_KNOWN_NAMES)
# columns of a table with a row for each point of an outline, as Xenium writes it
_VERTEX_NAMES = ("cell_id", "vertex_x", "vertex_y")
# columns that only Xenium's tables of cells have
_XENIUM_NAMES = {"x_centroid", "transcript_counts"}
_GEO = b"geo"
_BUFFER_BYTES = MIB
_MAX_GEOMETRY_BYTES = POINT_BYTES * MAX_POINTS  # outlines of one batch


@dataclass(frozen=True, kw_only=True)
class CellColumns:
    """Names of the columns of a table of cells; '' for a column that it does not have."""

    id: str = ""
    class_name: str = ""
    geometry: str = ""
    x: str = ""
    y: str = ""
    probability: str = ""

    @property
    def used(self) -> set[str]:
        """All columns with a meaning."""
        return set(vars(self).values()) - {""}


def parse_columns(texts: Sequence[str]) -> dict[str, str]:
    """Reads 'class=cell_type' as meaning and column.

    Raises:
        ConfigError: a text is not of this form, or its meaning is unknown.
    """
    named = {}
    for text in texts:
        meaning, sign, column = text.partition("=")
        if not sign or meaning not in MEANINGS:
            hint = nearest(meaning, MEANINGS)
            raise ConfigError(
                f"columns of cells must be named as MEANING=COLUMN with a meaning of "
                f"{', '.join(MEANINGS)}, got {text!r}{hint}"
            )
        named[meaning] = column
    return named


def find_columns(schema: "pa.Schema", named: Mapping[str, str]) -> CellColumns:
    """Columns of a table: those that the user named, and those with a usual name.

    Raises:
        InvalidInputError: a named column is missing, or there is no place of the cells.
    """
    names = schema.names
    found: dict[str, str] = {}
    for meaning, usual in _KNOWN_NAMES.items():
        column = named.get(meaning)
        if column is None:
            column = _usual_column(schema, meaning, usual)
        elif column and column not in names:
            raise InvalidInputError(
                f"column of cells must be one of {', '.join(names[:20])}, got {column!r}"
            )
        found[meaning] = column
    columns = CellColumns(
        id=found["id"],
        class_name=found["class"],
        geometry=found["geometry"],
        x=found["x"],
        y=found["y"],
        probability=found["probability"],
    )
    if not columns.geometry and not (columns.x and columns.y):
        raise InvalidInputError(
            f"a table of cells must have a column geometry or columns x and y, got "
            f"{', '.join(names[:20])}; name them, such as x=COLUMN"
        )
    return columns


def _usual_column(schema: "pa.Schema", meaning: str, usual: Sequence[str]) -> str:
    """Column with a usual name for a meaning; '' if there is none."""
    import pyarrow.types as kinds

    if meaning == "geometry" and _GEO in (schema.metadata or {}):
        return str(json.loads(schema.metadata[_GEO])["primary_column"])
    by_lower = {name.lower(): name for name in reversed(schema.names)}
    for name in usual:
        column = by_lower.get(name)
        if column is None:
            continue
        kind = schema.field(column).type
        is_number = kinds.is_integer(kind) or kinds.is_floating(kind)
        if meaning in ("x", "y", "probability") and not is_number:
            continue
        if meaning == "geometry" and not _is_binary(kind):
            continue
        return str(column)
    return ""


def _is_binary(kind: "pa.DataType") -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_binary(kind) or kinds.is_large_binary(kind))


def has_vertices(schema: "pa.Schema") -> bool:
    """True for a table with a row for each point of an outline."""
    return set(_VERTEX_NAMES) <= set(schema.names)


def read_schema(path: Path) -> "pa.Schema":
    """Schema of a Parquet file."""
    import pyarrow.parquet as pq

    return pq.read_schema(path)


def parquet_frame(path: Path) -> str:
    """Frame of the coordinates: µm for Xenium's tables, else px of level 0."""
    schema = read_schema(path)
    is_xenium = has_vertices(schema) or set(schema.names) >= _XENIUM_NAMES
    return "um" if is_xenium else "px"


def read_parquet_cells(path: Path, named: Mapping[str, str]) -> Iterator[CellBatch]:
    """Yields the cells of a Parquet file.

    Args:
        path: the file.
        named: column of each meaning that the user named; others are found by their usual names.

    Memory: some 80 MiB, whatever the number of rows.

    Raises:
        InvalidInputError: a column is missing.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        schema = file.schema_arrow
        if has_vertices(schema) and not named:
            yield from _read_vertices(file)
            return
        columns = find_columns(schema, named)
        measured = _measured_columns(schema, columns)
        wanted = [name for name in schema.names if name in columns.used]
        for rows in file.iter_batches(
            _rows_of_batch(file, columns.geometry),
            columns=[*wanted, *measured],
            use_threads=False,
        ):
            for part in _parts(rows, columns.geometry):
                yield _batch_of(part, columns, measured)


def _rows_of_batch(file: Any, geometry: str) -> int:
    """Rows that are read at a time: fewer than 16,384 where outlines have many points."""
    num_rows = file.metadata.num_rows
    if not geometry or not num_rows:
        return MAX_CELLS
    column = file.schema_arrow.names.index(geometry)
    num_bytes = 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        # nested columns before it have several columns of their own in the file
        for place in range(column, group.num_columns):
            chunk = group.column(place)
            if chunk.path_in_schema == geometry:
                num_bytes += int(chunk.total_uncompressed_size)
    num_fitting = _MAX_GEOMETRY_BYTES * int(num_rows) // max(1, num_bytes)
    return max(1, min(MAX_CELLS, num_fitting))


def _parts(rows: "pa.RecordBatch", geometry: str) -> Iterator["pa.RecordBatch"]:
    """Splits rows, so that the outlines of a part have at most 4 MiB, or it is one cell."""
    import pyarrow.compute as pc

    is_short = not geometry or rows[geometry].nbytes <= _MAX_GEOMETRY_BYTES
    if is_short or not _is_binary(rows[geometry].type):
        yield rows
        return
    lengths = pc.binary_length(rows[geometry]).fill_null(0).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(rows):
        limit = _MAX_GEOMETRY_BYTES + (ends[first - 1] if first else 0)
        end = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        yield rows.slice(first, end - first)
        first = end


def _measured_columns(schema: "pa.Schema", columns: CellColumns) -> list[str]:
    """Columns of numbers without another meaning."""
    import pyarrow.types as kinds

    return [
        field.name
        for field in schema
        if field.name not in columns.used
        and (kinds.is_integer(field.type) or kinds.is_floating(field.type))
    ]


def _batch_of(
    rows: "pa.RecordBatch", columns: CellColumns, measured: Sequence[str]
) -> CellBatch:
    """Cells of some rows."""
    centers: Floats | None = None
    changed: dict[str, int] = {}
    if columns.geometry:
        kind = rows.schema.field(columns.geometry).type
        if not _is_binary(kind):
            raise InvalidInputError(
                f"geometry of cells must be WKB, got {kind} in column {columns.geometry!r}; "
                "write it with GeoDataFrame.to_parquet(geometry_encoding='WKB')"
            )
        decoded = decode_wkb(rows[columns.geometry])
        outlines = decoded.outlines
        if np.isfinite(decoded.centers).any():
            centers = decoded.centers
        if decoded.num_with_holes:
            changed["with holes, which are filled"] = decoded.num_with_holes
        if decoded.num_in_pieces:
            changed["of several pieces: the largest is kept"] = decoded.num_in_pieces
    else:
        outlines = Outlines.empty(len(rows))
        centers = np.stack(
            [_numbers(rows, columns.x), _numbers(rows, columns.y)], axis=1
        )
    probability = None
    if columns.probability:
        probability = _numbers(rows, columns.probability)
    return CellBatch(
        ids=_texts(rows, columns.id),
        outlines=outlines,
        centers=centers,
        classes=_texts(rows, columns.class_name),
        probability=probability,
        measurements={name: _numbers(rows, name) for name in measured},
        changed=changed,
    )


def _numbers(rows: "pa.RecordBatch", name: str) -> Floats:
    """A column of numbers; NaN where it is null.

    Raises InvalidInputError: it has texts.
    """
    import pyarrow as pa

    try:
        column = rows[name].cast(pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InvalidInputError(
            f"column {name!r} of cells must have numbers, got {rows[name].type}"
        ) from None
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _texts(rows: "pa.RecordBatch", name: str) -> Any:
    """A column as text or as a dictionary of texts; None without a column."""
    import pyarrow as pa
    import pyarrow.types as kinds

    if not name:
        return None
    column = rows[name]
    if kinds.is_dictionary(column.type) and kinds.is_string(column.type.value_type):
        return column
    if kinds.is_binary(column.type) or kinds.is_large_binary(column.type):
        # Xenium's tables of 2022 have ids as bytes
        texts = [
            None if value is None else value.decode(errors="replace")
            for value in column.to_pylist()
        ]
        return pa.array(texts, type=pa.string())
    if kinds.is_boolean(column.type) or not kinds.is_nested(column.type):
        return column.cast(pa.string())
    raise InvalidInputError(
        f"column {name!r} of cells must have texts or numbers, got {column.type}"
    )


def _read_vertices(file: Any) -> Iterator[CellBatch]:
    """Yields the cells of a table with a row for each point; the rows of a cell follow each other.

    Source: 10x Genomics, Xenium output files: cell_boundaries.parquet, nucleus_boundaries.parquet.
    """
    import pyarrow as pa

    id_name = _VERTEX_NAMES[0]
    waiting: pa.Table | None = None
    num_rows = 16 * MAX_CELLS
    for rows in file.iter_batches(
        num_rows, columns=list(_VERTEX_NAMES), use_threads=False
    ):
        table = pa.Table.from_batches([rows])
        if waiting is not None:
            table = pa.concat_tables([waiting, table])
        starts = _starts_of_cells(table[id_name].combine_chunks())
        # the last cell may go on in the next rows
        last = int(starts[-1])
        if last:
            yield _vertex_batch(table.slice(0, last), starts[:-1])
        waiting = table.slice(last)
    if waiting is not None and len(waiting):
        yield _vertex_batch(waiting, np.zeros(1, dtype=np.int64))


def _starts_of_cells(ids: "pa.Array") -> Any:
    """Rows at which the id changes, with row 0."""
    import pyarrow.compute as pc

    changes = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1))
    return np.concatenate(
        [
            [0],
            1 + np.flatnonzero(changes.fill_null(True).to_numpy(zero_copy_only=False)),
        ]
    )


def _vertex_batch(table: "pa.Table", starts: Any) -> CellBatch:
    import pyarrow as pa

    id_name, x_name, y_name = _VERTEX_NAMES
    rows = table.combine_chunks().to_batches()[0]
    points = np.stack([_numbers(rows, x_name), _numbers(rows, y_name)], axis=1)
    counts = np.diff(np.append(starts, len(points)))
    ids = _texts(rows, id_name).take(pa.array(starts))
    return CellBatch(ids=ids, outlines=Outlines.of_counts(points, counts))
