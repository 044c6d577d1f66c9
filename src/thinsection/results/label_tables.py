"""Labels of slides from one column of a table: a file, pandas, pyarrow, or rows as dicts.

A row belongs to the slide in its column `slide_id`, whose spelling may differ as `slide/ids.py`
says. Words that mean "missing" are those of `train` (`files/missing_cells.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeGuard

from thinsection.config import nearest
from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.missing_cells import is_missing
from thinsection.files.tables import open_table
from thinsection.slide.ids import KnownIds
from thinsection.types import counted, is_missing_value, shortened

SLIDE_ID = "slide_id"
_SHOWN = 5  # slides that a message names
# endings of files that hold a table
_TABLE_ENDINGS = (".csv", ".tsv", ".txt", ".xlsx", ".parquet")


class ColumnTable(Protocol):
    """A table of pandas, pyarrow or polars."""

    def __getitem__(self, name: Any, /) -> Any: ...

    def __len__(self) -> int: ...


LabelTable: TypeAlias = str | Path | Sequence[Mapping[str, object]] | ColumnTable


@dataclass(frozen=True, kw_only=True)
class SlideLabels:
    """Labels by slide id, and a line about the slides without one; '' if there are none."""

    labels: Mapping[str, object]
    line: str


def is_table(labels: object, label: str | None) -> TypeGuard[LabelTable]:
    """Tells whether labels are a table, of which `label` names the column.

    Raises:
        InvalidInputError: a table without `label`, or `label` without a table.
    """
    has_form = isinstance(labels, Path | list | tuple) or _names_of(labels) is not None
    is_file = isinstance(labels, str) and labels.lower().endswith(_TABLE_ENDINGS)
    if label is None:
        if has_form or is_file:
            raise InvalidInputError(
                'label must name the column of the table of labels, got none; pass label="..."'
            )
        return False
    if not has_form and not isinstance(labels, str):
        raise InvalidInputError(
            "labels must be a table if label is given: a path, a table of pandas or pyarrow, or "
            f"rows as of results.rows(), got {type(labels).__name__}; leave out label"
        )
    return True


def labels_of_table(
    table: LabelTable,
    column: str | None,
    slide_ids: Iterable[str],
    *,
    classes: Sequence[object] | None,
) -> SlideLabels:
    """Reads the label of each slide from a column of a table.

    Numbers in a column of texts become numbers if all labels of the column are numbers.

    Args:
        table: a path (CSV, TSV, Excel, Parquet); a table of pandas or pyarrow; a sequence of
            mappings, one a row, such as `results.rows("labels.csv")`.
        column: the column that has the labels.
        slide_ids: the slides that need a label.
        classes: texts that are classes, even if they read like "missing".

    Memory: the table, and 200 bytes a row.

    Raises:
        StoreError: the file is no table.
        InvalidInputError: another kind of table, no such column, a slide with two labels, or no row
            of these slides.
    """
    assert column is not None
    names, cells = _columns_of(table, column)
    labels: dict[str, object] = {}
    words: dict[str, object] = {}  # what a slide without a label has in the table
    known_ids = list(slide_ids)
    ids = KnownIds(known_ids).match(names, "the table of labels")
    for name, value in zip(names, cells, strict=True):
        slide_id = ids.get(name)
        if slide_id is None:
            continue
        if _is_missing(value) and value not in (classes or ()):
            words.setdefault(slide_id, value)
        elif labels.setdefault(slide_id, value) != value:
            raise InvalidInputError(
                f"labels must have one {column!r} for each slide, got {labels[slide_id]!r} and "
                f"{value!r} for {slide_id!r}; keep one row a slide"
            )
    if not labels and not words:
        raise InvalidInputError(
            f"labels must have rows of slides of the folder, which are {shortened(known_ids)}, got "
            f"{shortened(list(dict.fromkeys(names)))}; correct the column {SLIDE_ID!r}"
        )
    without = [slide_id for slide_id in known_ids if slide_id not in labels]
    shown = [
        f"{slide_id!r} ({words[slide_id]!r})"
        if slide_id in words
        else f"{slide_id!r} (no row)"
        for slide_id in without[:_SHOWN]
    ]
    more = ", ..." if len(without) > _SHOWN else ""
    line = (
        f"{counted(len(without), 'slide')} of {len(known_ids)} left out, without a "
        f"{column!r} in the table of labels: {', '.join(shown)}{more}"
    )
    return SlideLabels(labels=_as_numbers(labels), line=line if without else "")


def _names_of(table: object) -> list[str] | None:
    """Names of the columns of a table of pandas, pyarrow or polars; None of anything else."""
    # pandas and polars have `columns` of names, pyarrow has `column_names`
    names = getattr(table, "column_names", getattr(table, "columns", None))
    return None if names is None else [str(name) for name in names]


def _columns_of(table: Any, column: str) -> tuple[list[str], list[Any]]:
    """Slide ids and values of a column, in the order of the rows."""
    if isinstance(table, str | Path):
        table = open_table(Path(table), (SLIDE_ID,), error=StoreError).rows
    if hasattr(table, "reset_index") and getattr(table.index, "name", "") == SLIDE_ID:
        table = table.reset_index()
    if isinstance(table, Sequence) and all(isinstance(row, Mapping) for row in table):
        known = list(dict.fromkeys(str(name) for row in table for name in row))
        _check_column(column, known)
        return (
            [str(row.get(SLIDE_ID, "")) for row in table],
            [row.get(column) for row in table],
        )
    names = _names_of(table)
    if names is None:
        raise InvalidInputError(
            "labels must be rows with names, as of results.rows(), got other rows; pass a table"
        )
    _check_column(column, names)
    return [str(name) for name in _values(table[SLIDE_ID])], _values(table[column])


def _check_column(column: str, names: Sequence[str]) -> None:
    """Raises InvalidInputError: the table lacks the labels or the ids of slides."""
    for name in (column, SLIDE_ID):
        if name not in names:
            raise InvalidInputError(
                f"labels must have a column {name!r}, got the columns {shortened(names)}"
                f"{nearest(name, names)}"
            )


def _values(column: Any) -> list[Any]:
    """Values of a column of pandas, pyarrow or polars as Python values."""
    for method in ("to_pylist", "tolist", "to_list"):
        if hasattr(column, method):
            return list(getattr(column, method)())
    return list(column)


def _is_missing(value: object) -> bool:
    return is_missing(value) if isinstance(value, str) else is_missing_value(value)


def _as_numbers(labels: Mapping[str, object]) -> Mapping[str, object]:
    """The labels as numbers if all are texts of numbers, else as they are."""
    for kind in (int, float):
        try:
            numbers = {
                slide_id: kind(text)
                for slide_id, text in labels.items()
                if isinstance(text, str)
            }
        except ValueError:
            continue
        return numbers if len(numbers) == len(labels) else labels
    return labels
