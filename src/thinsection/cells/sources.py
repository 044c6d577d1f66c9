"""Formats of cells, how a file's format is recognised, and the import of one file."""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.cells import cellvit, hovernet
from thinsection.cells.batch import CellBatch
from thinsection.cells.cellvit import read_cellvit_cells
from thinsection.cells.columns import (
    parquet_frame,
    parse_columns,
    read_parquet_cells,
)
from thinsection.cells.geojson import read_geojson_cells
from thinsection.cells.hovernet import hovernet_frame, read_hovernet_cells
from thinsection.cells.json_stream import open_json
from thinsection.cells.label_images import (
    is_label_zarr,
    label_frame,
    read_label_cells,
)
from thinsection.cells.place import PX, CellSlide, PlacementCheck, placement_of
from thinsection.cells.spatialdata import read_spatialdata_cells, spatialdata_frame
from thinsection.cells.table import CellTable
from thinsection.cells.writing import CellOrigin, write_cells
from thinsection.errors import InvalidInputError, rewording
from thinsection.extras import importing
from thinsection.store.identity import file_sum

if TYPE_CHECKING:
    from thinsection.qc.tissue import TissueMask

# columns of a table by their meaning, as the user named them
NamedColumns = Mapping[str, str]
_JSON_SUFFIXES = (".geojson", ".geojson.gz", ".json", ".json.gz")
# errors of a damaged file; pyarrow's are ValueErrors and OSErrors, gzip's an EOFError
_DAMAGE = (OSError, ValueError, EOFError, zlib.error)


def _px(path: Path) -> str:
    """Frame of files that do not state theirs."""
    return PX


def _any_file(path: Path) -> bool:
    """True: the suffix decides."""
    return True


@dataclass(frozen=True, kw_only=True)
class CellFormat:
    """A format of cells.

    Attributes:
        name: its name in tables and messages.
        help: the programs that write it.
        suffixes: ends of the names of its files, in small letters.
        recognises: True for a file of this format, among those with these suffixes.
        read: yields the cells of a file.
        frame: frame of the coordinates of a file, if the user states none.
    """

    name: str
    help: str
    suffixes: tuple[str, ...]
    recognises: Callable[[Path], bool] = _any_file
    read: Callable[[Path, NamedColumns], Iterator[CellBatch]]
    frame: Callable[[Path], str] = _px


def _first_key(path: Path) -> str:
    """First key of a JSON table; '' for a list or an empty table."""
    with open_json(path) as stream:
        if stream.peek() == "{":
            for key in stream.members():
                return key
    return ""


# the first format that recognises a file reads it
FORMATS = (
    CellFormat(
        name="cellvit",
        help="CellViT, CellViT++: cells.json, cell_detection.json",
        suffixes=(".json", ".json.gz"),
        recognises=lambda path: _first_key(path) in cellvit.KEYS,
        read=lambda path, columns: read_cellvit_cells(path),
    ),
    CellFormat(
        name="hovernet",
        help="HoVer-Net, TIAToolbox, PathML: JSON with nuc",
        suffixes=(".json", ".json.gz"),
        recognises=lambda path: _first_key(path) in hovernet.KEYS,
        read=lambda path, columns: read_hovernet_cells(path),
        frame=hovernet_frame,
    ),
    CellFormat(
        name="geojson",
        help="QuPath (also with StarDist), HoverFast, CellViT: GeoJSON",
        suffixes=_JSON_SUFFIXES,
        read=lambda path, columns: read_geojson_cells(path),
    ),
    CellFormat(
        name="parquet",
        help="GeoPandas, histolytics, Xenium, and tables of centres: Parquet",
        suffixes=(".parquet", ".geoparquet"),
        read=read_parquet_cells,
        frame=parquet_frame,
    ),
    CellFormat(
        name="labels",
        help="label images, in which the value of a pixel is its cell: TIFF, OME-Zarr",
        suffixes=(".tif", ".tiff", ".zarr"),
        recognises=lambda path: path.suffix.lower() != ".zarr" or is_label_zarr(path),
        read=lambda path, columns: read_label_cells(path),
        frame=label_frame,
    ),
    CellFormat(
        name="spatialdata",
        help="SpatialData: the shapes of a Zarr store",
        suffixes=(".zarr",),
        read=read_spatialdata_cells,
        frame=spatialdata_frame,
    ),
)
# the longer ones first: '.geojson.gz' before '.gz'
SUFFIXES = tuple(
    sorted({end for form in FORMATS for end in form.suffixes}, key=len, reverse=True)
)


def format_of(path: Path) -> CellFormat:
    """Format of a file, by the end of its name and its first bytes.

    Raises:
        InvalidInputError: no format has such files, or the file is missing or damaged.
    """
    if not path.exists():
        raise InvalidInputError(f"cells must be in an existing file, got {str(path)!r}")
    name = path.name.lower()
    for cell_format in FORMATS:
        if not name.endswith(cell_format.suffixes):
            continue
        with reading(path):
            if cell_format.recognises(path):
                return cell_format
    raise InvalidInputError(
        f"file of cells must end in one of {' '.join(SUFFIXES)}, got {str(path)!r}"
    )


def reading(path: Path) -> AbstractContextManager[None]:
    rule = "cells must be readable"
    return rewording(rule, path, *_DAMAGE, error=InvalidInputError)


def import_cells(
    path: Path,
    table_path: Path,
    *,
    name: str,
    slide: CellSlide,
    frame: str | None = None,
    tissue: "TissueMask | None" = None,
    columns: Sequence[str] = (),
    digest: str = "",
) -> CellTable:
    """Reads the cells of a file and writes their table, atomically.

    Args:
        path: the file, of any of `FORMATS`.
        table_path: the table, cells/NAME/ID.parquet of a results folder.
        name: name of the cells.
        slide: the slide on which they lie.
        frame: unit of the coordinates, as `placement_of` takes it; None: that of the format.
        tissue: the slide's tissue, on which most cells must lie; None if it is not known.
        columns: columns of a table, as 'class=cell_type'.
        digest: SHA-256 of the file's bytes; '' if it is to be computed.

    Memory: some 200 MiB, whatever the number of cells.

    Raises:
        InvalidInputError: the file is damaged, has no cells, or does not fit the slide.
    """
    with importing("cells", "pyarrow"):
        import pyarrow  # noqa: F401 - named in a message if it is missing
    cell_format = format_of(path)
    named = parse_columns(columns)
    with reading(path):
        placement = placement_of(frame or cell_format.frame(path), slide)
        return write_cells(
            table_path,
            cell_format.read(path, named),
            name=name,
            slide=slide,
            origin=CellOrigin(
                path=str(path),
                digest=digest or digest_of(path),
                format=cell_format.name,
            ),
            placement=placement,
            fit=PlacementCheck(slide, placement, tissue),
        )


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes; of the names and bytes of its files, if it is a folder.

    Memory: 256 KiB.
    """
    if path.is_file():
        return file_sum(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(path)}:{file_sum(file)}".encode())
    return digest.hexdigest()
