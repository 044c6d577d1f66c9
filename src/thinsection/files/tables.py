"""Strict reader of users' tables: CSV, TSV, semicolons, .xlsx and Parquet as text.

Encoding, separator, comments and further header rows are read from the content, never from the
suffix. Anything that could shift or hide a value is refused, and the message names the line: a
doubled column, a row with more cells than the header, a quote that is not closed. If a file is not
a table, the message names its kind. Every choice of the reader becomes a note of the table.
"""

import csv
import io
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from thinsection.config import nearest
from thinsection.errors import DatasetError, ThinsectionError
from thinsection.extras import importing
from thinsection.files.atomic import unescaped_cell
from thinsection.files.kinds import (
    HEAD_BYTES,
    PARQUET,
    WORKBOOK,
    binary_kind,
    text_kind,
)
from thinsection.files.workbook import Record, cell_text, read_sheets
from thinsection.types import counted

SHEET_SIGN = "#"  # stands before the name of a sheet: 'labels.xlsx#Sheet2'
SUFFIXES = (".csv", ".tsv", ".txt", ".xlsx", ".xlsm", ".parquet")
_DELIMITERS = (",", "\t", ";", "|")
_DELIMITER_WORDS = {"\t": "tab", ";": "semicolon", "|": "vertical bar"}
_SAMPLE_CHARACTERS = 1 << 17  # number of characters that decide on the separator
_BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
# spaces of every width, byte order marks and zero-width signs
_OUTER_SIGNS = string.whitespace + "\u00a0\u2007\u202f\u2009\u3000\ufeff\u200b"
_EXCEL_SEPARATOR = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)
_COMMENT = "#"
_CDE = "CDE_ID"  # start of the cells in the third header row of TCGA's biotabs


