"""Sheets of a workbook (.xlsx) as rows of text."""

import zipfile
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from thinsection.types import counted

Record = tuple[int, list[str]]  # number of the row, and its cells


def read_sheets(path: Path) -> dict[str, list[Record]]:
    """Reads every sheet that has cells: its rows that are not empty, by its name, in their order.

    A formula has the value that the program that saved the workbook computed.

    Memory: all cells as text.

    Raises:
        ValueError: the file is damaged, a formula without a value, or merged cells, whose values
            are in one cell only.
    """
    from openpyxl import load_workbook

    sheets = {}
    try:
        # openpyxl does not close a file that it cannot read
        with path.open("rb") as first, path.open("rb") as second:
            values = load_workbook(first, read_only=True, data_only=True)
            formulas = load_workbook(second, read_only=True)
            for sheet in values.worksheets:
                # the size that a file states may be wrong
                sheet.reset_dimensions()
                formulas[sheet.title].reset_dimensions()
                records = list(_records(sheet, formulas[sheet.title]))
                if records:
                    _check_merged(path, sheet, records)
                    width = max(len(cells) for _, cells in records)
                    for _, cells in records:
                        cells.extend([""] * (width - len(cells)))
                    sheets[sheet.title] = records
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        # a damaged archive or XML makes openpyxl raise errors of any kind
        raise ValueError(f"the workbook is damaged ({error})") from error
    return sheets


def _records(sheet: Any, formulas: Any) -> Iterator[Record]:
    rows = zip(sheet.iter_rows(), formulas.iter_rows(), strict=True)
    for number, (row, written) in enumerate(rows, start=1):
        cells = [cell_text(cell.value) for cell in row]
        for place, (cell, source) in enumerate(zip(row, written, strict=False)):
            if cell.value is None and source.data_type == "f":
                raise ValueError(
                    f"the formula in row {number}, column {place + 1} of sheet "
                    f"{sheet.title!r} has no value; open the workbook in Excel and save it"
                )
        if any(cells):
            yield number, cells


def _check_merged(path: Path, sheet: Any, records: Sequence[Record]) -> None:
    """Refuses merged cells below the header: their value would be that of the first row alone."""
    from openpyxl.utils import range_boundaries

    with (
        zipfile.ZipFile(path) as archive,
        archive.open(sheet._worksheet_path.lstrip("/")) as file,
    ):
        for _, element in ElementTree.iterparse(file, events=("end",)):
            if element.tag.endswith("}mergeCell"):
                reference = element.get("ref", "")
                _, top, _, bottom = range_boundaries(reference)
                if bottom > top and bottom > records[0][0]:
                    raise ValueError(
                        f"the cells {reference} of sheet {sheet.title!r} are merged, so that "
                        f"{counted(bottom - top, 'row')} have no value; split the cells and "
                        "fill each row"
                    )
            element.clear()


def cell_text(value: object) -> str:
    """Returns the value of a cell as text: whole numbers without a point, dates as 2024-01-31."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value).strip()
