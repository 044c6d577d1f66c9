"""Report on the reading of a table of labels, for `thinsection labels`; a clean table and a log."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cell_values import ordered_classes
from thinsection.evaluation.covariates import check_covariates
from thinsection.evaluation.embeddings import feature_files
from thinsection.evaluation.follow_up import TIMES_SIGN
from thinsection.evaluation.label_values import (
    MANY_CLASSES,
    LabelsConfig,
    LabelValues,
    read_values,
)
from thinsection.evaluation.labels import known_patients, label_counts, read_labels_of
from thinsection.evaluation.tables import LabelTable
from thinsection.files.atomic import write_table
from thinsection.types import counted

_ID_COLUMNS = ("slide_id", "case_id", "patient_id")
_CLEAN_SUFFIXES = (".csv", ".tsv")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelReport:
    """A table of labels, and the readings of its rows.

    Attributes:
        table: the table.
        rows: rows that were read: all, or those of the slides of a results folder.
        values: labels of these rows.
        columns: columns of the target.
    """

    table: LabelTable
    rows: tuple[int, ...]
    values: LabelValues
    columns: tuple[str, ...]

    @property
    def clean_columns(self) -> tuple[str, ...]:
        """Names of the columns in a clean table: several columns of times are one, `time`."""
        return tuple("time" if TIMES_SIGN in name else name for name in self.columns)

    @property
    def summary(self) -> str:
        """Sentence on the labels on which a model would be trained."""
        values = self.values
        num_rows = f"{counted(len(values.rows), 'row')} of {len(self.rows)}"
        if values.kind in ("cox", "discrete"):
            events = sum(cells[0] == 1 for cells in values.cells)
            censored = len(values.cells) - events
            return f"{values.kind}: {num_rows}, {counted(events, 'event')}, {censored} censored"
        if values.kind in ("binary", "multiclass", "ordinal"):
            counts = Counter(str(name) for (name,) in values.cells)
            if len(counts) > MANY_CLASSES:
                return f"{values.kind}: {num_rows}, {len(counts)} classes"
            order = ordered_classes(counts) if values.kind == "ordinal" else None
            sign = " < " if order else ", "
            names = order or sorted(counts)
            classes = sign.join(f"{name} {counts[name]}" for name in names)
            return f"{values.kind}: {num_rows}: {classes}"
        if values.kind == "multilabel":
            table = np.array(values.cells, dtype=np.float64)
            table = table.reshape(-1, len(self.columns))
            return f"multilabel: {num_rows}: {label_counts(self.columns, table)}"
        if values.kind == "regression" and values.cells:
            numbers = [float(number or 0) for (number,) in values.cells]
            return f"regression: {num_rows}: {min(numbers):g} to {max(numbers):g}"
        return f"{values.kind}: {num_rows}"


def read_label_report(config: LabelsConfig, results: Path | None) -> LabelReport:
    """Reads a table of labels, for the slides of a results folder or for all.

    Memory: the table.

    Raises DatasetError, ConfigError: the table cannot be read, or lacks a column.
    """
    if results is None:
        table = read_labels_of(config, (), {})
        rows = tuple(range(len(table.rows)))
    else:
        embeddings = feature_files(results, config.features)
        patient_by_slide = known_patients(results)
        table = read_labels_of(
            config, {*embeddings.files, *embeddings.lacking}, patient_by_slide
        )
        slides = table.slides_of_rows(embeddings.files, patient_by_slide)
        rows = tuple(i for i, names in enumerate(slides) if names)
        check_covariates(config, embeddings, results, patient_by_slide)
    return LabelReport(
        table=table,
        rows=rows,
        values=read_values(table, rows, config),
        columns=config.columns,
    )


def write_clean_table(report: LabelReport, out: Path) -> Path:
    """Writes the rows that can be used, with their labels as they are read; returns the log.

    The log, `OUT_log.csv`, has a line for each cell that was changed, and for each row that is
    left out.

    Raises InvalidInputError: the name of the file is not that of a CSV or TSV.
    """
    if out.suffix.lower() not in _CLEAN_SUFFIXES:
        raise InvalidInputError(
            f"out must end in {' or '.join(_CLEAN_SUFFIXES)}, got {str(out)!r}"
        )
    table = report.table
    ids = [name for name in _ID_COLUMNS if name in table.rows[0]]
    lines = []
    for i, cells in zip(report.values.rows, report.values.cells, strict=True):
        row: dict[str, object] = {name: table.rows[i][name] for name in ids}
        for column, cell in zip(report.clean_columns, cells, strict=True):
            row[column] = cell
            if isinstance(cell, float) and cell.is_integer():
                row[column] = int(cell)
        lines.append(row)
    write_table(out, lines, [*ids, *report.clean_columns])
    log = out.with_name(f"{out.stem}_log{out.suffix}")
    write_table(
        log, _log_lines(report), ["line", "id", "column", "value", "reading", "becomes"]
    )
    return log


def _log_lines(report: LabelReport) -> list[dict[str, object]]:
    readings = {(one.column, one.value): one for one in report.values.readings}
    labelled_rows = {*report.values.rows}
    lines = []
    for i in report.rows:
        row = report.table.rows[i]
        place = {"line": report.table.lines[i], "id": report.table.name(i)}
        for column in dict.fromkeys(one.column for one in report.values.readings):
            one = readings.get((column, row[column]))
            if one is not None and one.becomes != row[column]:
                lines.append(
                    {
                        **place,
                        "column": column,
                        "value": row[column],
                        "reading": one.reading,
                        "becomes": one.becomes,
                    }
                )
        if i not in labelled_rows:
            lines.append({**place, "reading": "row left out"})
    return lines
