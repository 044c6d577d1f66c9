"""Labels, patients and sites of rows that a user passes as arrays, lists or pandas columns.

The labels are read as those of a table of `thinsection train`: the same text is the same class, and
the same values are classes or numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups, group_rows, listed_names, one_spelling
from thinsection.evaluation.label_values import LabelsConfig, read_values
from thinsection.evaluation.labels import Cohort, target_and_values
from thinsection.evaluation.tables import LabelTable
from thinsection.evaluation.target import Target, TaskName
from thinsection.types import Floats, is_missing_value

# types of the missing values of pandas, which is not imported here
# one value per row: a list, a NumPy array, or a column of pandas
Values = Sequence[Any] | npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """N rows with their labels, cases, patients and sites."""

    target: Target
    values: Floats  # (N, T), see `Cohort.values`
    cases: tuple[str, ...]  # (N,); rows of one case have the same id
    groups: Groups  # patient of each row
    sites: tuple[str, ...]  # (N,); () if they are unknown

    def cohort(self, rows: Sequence[int]) -> Cohort:
        """Some of the rows, each as a case with one slide."""
        names = tuple(self.cases[row] for row in rows)
        return Cohort(
            target=self.target,
            place="the arguments",
            cases=names,
            slides=tuple((name,) for name in names),
            files=tuple(() for _ in rows),
            values=tuple(tuple(self.values[row].tolist()) for row in rows),
            patients=self.groups.take(rows).of_row,
            unit=self.groups.unit,
            sites=tuple(self.sites[row] for row in rows) if self.sites else (),
        )


def labelled_rows(
    labels: Values,
    *,
    cases: Values | None,
    patients: Values | None,
    sites: Values | None,
    time: Values | None,
    task: TaskName,
) -> LabelledRows:
    """Rows with labels, as `train` would read them from a table.

    Raises InvalidInputError: columns of different lengths, a missing value, labels that cannot be
    read; DatasetError, ConfigError: labels that do not fit the kind of the target.
    """
    texts = texts_of(labels, "labels")
    config = LabelsConfig(
        target=("labels",), time=None if time is None else "time", task=task
    )
    rows = [{"labels": text} for text in texts]
    if time is not None:
        times = texts_of(time, "time", len(texts))
        rows = [row | {"time": text} for row, text in zip(rows, times, strict=True)]
    table = LabelTable(
        path=Path("labels"),
        rows=tuple(row | {"row": f"row {i}"} for i, row in enumerate(rows)),
        lines=tuple(range(len(rows))),
        key="row",
        key_column="row",
        notes=(),
    )
    label_values = read_values(table, range(len(rows)), config)
    used = {*label_values.rows}
    unread = [row for row in range(len(rows)) if row not in used]
    if label_values.problems:
        raise InvalidInputError("; and ".join(label_values.problems))
    if unread:
        raise InvalidInputError(
            f"labels must not be missing, got {texts[unread[0]]!r} in "
            f"{_rows_words(unread)}; leave these rows out of all arguments"
        )
    target, values, _ = target_and_values(
        label_values.kind, label_values.cells, config, "labels"
    )
    case_ids, groups = cases_and_groups(len(texts), cases, patients)
    site_names: tuple[str, ...] = ()
    if sites is not None:
        site_names = texts_of(sites, "sites", len(texts))
    return LabelledRows(
        target=target, values=values, cases=case_ids, groups=groups, sites=site_names
    )


def cases_and_groups(
    num_rows: int, cases: Values | None, patients: Values | None
) -> tuple[tuple[str, ...], Groups]:
    """Case and patient of each row.

    Without `cases`, each row is a case. Without `patients`, the TCGA, CPTAC or GTEx barcode in a
    case names its patient; else each case is its own unit.
    """
    case_ids = tuple(f"row {row}" for row in range(num_rows))
    if cases is not None:
        case_ids = one_spelling(texts_of(cases, "cases", num_rows))
    if patients is not None:
        names = texts_of(patients, "patients", num_rows)
        return case_ids, group_rows((), case_ids, names, where="the arguments")
    if cases is None:
        return case_ids, Groups.each(case_ids, "rows")
    groups = group_rows((), case_ids, where="the arguments")
    if groups.of_row == case_ids:
        groups = Groups.each(case_ids, "cases")
    return case_ids, groups


def texts_of(values: Values, name: str, num_rows: int | None = None) -> tuple[str, ...]:
    """One text per row. Numbers are written as in a table: 1 for 1 and 1.0.

    Raises InvalidInputError: not one-dimensional, another length, or a missing value.
    """
    column = _column(values, name, num_rows)
    missing = [row for row, value in enumerate(column) if is_missing_value(value)]
    if missing:
        raise InvalidInputError(
            f"{name} must not be missing, got {column[missing[0]]!r} in "
            f"{_rows_words(missing)}; leave these rows out of all arguments"
        )
    return tuple(_text(value) for value in column)


def numbers_of(values: Values, name: str, num_rows: int | None = None) -> Floats:
    """One number per row, float64 (N,).

    Raises InvalidInputError: not one-dimensional, another length, not numbers, or not finite.
    """
    column = _column(values, name, num_rows)
    try:
        numbers = np.array(
            [np.nan if is_missing_value(value) else value for value in column],
            dtype=np.float64,
        )
    except (TypeError, ValueError):
        wrong = next(value for value in column if not _is_number(value))
        raise InvalidInputError(f"{name} must be numbers, got {wrong!r}") from None
    check_finite_rows(numbers, name)
    return numbers


def check_finite_rows(numbers: Floats, name: str) -> None:
    """Raises InvalidInputError: a row (N, ...) has a number that is missing or infinite."""
    finite = np.isfinite(numbers.reshape(len(numbers), -1)).all(axis=1)
    if not finite.all():
        raise InvalidInputError(
            f"{name} must be finite, got NaN or infinity in "
            f"{_rows_words(np.flatnonzero(~finite).tolist())}; leave these rows out of all "
            "arguments"
        )


def _column(values: Values, name: str, num_rows: int | None) -> list[Any]:
    """Values as plain objects, one per row."""
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise InvalidInputError(
            f"{name} must be one value per row, got {type(values).__name__}"
        )
    shape = np.shape(values)
    if len(shape) != 1:
        raise InvalidInputError(
            f"{name} must be one value per row, got an array of shape {shape}"
        )
    if num_rows is not None and len(values) != num_rows:
        raise InvalidInputError(
            f"{name} must have one value per row, got {len(values)} for {num_rows} labels"
        )
    if num_rows is None and not len(values):
        raise InvalidInputError(f"{name} must have at least one row, got none")
    array = np.asarray(values)
    plain: list[Any] = array.tolist()
    return plain


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _rows_words(rows: Sequence[int]) -> str:
    """Rows in words: 'row 3', 'rows 1, 5, 9, ... (12 rows)'."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    shown = f"rows {listed_names([str(row) for row in rows])}"
    return f"{shown} ({len(rows)} rows)" if len(rows) > 3 else shown
