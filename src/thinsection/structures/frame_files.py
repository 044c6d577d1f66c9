"""Structure files in, one table of frames out, a structure at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinsection.errors import InvalidInputError, MissingDependencyError, StructureError
from thinsection.structures.frame_table import FrameSummary, frame_table
from thinsection.structures.frames import ANGLE_THRESHOLD, FrameOptions
from thinsection.structures.mmcif import read_structure

if TYPE_CHECKING:
    import pyarrow

_SUFFIXES = (".parquet", ".csv")
_ROW_GROUP = 1 << 18


def write_frames(
    structure_paths: Sequence[Path],
    table_path: Path,
    *,
    assembly: str | None = None,
    angle_threshold: float = ANGLE_THRESHOLD,
    options: FrameOptions | None = None,
) -> list[FrameSummary]:
    """Writes the frames of all structures to one .parquet or .csv and returns a summary of each.

    Args:
        structure_paths: mmCIF files; the table calls each by its name without suffixes.
        table_path: overwritten; write to a temporary name for atomicity.
        assembly: as in `read_structure`.
        angle_threshold: degrees from a line.
        options: of the search.

    Memory: one structure and its table at a time.

    Raises:
        InvalidInputError: no structure, another suffix or an angle outside [0, 90].
        StructureError: a file cannot be used.
        MissingDependencyError: gemmi or pyarrow is not installed.
    """
    if not structure_paths:
        raise InvalidInputError("structure_paths must name at least one file, got none")
    if table_path.suffix not in _SUFFIXES:
        raise InvalidInputError(
            f"out must end in {' or '.join(_SUFFIXES)}, got {str(table_path)!r}"
        )
    if not 0 <= angle_threshold <= 90:
        raise InvalidInputError(f"angle_threshold must be in [0, 90], got {angle_threshold}")
    summaries: list[FrameSummary] = []
    writer = None
    try:
        for path in structure_paths:
            try:
                structure = read_structure(path, assembly=assembly)
                table, summary = frame_table(
                    structure, _name(path), angle_threshold=angle_threshold, options=options
                )
            except StructureError as error:
                error.add_note(f"structure: {path}")
                raise
            writer = writer or _writer(table_path, table)
            writer.write_table(_plain(table, table_path), _ROW_GROUP)
            summaries.append(summary)
    finally:
        if writer is not None:
            writer.close()
    return summaries


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".cif")


def _plain(table: "pyarrow.Table", table_path: Path) -> "pyarrow.Table":
    """For CSV: text instead of dictionary codes."""
    if table_path.suffix != ".csv":
        return table
    import pyarrow as pa

    fields = [
        pa.field(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type)
        for f in table.schema
    ]
    return table.cast(pa.schema(fields))


def _writer(table_path: Path, table: "pyarrow.Table") -> Any:
    try:
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise MissingDependencyError(
            "frame tables need pyarrow; pip install 'thinsection[structures]'"
        ) from None
    if table_path.suffix == ".csv":
        return pyarrow.csv.CSVWriter(table_path, _plain(table, table_path).schema)
    return pyarrow.parquet.ParquetWriter(table_path, table.schema)
