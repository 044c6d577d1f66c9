"""The table of labels: which column names the slide or the case of a row, and whom it means."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.cases import CASE_COLUMNS, patient_of
from thinsection.evaluation.tables import TextRow
from thinsection.files.tables import Table, open_table
from thinsection.files.workbook import split_sheet
from thinsection.slide.ids import KnownIds

# names of the column slide_id in tables of cohorts and of other tools, in any capitals
SLIDE_ALIASES = (
    "slide",
    "sample_id",
    "filename",
    "slide_path",
    "image_path",
    "wsi",
)
# names of the column case_id: ours, GDC's, STAMP's, of TCGA's biotabs, REDCap's
CASE_ALIASES = (
    "case_id",
    "patient_id",
    "case_submitter_id",
    "cases_submitter_id",
    "submitter_id",
    "bcr_patient_barcode",
    "patient_barcode",
    "case_barcode",
    "patient",
    "case",
    "record_id",
    "subject_id",
    "subject",
    "participant_id",
)
_SIGNS = re.compile(r"[\W_]+")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTable:
    """Rows of a table of labels, under our names of the columns of ids too.

    Attributes:
        path: the file.
        rows: cells by column.
        lines: line of the file, or row of the sheet, of each row.
        key: slide_id, case_id or patient_id: what a row is of.
        key_column: the column that holds it.
        notes: sentences on how the file was read.
    """

    path: Path
    rows: tuple[TextRow, ...]
    lines: tuple[int, ...]
    key: str
    key_column: str
    notes: tuple[str, ...]

    def name(self, row: int) -> str:
        """The slide or case of a row."""
        return self.rows[row][self.key]

    def words(self, rows: Sequence[int]) -> str:
        """Returns rows in words, by their lines and names; the first three of many."""
        shown = [f"line {self.lines[i]} ({self.name(i)})" for i in rows[:3]]
        more = f", ... ({len(rows)} rows)" if len(rows) > 3 else ""
        return ", ".join(shown) + more

    def slides_of_rows(
        self, slides: Iterable[str], owners: Mapping[str, str]
    ) -> list[tuple[str, ...]]:
        """The slides, of those that are given, that each row is of.

        Raises InvalidInputError: a name may mean two slides, or two names mean one slide.
        """
        where = repr(str(self.path))
        names = [row[self.key] for row in self.rows]
        if self.key == "slide_id":
            ids = KnownIds(slides).match(names, where)
            return [(ids[name],) if name in ids else () for name in names]
        by_patient = _slides_by_patient(slides, owners)
        known = KnownIds(by_patient, self.key)
        ids = known.match(names, where)
        patients = [ids.get(name) or known.find(patient_of(name)) for name in names]
        return [
            () if patient is None else tuple(by_patient[patient])
            for patient in patients
        ]

    def words_of_unknown(
        self, row: int, slides: KnownIds, lacking: Mapping[str, str]
    ) -> str:
        """Why a row has no embeddings: its slide lacks them, or its name is not known."""
        name = self.name(row)
        slide = slides.find(name)
        if slide is not None and slide in lacking:
            return f"{slide} ({lacking[slide]})"
        return slides.words(name)


def _slides_by_patient(
    slides: Iterable[str], owners: Mapping[str, str]
) -> dict[str, list[str]]:
    by_patient = defaultdict[str, list[str]](list)
    for slide in slides:
        by_patient[owners.get(slide) or patient_of(slide)].append(slide)
    return by_patient


def read_label_table(
    path: Path,
    columns: Sequence[str],
    slides: Collection[str],
    owners: Mapping[str, str],
) -> LabelTable:
    """Reads a table of labels.

    Args:
        path: the file, also 'labels.xlsx#Sheet2'.
        columns: columns that it must have.
        slides: slides of the results; () where none are known yet.
        owners: patient of a slide, as far as the results know it.

    Raises:
        ConfigError: the file does not exist.
        DatasetError: it is no table, lacks a column, or no column names a slide or a case.
    """
    if not split_sheet(path)[0].is_file():
        raise ConfigError(f"labels must be an existing file, got {str(path)!r}")
    table = open_table(path, columns)
    by_plain_name: dict[str, str] = {}
    for column in table.columns:
        by_plain_name.setdefault(_plain_name(column), column)
    case_column = _case_column(table, by_plain_name, slides, owners)
    slide_column = _slide_column(
        table, by_plain_name, slides, has_case=bool(case_column)
    )
    ids = {"slide_id": slide_column}
    if _plain_name(case_column) == "patient_id":
        ids["patient_id"] = case_column
    else:
        ids["case_id"] = case_column
        ids["patient_id"] = by_plain_name.get("patient_id", "")
    ids = {name: column for name, column in ids.items() if column}
    keys = [name for name in ("slide_id", *CASE_COLUMNS) if name in ids]
    if not keys:
        raise DatasetError(
            f"labels must have the column slide_id or case_id, got {', '.join(table.columns)} in "
            f"{str(path)!r}; slide_id may also be called {', '.join(SLIDE_ALIASES)}, and case_id "
            f"{', '.join(CASE_ALIASES[1:])}"
        )
    rows = []
    for row in table.rows:
        own = {name: row[column] for name, column in ids.items()}
        rows.append({**row, **own})
    return LabelTable(
        path=path,
        rows=tuple(rows),
        lines=table.lines,
        key=keys[0],
        key_column=ids[keys[0]],
        notes=table.notes,
    )


def _plain_name(column: str) -> str:
    """A column's name in lower case, with one '_' for other signs: 'Patient ID' is patient_id."""
    return _SIGNS.sub("_", column).strip("_").casefold()


def _case_column(
    table: Table,
    by_plain_name: Mapping[str, str],
    slides: Collection[str],
    owners: Mapping[str, str],
) -> str:
    """The column that names cases; '' if there is none.

    Of several the one with the most known cases, as GDC's case_id holds other ids than the slides'
    names; where none is known, the first that holds more than such ids.
    """
    columns = [by_plain_name[name] for name in CASE_ALIASES if name in by_plain_name]
    if len(columns) < 2:
        return columns[0] if columns else ""
    known = KnownIds(_slides_by_patient(slides, owners), "case_id")
    num_known = {
        column: sum(
            known.find(row[column]) is not None
            or known.find(patient_of(row[column])) is not None
            for row in table.rows
        )
        for column in columns
    }
    best = max(columns, key=lambda column: num_known[column])
    if num_known[best]:
        return best
    readable = [
        column
        for column in columns
        if not all(_UUID.fullmatch(row[column]) for row in table.rows)
    ]
    return (readable or columns)[0]


def _slide_column(
    table: Table,
    by_plain_name: Mapping[str, str],
    slides: Collection[str],
    *,
    has_case: bool,
) -> str:
    """The column that names slides; '' if there is none.

    Under another name than slide_id, beside a column of cases, it must contain a slide: `slide` may
    be the number of a slide.
    """
    if "slide_id" in by_plain_name:
        return by_plain_name["slide_id"]
    columns = [by_plain_name[name] for name in SLIDE_ALIASES if name in by_plain_name]
    known = KnownIds(slides)
    for column in columns:
        if any(known.find(row[column]) is not None for row in table.rows):
            return column
    return "" if has_case or not columns else columns[0]
