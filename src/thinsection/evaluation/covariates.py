"""Covariates: numbers of a case, such as age or cells per mm², beside its tiles.

A column is looked for in a table of cases or slides, then in the rows of summary.csv. The value of
a case is the mean over those of its slides that have one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from thinsection.config import nearest
from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.cases import listed_names
from thinsection.evaluation.cell_values import Numbers
from thinsection.evaluation.embeddings import FeatureFiles
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.parts import FoldCases
from thinsection.evaluation.tables import LabelTable, read_label_table
from thinsection.files.missing_cells import is_missing
from thinsection.results.cell_columns import is_cell_column
from thinsection.results.folder import open_results
from thinsection.results.tables import SUMMARY_COLUMNS
from thinsection.store.ledger import SLIDES
from thinsection.types import counted

SUMMARY = "summary.csv"
# values of one case, in the order of the columns; None where it has none
CaseValues = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class CovariateSource:
    """Where the covariates of slides are looked for.

    Attributes:
        table: file with slide_id or case_id; None for none.
        data: folder of the embeddings; that of a run has a summary.csv.
        grid: grid whose rows of summary.csv are read.
        patient_by_slide: slide id -> patient id, for slides whose patient the results know.
    """

    table: Path | None
    data: Path
    grid: str
    patient_by_slide: Mapping[str, str]


def case_covariates(
    columns: Sequence[str], slides: Sequence[Sequence[str]], source: CovariateSource
) -> tuple[tuple[CaseValues, ...], tuple[str, ...]]:
    """Values of each case, and for each column the name of the file that has it.

    Args:
        columns: names of the covariates.
        slides: slide ids of each case.
        source: see there.

    Memory: the table, and the rows of summary.csv.

    Raises DatasetError: no file has a column, or a value is no number.
    """
    all_slides = [slide for names in slides for slide in names]
    table = None
    if source.table is not None:
        table = read_label_table(source.table, (), all_slides, source.patient_by_slide)
    summary = _summary_rows(source)
    by_column = []
    places = []
    for column in columns:
        if table is not None and column in table.rows[0]:
            texts = _texts_of_table(table, column, all_slides, source.patient_by_slide)
            place = table.path.name
        elif any(column in row for row in summary.values()):
            texts = {slide: row.get(column, "") for slide, row in summary.items()}
            place = SUMMARY
        else:
            raise DatasetError(_unknown_column(column, table, summary))
        by_column.append(_numbers(column, texts, place))
        places.append(place)
    values = []
    for names in slides:
        values.append(tuple(_mean(numbers, names) for numbers in by_column))
    return tuple(values), tuple(places)


def with_covariates(
    cohort: Cohort,
    config: LabelsConfig,
    data: Path,
    patient_by_slide: Mapping[str, str],
) -> Cohort:
    """The cohort with the covariates of its cases, and an account of them.

    Raises ConfigError: a covariate is the target, or named twice. DatasetError: see
    `case_covariates`; or no case has a value.
    """
    columns = config.covariate
    if not columns:
        return cohort
    for column in columns:
        if columns.count(column) > 1:
            raise ConfigError(f"covariate must be named once, got {column!r} twice")
        if column in (*config.target, *config.times):
            raise ConfigError(
                f"covariate must be another column than the target, got {column!r} for both"
            )
    source = CovariateSource(
        table=config.labels,
        data=data,
        grid=cohort.place.split("/")[0],
        patient_by_slide=patient_by_slide,
    )
    values, places = case_covariates(columns, cohort.slides, source)
    lines = []
    warnings = []
    for number, (column, place) in enumerate(zip(columns, places, strict=True)):
        lacking = [
            case
            for case, row in zip(cohort.cases, values, strict=True)
            if row[number] is None
        ]
        if len(lacking) == len(values):
            raise DatasetError(
                f"covariate {column!r} must have a value for some case, got none in {place}"
            )
        lines.append(f"covariate {column}: from {place}")
        if lacking:
            warnings.append(
                f"covariate {column} is missing for {counted(len(lacking), 'case')} "
                f"({listed_names(lacking)}): they get the mean of the training cases"
            )
    return replace(
        cohort,
        covariate_columns=columns,
        covariates=values,
        account=(*cohort.account, *lines),
        warnings=(*cohort.warnings, *warnings),
    )


def check_values_of_folds(cohort: Cohort, parts: Sequence[FoldCases]) -> None:
    """Raises DatasetError: the training cases of a fold have no value of a covariate."""
    for fold, part in enumerate(parts):
        for number, column in enumerate(cohort.covariate_columns):
            if all(cohort.covariates[case][number] is None for case in part.train):
                raise DatasetError(
                    f"covariate {column!r} must have a value in the training cases of each fold, "
                    f"got none in fold {fold}; add values, use fewer folds, or leave it out"
                )


def check_before_embedding(
    columns: Sequence[str], table: Path | None, data: Path, *, has_qc: bool
) -> None:
    """Refuses a covariate that no file will have when slides are embedded.

    Args:
        columns: names of the covariates.
        table: file with slide_id or case_id; None for none.
        data: folder that gets the embeddings; it need not exist.
        has_qc: True if quality control adds columns of its own to summary.csv.

    Memory: the table, and the rows of summary.csv.

    Raises DatasetError: a column is neither in the table nor in summary.csv as it will be.
    """
    if not columns:
        return
    read = None if table is None else read_label_table(table, (), (), {})
    rows = [*open_results(data).rows()] if (data / SLIDES).is_dir() else []
    written = dict.fromkeys(SUMMARY_COLUMNS)
    for row in rows:
        written |= dict.fromkeys(row)
    for column in columns:
        # cells come from another tool, and quality control may add a column of any name
        may_come = has_qc and not is_cell_column(column)
        is_known = read is not None and column in read.rows[0]
        if not is_known and column not in written and not may_come:
            raise DatasetError(_unknown_column(column, read, {SUMMARY: written}))


def check_covariates(
    config: LabelsConfig,
    embeddings: FeatureFiles,
    data: Path,
    patient_by_slide: Mapping[str, str],
) -> None:
    """Raises DatasetError: no file has a covariate, or a value is no number."""
    if config.covariate:
        source = CovariateSource(
            table=config.labels,
            data=data,
            grid=embeddings.place.split("/")[0],
            patient_by_slide=patient_by_slide,
        )
        slides = [(slide,) for slide in embeddings.files]
        case_covariates(config.covariate, slides, source)


def _summary_rows(source: CovariateSource) -> dict[str, Mapping[str, object]]:
    """Slide id -> its row of summary.csv for the grid; {} where no run wrote one."""
    if not (source.data / SLIDES).is_dir():
        return {}
    rows: dict[str, Mapping[str, object]] = {}
    for row in open_results(source.data).rows():
        if row.get("grid") == source.grid:
            rows[str(row["slide_id"])] = row
    return rows


def _texts_of_table(
    table: LabelTable,
    column: str,
    slides: Sequence[str],
    patient_by_slide: Mapping[str, str],
) -> dict[str, object]:
    """Slide id -> its cell of the table.

    Raises DatasetError: two rows of a slide differ.
    """
    texts: dict[str, object] = {}
    slides_of_rows = table.slides_of_rows(slides, patient_by_slide)
    for row, names in zip(table.rows, slides_of_rows, strict=True):
        cell = row[column]
        for slide in names if not is_missing(cell) else ():
            if texts.setdefault(slide, cell) != cell:
                raise DatasetError(
                    f"{column} must be the same in all rows of a slide, got {texts[slide]!r} "
                    f"and {cell!r} for {slide!r} in {table.path.name!r}"
                )
    return texts


def _numbers(column: str, texts: Mapping[str, object], place: str) -> dict[str, float]:
    """Slide id -> number, for the slides that have one.

    Raises DatasetError: a cell is no number.
    """
    given = {
        slide: str(cell)
        for slide, cell in texts.items()
        if cell is not None and not is_missing(str(cell))
    }
    numbers = Numbers(given.values())
    read: dict[str, float] = {}
    for slide, text in given.items():
        value = numbers.read(text)
        if value is None:
            raise DatasetError(
                f"covariate {column!r} must have numbers, got {text!r} for {slide!r} in "
                f"{place!r}; write classes as columns of 0 and 1"
            )
        read[slide] = value
    return read


def _mean(numbers: Mapping[str, float], slides: Sequence[str]) -> float | None:
    """Mean over the slides that have a number."""
    values = [numbers[slide] for slide in slides if slide in numbers]
    return float(np.mean(values)) if values else None


def _unknown_column(
    column: str,
    table: LabelTable | None,
    summary: Mapping[str, Mapping[str, object]],
) -> str:
    """Message for a column that no file has."""
    places = []
    names: dict[str, None] = {}
    if table is not None:
        places.append(table.path.name)
        names |= dict.fromkeys(table.rows[0])
    if summary:
        places.append(SUMMARY)
    for row in summary.values():
        names |= dict.fromkeys(row)
    files = " or of ".join(places) or "a table; pass one"
    return (
        f"covariate must be a column of {files}, got {column!r}{nearest(column, names)}"
    )