def path_and_sheet(path: Path) -> tuple[Path, str]:
    """Returns the file and the sheet of 'labels.xlsx#Sheet2'; '' if no sheet is named."""
    if path.exists() or SHEET_SIGN not in path.name:
        return path, ""
    name, _, sheet = path.name.rpartition(SHEET_SIGN)
    file = path.with_name(name) if name else path
    return (file, sheet) if file.is_file() else (path, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of a table as text, without outer spaces; '' for an empty cell.

    Attributes:
        path: the file.
        columns: names of the columns; columns without a name are left out.
        rows: cells by column.
        lines: line of the file, or row of the sheet, of each row.
        notes: sentences on choices of the reader, and on parts that are left out.
        other_names: name in a further header row -> column.
    """

    path: Path
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]
    lines: tuple[int, ...]
    notes: tuple[str, ...] = ()
    other_names: dict[str, str]

    def place(self, row: int) -> str:
        """Line and file of a row, for messages."""
        return f"line {self.lines[row]} of {str(self.path)!r}"

    def requiring(
        self, required: Iterable[str], error: type[ThinsectionError] = DatasetError
    ) -> "Table":
        """The table with the required columns, also by their names in further header rows.

        Raises:
            error: a column is missing; the message lists the columns of the table.
        """
        renamed = {}
        for name in required:
            if name in self.columns:
                continue
            column = self.other_names.get(name)
            if column is None:
                remedy = nearest(name, self.columns) if self.columns else ""
                if "did you mean" not in remedy:
                    remedy = ""  # the message lists the columns once
                if len(self.columns) == 1:
                    remedy = (
                        "; the file has one column only, so that it may be no table"
                    )
                raise error(
                    f"table must have the column {name!r}, got "
                    f"{', '.join(self.columns) or 'none'} in {str(self.path)!r}{remedy}"
                )
            renamed[name] = column
        if not renamed:
            return self
        rows = []
        for row in self.rows:
            rows.append(row | {name: row[column] for name, column in renamed.items()})
        return replace(self, columns=(*self.columns, *renamed), rows=tuple(rows))


def open_table(
    path: Path,
    required: Sequence[str] = (),
    *,
    may_be_empty: bool = False,
    error: type[ThinsectionError] = DatasetError,
) -> Table:
    """Reads a table, see the head of this file. 'labels.xlsx#Sheet2' names a sheet.

    Args:
        path: the file.
        required: columns that it must have.
        may_be_empty: True allows a table without rows.
        error: class of errors about the table.

    Memory: some 3 times the file, and 100 bytes a cell.

    Raises:
        error: the file is no table, has no rows, or lacks a column; or a row may be shifted.
    """
    file, sheet = path_and_sheet(path)
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        kind = binary_kind(file, head)
        if kind == PARQUET:
            table = _read_parquet(file)
        elif kind == WORKBOOK:
            table = _read_workbook(file, sheet, required)
        elif kind:
            raise _NoTableError(f"it is {kind}")
        else:
            table = _read_text(file)
    except ThinsectionError:
        raise
    except _NoTableError as cause:
        raise error(
            f"table must be CSV, TSV, Excel (.xlsx) or Parquet, got {str(file)!r}: {cause}"
        ) from None
    except _BadRowError as cause:
        fault, line, remedy = cause.args
        raise error(f"{fault} in {line} of {str(file)!r}; {remedy}") from None
    except (OSError, ValueError, KeyError, csv.Error) as cause:
        # pyarrow's errors are ValueErrors
        raise error(
            f"table must be a readable file, got {str(file)!r}: {cause}"
        ) from cause
    table = table.requiring(required, error)
    if not table.rows and not may_be_empty:
        raise error(f"table must have rows, got none in {str(file)!r}")
    return table


class _NoTableError(Exception):
    """The file is no table; the message says what it is, or why."""


class _BadRowError(Exception):
    """A row or a header that cannot be read without a guess.

    Its arguments are the rule and the value; the line of the file, or row of the sheet; the remedy.
    """


# text


def _read_text(path: Path) -> Table:
    text, notes = _decoded(path.read_bytes())
    kind = text_kind(text)
    if kind:
        raise _NoTableError(f"it is {kind}")
    declared = _EXCEL_SEPARATOR.match(text)
    if declared:
        delimiter = declared[1]
        first_line = 2
        text = text[declared.end() :]
    else:
        delimiter = _find_delimiter(text)
        first_line = 1
    if delimiter in _DELIMITER_WORDS and delimiter != "\t":
        notes.append(f"cells are separated by {_DELIMITER_WORDS[delimiter]}s")
    records = list(_records(text, delimiter, first_line))
    if not records:
        raise _NoTableError("it is empty")
    return _table_of(path, records, notes, may_be_short=delimiter == "\t")


def _decoded(content: bytes) -> tuple[str, list[str]]:
    """Returns a text, and a note on its encoding if that is not UTF-8."""
    encoding = ""
    for mark, name in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            encoding = name
            break
    head = content[:HEAD_BYTES]
    if not encoding and b"\0" in head:
        encoding = _utf16_without_mark(head)
        if not encoding:
            line = head.count(b"\n", 0, head.index(b"\0")) + 1
            raise _BadRowError(
                "cells must be text, got a NUL character",
                f"line {line}",
                "save the table again as UTF-8",
            )
    if encoding:
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError as error:
            raise _NoTableError(f"it is damaged text ({error})") from None
        notes = [] if encoding == "utf-8-sig" else [f"the text is {encoding.upper()}"]
        return text.removeprefix("\ufeff"), notes
    try:
        return content.decode("utf-8"), []
    except UnicodeDecodeError as error:
        place = error.start
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        raise _NoTableError(
            f"its bytes are neither UTF-8 nor Windows-1252 (byte {place}); save it as UTF-8"
        ) from None
    start = max(text.rfind(sign, 0, place) for sign in "\n\r,;\t") + 1
    sample = re.split(r"[\r\n,;\t]", text[start:])[0]
    return text, [f"the text is read as Windows-1252, such as {sample!r}"]


def _utf16_without_mark(head: bytes) -> str:
    """Returns the kind of UTF-16 if every second byte is 0, as in western text; '' if not."""
    zeros_at_even = head[::2].count(0)
    zeros_at_odd = head[1::2].count(0)
    if zeros_at_odd > 3 * zeros_at_even and zeros_at_odd > len(head) // 6:
        return "utf-16-le"
    if zeros_at_even > 3 * zeros_at_odd and zeros_at_even > len(head) // 6:
        return "utf-16-be"
    if sum(byte < 9 for byte in head) <= len(head) // 100 + 1:
        return ""
    raise _NoTableError("it is a binary file")


def _find_delimiter(text: str) -> str:
    """Returns the separator by which most lines have the same number of cells, at least two."""
    sample = text[:_SAMPLE_CHARACTERS]
    if len(text) > len(sample):
        sample = sample[: sample.rfind("\n") + 1] or sample
    best = (0.0, 0, ",")
    shares = {}
    for delimiter in _DELIMITERS:
        widths = Counter[int]()
        reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
        try:
            for cells in reader:
                if any(cells) and not cells[0].startswith(_COMMENT):
                    widths[len(cells)] += 1
        except csv.Error:
            pass  # the line is named when the whole text is read
        count_by_width = {w: count for w, count in widths.items() if w > 1}
        if count_by_width:
            width = max(count_by_width, key=lambda w: (count_by_width[w], w))
            share = count_by_width[width] / widths.total()
            shares[delimiter] = share
            best = max(best, (share, width, delimiter))
    if shares and best[0] < 0.5:
        raise _NoTableError(
            "it is text whose lines have no common number of cells: no comma, tab, semicolon or "
            "vertical bar separates columns"
        )
    return best[2]


def _records(text: str, delimiter: str, first_line: int) -> Iterator[Record]:
    """Yields the line and the cells of each record that is not empty."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 0
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield line + first_line, [_plain_cell(cell) for cell in cells]
            line = reader.line_num
    except csv.Error as error:
        raise _BadRowError(
            f"quotes of a table must close, got {error}",
            f"line {line + first_line}",
            "double a quote inside a quoted cell, or delete it",
        ) from None


def _plain_cell(cell: str) -> str:
    """Returns a cell without outer spaces, and without the sign that marks it as text."""
    text = cell.strip(_OUTER_SIGNS)
    if not text.startswith("'"):
        return text
    plain = unescaped_cell(text)
    # GDC's '-- is a word of its own
    return plain if any(sign.isalnum() for sign in plain) else text


# Parquet and workbooks


def _read_parquet(path: Path) -> Table:
    with importing("Parquet tables", "pyarrow"):
        from pyarrow import parquet
    data = parquet.read_table(path)
    records: list[Record] = [(1, list(data.column_names))]
    columns = [column.to_pylist() for column in data.columns]
    for number, cells in enumerate(zip(*columns, strict=True), start=2):
        records.append((number, [_plain_cell(cell_text(cell)) for cell in cells]))
    return _table_of(path, records, [])


def _read_workbook(path: Path, chosen: str, required: Sequence[str]) -> Table:
    """Reads a sheet: the named sheet, or else the first sheet with the required columns.

    If no columns are required, or no sheet has them, the largest sheet is read.
    """
    sheets = read_sheets(path)
    if not sheets:
        raise _NoTableError("the workbook has no cells")
    if chosen:
        if chosen not in sheets:
            raise _NoTableError(
                f"the workbook has no sheet {chosen!r}{nearest(chosen, sheets)}"
            )
        return _table_of(path, sheets[chosen], [f"sheet {chosen!r} is read"])
    tables: dict[str, Table] = {}
    faults: list[_BadRowError] = []
    for name, records in sheets.items():
        try:
            tables[name] = _table_of(path, records, [])
        except _BadRowError as fault:
            faults.append(fault)
    names = [
        name
        for name, table in tables.items()
        if {*required} <= {*table.columns, *table.other_names}
    ]
    if not names and faults:
        raise faults[0]
    if required and names:
        read = names[0]
    else:
        num_cells = {
            name: len(table.rows) * len(table.columns) for name, table in tables.items()
        }
        read = max(num_cells, key=num_cells.__getitem__)
    table = tables[read]
    others = [name for name in sheets if name != read]
    if not others:
        return table
    listed = ", ".join(repr(name) for name in others)
    note = (
        f"sheet {read!r} of {len(sheets)} is read, not {listed}; "
        f"{path.name}{SHEET_SIGN}{others[0]} chooses another"
    )
    return replace(table, notes=(note, *table.notes))


# records


def _table_of(
    path: Path,
    records: Sequence[Record],
    notes: Sequence[str],
    *,
    may_be_short: bool = False,
) -> Table:
    """Returns the table of some records; notes name the lines above the data that are no rows.

    `may_be_short` allows rows with fewer cells than the header: some editors remove tabs at the end
    of a line.
    """
    all_notes = list(notes)
    above, body = _split_above(records, all_notes)
    line, header = body[0]
    names = [" ".join(unicodedata.normalize("NFC", name).split()) for name in header]
    _check_doubled(names, line)
    further, data = _further_headers(names, body[1:], all_notes)
    rows = []
    lines = []
    short = []
    repeated = []
    for line, cells in data:
        if len(cells) > len(names) and any(cells[len(names) :]):
            raise _BadRowError(
                f"a row must have as many cells as the header, got {len(cells)} for "
                f"{counted(len(names), 'column')}",
                f"line {line}",
                "quote cells that contain the separator",
            )
        if len(cells) < len(names):
            short.append(line)
        if cells == header:
            repeated.append(line)
            continue
        pairs = zip_longest(names, cells[: len(names)], fillvalue="")
        rows.append({name: cell for name, cell in pairs if name})
        lines.append(line)
    if short and not may_be_short:
        raise _BadRowError(
            "a row must have as many cells as the header, got fewer",
            _line_words(short),
            "a line may be broken in two, or cells at its end are missing",
        )
    nameless = []
    for place, name in enumerate(names):
        # the first column may be the index of pandas, which has no name
        has_cells = any(cells[place] for _, cells in data if place < len(cells))
        if place and not name and has_cells:
            nameless.append(place + 1)
    if nameless:
        all_notes.append(
            f"columns without a name are left out: {', '.join(map(str, nameless))}"
        )
    if repeated:
        all_notes.append(f"the header is repeated at {_line_words(repeated)}")
    if short and may_be_short:
        all_notes.append(f"cells are missing at the end of {_line_words(short)}")
    return Table(
        path=path,
        columns=tuple(name for name in names if name),
        rows=tuple(rows),
        lines=tuple(lines),
        notes=tuple(all_notes),
        other_names=_other_names(names, [*above, *further]),
    )


def _split_above(
    records: Sequence[Record], notes: list[str]
) -> tuple[list[list[str]], Sequence[Record]]:
    """Returns the comment rows (further names of columns), and the records from the header on.

    Comments begin with '#', like the four rows above the header in files of cBioPortal. A title is
    a single cell above a table of several columns.
    """
    start = 0
    while start < len(records) and records[start][1][0].startswith(_COMMENT):
        start += 1
    comments = [cells for _, cells in records[:start]]
    names = [[cells[0].lstrip(_COMMENT).strip(), *cells[1:]] for cells in comments]
    if start == 1 and len(records) > 1 and 1 < len(names[0]) == len(records[1][1]):
        # a single line with '#' that is as wide as the next line is the header
        return [], [(records[0][0], names[0]), *records[1:]]
    if start == len(records):
        raise _NoTableError("it has only lines that begin with '#'")
    if start:
        lines = [line for line, _ in records[:start]]
        notes.append(f"{_line_words(lines)} with '#' above the header: no rows")
    widest = max(_num_filled(cells) for _, cells in records[start:])
    title = start
    while widest > 1 and _num_filled(records[title][1]) == 1 and title - start < 5:
        title += 1
        if title == len(records):
            return comments, records[start:]
    # rows with one filled cell are a title only if a row with several filled cells follows
    if title > start and _num_filled(records[title][1]) >= 2:
        lines = [line for line, _ in records[start:title]]
        notes.append(f"{_line_words(lines)} above the header: a title")
        start = title
    return names, records[start:]


def _num_filled(cells: Sequence[str]) -> int:
    return sum(1 for cell in cells if cell)


def _check_doubled(names: Sequence[str], line: int) -> None:
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names, start=1):
        if name:
            places.setdefault(name, []).append(place)
    for name, doubled in places.items():
        if len(doubled) > 1:
            columns = " and ".join(map(str, doubled))
            raise _BadRowError(
                f"columns must have different names, got {name!r} as columns {columns}",
                f"line {line}",
                "rename or delete one",
            )


