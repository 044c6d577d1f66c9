"""Columns of cells in tables of slides: values of each slide, and of all slides of its patient.

A column is named `cells_NAME:VALUE`, as in the tile table, and `patient:cells_NAME:VALUE` for the
patient. Values of a patient are those of all cells on all of their slides, not means of slides.
"""

import math
from collections.abc import Sequence

from thinsection.cells.table import PREFIX
from thinsection.types import Document

_OF_PATIENT = "patient:"
# beginnings of columns that each class has
_OF_CLASS = ("count_", "per_mm2_", "share_")
_TISSUE = "tissue_mm2"
_WITH_AREA = "with_area"
_MEAN = "area_um2_mean"
_STD = "area_um2_std"
# values of slides that add up
_SUMS = ("count", "in_no_tile", _TISSUE, _WITH_AREA)


def add_cell_columns(rows: Sequence[Document]) -> list[str]:
    """Adds the columns of patients to rows of slides and grids; returns the columns of cells.

    A class that a slide lacks gets 0 there, as there are none of its cells.

    Args:
        rows: rows as of summary.csv; they are changed.
    """
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(name for name in row if is_cell_column(name))
    if not columns:
        return []
    for row in rows:
        _fill_classes(row, list(columns))
    patients: dict[tuple[object, object], list[Document]] = {}
    for row in rows:
        if row.get("patient_id"):
            key = (row["patient_id"], row.get("grid"))
            patients.setdefault(key, []).append(row)
    of_patients: dict[str, None] = {}
    for slides in patients.values():
        values = _pooled(slides, list(columns))
        of_patients |= dict.fromkeys(values)
        for slide in slides:
            slide.update(values)
    return [*columns, *_in_order(columns, of_patients)]


def is_cell_column(name: str) -> bool:
    """True for a column of cells: 'cells_qupath:count'."""
    return name.startswith(PREFIX) and ":" in name


def _in_order(columns: dict[str, None], of_patients: dict[str, None]) -> list[str]:
    """Columns of patients in the order of those of slides."""
    names = [f"{_OF_PATIENT}{column}" for column in columns]
    return [name for name in names if name in of_patients]


def _fill_classes(row: Document, columns: Sequence[str]) -> None:
    """Sets values of classes that the slide lacks to 0, if it has these cells at all."""
    for column in columns:
        prefix, _, value = column.partition(":")
        if column in row or not value.startswith(_OF_CLASS):
            continue
        kind = value.partition("_")[0]
        whole = "per_mm2" if value.startswith("per_mm2_") else "count"
        if kind == "share":
            has_base = bool(row.get(f"{prefix}:count"))
        else:
            has_base = row.get(f"{prefix}:{whole}") is not None
        if has_base:
            row[column] = 0


def _pooled(slides: Sequence[Document], columns: Sequence[str]) -> Document:
    """Values of the cells of all slides of a patient."""
    pooled: Document = {}
    for prefix in dict.fromkeys(column.partition(":")[0] for column in columns):
        rows = [row for row in slides if row.get(f"{prefix}:count") is not None]
        if not rows:
            continue
        values: dict[str, float | int | None] = {}
        for column in columns:
            if column.startswith(f"{prefix}:"):
                value = column.partition(":")[2]
                if value in _SUMS or value.startswith("count_"):
                    numbers = [row.get(column) for row in rows]
                    known = [number for number in numbers if number is not None]
                    values[value] = sum(known) if len(known) == len(rows) else None
        num_cells = values["count"]
        tissue = values.get(_TISSUE)
        for name in list(values):
            if name == "count" or name.startswith("count_"):
                ending = name.removeprefix("count")
                values[f"per_mm2{ending}"] = _ratio(values[name], tissue)
                if ending:
                    values[f"share{ending}"] = _ratio(values[name], num_cells)
        values |= _pooled_areas(rows, prefix)
        for name, number in values.items():
            pooled[f"{_OF_PATIENT}{prefix}:{name}"] = number
    return pooled


def _pooled_areas(rows: Sequence[Document], prefix: str) -> dict[str, float | None]:
    """Mean and standard deviation of the areas of the cells of several slides."""
    parts = []
    for row in rows:
        mean = row.get(f"{prefix}:{_MEAN}")
        if mean is not None:
            parts.append((row[f"{prefix}:{_WITH_AREA}"], mean, row[f"{prefix}:{_STD}"]))
    total = sum(number for number, _, _ in parts)
    if not total:
        return {_MEAN: None, _STD: None}
    mean = sum(number * part for number, part, _ in parts) / total
    variance = sum(
        number * (std**2 + (part - mean) ** 2) for number, part, std in parts
    )
    return {_MEAN: mean, _STD: math.sqrt(variance / total)}


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or not below:
        return None
    return above / below
