"""Tables as CSV or TSV: one writer for all of the package's, and its counterpart that reads."""

import csv
import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from thinsection.files.atomic import atomic_path

Row = Mapping[str, Any] | Sequence[Any]
# A spreadsheet takes text that begins so for a formula and may run it. One apostrophe before it
# says "text"; text that already has apostrophes there gets one more, so that reading is exact.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def write_table(path: Path, rows: Iterable[Row], columns: Sequence[str] | None = None) -> None:
    """Writes a UTF-8 table with a header, atomically; `.tsv` has tabs between cells, others commas.

    Numbers are written as they are. Text that a spreadsheet would run as a formula gets a leading
    apostrophe, which `read_table` takes off. None and cells that a mapping lacks are empty.

    Rows are mappings, or sequences in the order of the columns; without columns the header is the
    union of all mappings' keys in order of appearance.

    Memory: one row where columns are given, else all rows.

    Source: OWASP, CSV injection.
    """
    with atomic_path(path) as tmp, tmp.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, rows, columns, delimiter=_delimiter(path))


def write_rows(
    file: TextIO, rows: Iterable[Row], columns: Sequence[str] | None = None, *, delimiter: str = ","
) -> None:
    """`write_table` into an opened text file or `io.StringIO`."""
    if columns is None:
        rows = list(rows)
        columns = [*dict.fromkeys(name for row in rows if isinstance(row, Mapping) for name in row)]
    line = io.StringIO(newline="")
    # a lone \r is quoted, before Python 3.13, only by a writer that ends its lines with one
    writer = csv.writer(line, delimiter=delimiter, lineterminator="\r\n")
    for row in itertools.chain([columns], rows):
        cells = [row.get(name) for name in columns] if isinstance(row, Mapping) else row
        writer.writerow([_cell(value) for value in cells])
        file.write(line.getvalue()[:-2] + "\n")
        line.seek(0)
        line.truncate()


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table that `write_table` wrote, as text; a byte order mark is no part of it.

    Memory: all rows.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter=_delimiter(path))
        header = [_text(cell) for cell in next(lines, [])]
        return [dict(zip(header, map(_text, line))) for line in lines]


def _delimiter(path: Path) -> str:
    return "\t" if Path(path).suffix == ".tsv" else ","


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _text(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