def _further_headers(
    names: Sequence[str], data: Sequence[Record], notes: list[str]
) -> tuple[list[list[str]], Sequence[Record]]:
    """Returns the header rows below the first, as in TCGA's biotabs, and the rows of data."""
    num_rows = 0
    for number, (_, cells) in enumerate(data[:2], start=1):
        filled = [cell for cell in cells if cell]
        if filled and sum(cell.startswith(_CDE) for cell in filled) * 2 > len(filled):
            num_rows = number
    if not num_rows and data:
        pairs = [
            (name.casefold(), cell.casefold())
            for name, cell in zip(names, data[0][1], strict=False)
            if name and cell
        ]
        same = sum(name == cell for name, cell in pairs)
        if same >= 2 and same * 4 >= len(pairs) and pairs[0][0] == pairs[0][1]:
            num_rows = 1
    if num_rows:
        lines = [line for line, _ in data[:num_rows]]
        notes.append(f"{_line_words(lines)} below the header: further names of columns")
    return [cells for _, cells in data[:num_rows]], data[num_rows:]


def _other_names(
    names: Sequence[str], further: Iterable[Sequence[str]]
) -> dict[str, str]:
    """Returns the column of each name in further header rows, without names of several columns."""
    columns: dict[str, set[str]] = {}
    for row in further:
        for name, other in zip(names, row, strict=False):
            if name and other and other not in names:
                columns.setdefault(other, set()).add(name)
    return {
        other: next(iter(named)) for other, named in columns.items() if len(named) == 1
    }


def _line_words(lines: Sequence[int]) -> str:
    """Returns 'line 3', or 'lines 3, 5, 9, ... (12)'."""
    shown = ", ".join(map(str, lines[:3]))
    if len(lines) == 1:
        return f"line {shown}"
    return f"lines {shown}, ... ({len(lines)})" if len(lines) > 3 else f"lines {shown}"
