"""Tables of labels, splits and tiles as rows of text; nanopath's and THUNDER's JSON lists too.

A table of labels also says which column names the slide or the case of a row, and whom it means.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinsection.config import nearest
from thinsection.errors import ConfigError, DatasetError, rewording
from thinsection.evaluation.cases import CASE_COLUMNS, patient_of
from thinsection.evaluation.metrics import Fold
from thinsection.files.atomic import read_json
from thinsection.files.tables import SUFFIXES, Table, open_table, path_and_sheet
from thinsection.slide.ids import KnownIds
from thinsection.types import Document, Json

TextRow = Mapping[str, str]
TRAIN = "train"
VAL = "val"
TEST = "test"
TABLE_SUFFIXES = (*SUFFIXES, ".json")
# words of others for a part of a split
SPLITS = {
    "train": TRAIN,
    "training": TRAIN,
    "val": VAL,
    "valid": VAL,
    "validation": VAL,
    "dev": VAL,
    "test": TEST,
    "testing": TEST,
}
# our names of the columns that nanopath and THUNDER write as lists
_COLUMN_BY_LIST = {
    "case_slides": "slide_id",
    "slides": "slide_id",
    "slide_ids": "slide_id",
    "images": "path",
    "labels": "label",
    "events": "event",
    "days": "time",
    "case_ids": "case_id",
}
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


def read_rows(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a table as text, see `files.tables`; or of nanopath's or THUNDER's JSON list."""
    if path.suffix.lower() != ".json":
        return list(open_table(path, required).rows)
    with rewording(
        "table must be readable text", path, OSError, ValueError, error=DatasetError
    ):
        task = read_json(path)
        listed: list[Document] = []
        if isinstance(task, dict) and "case_ids" in task:
            listed = _rows_of_lists(task, "", 0, path)
        elif isinstance(task, dict) and {TRAIN, VAL} <= task.keys():
            # lists of the test split are left out
            for split in (TRAIN, VAL):
                listed += _rows_of_lists(task[split], split, len(listed), path)
        else:
            raise DatasetError(
                "list must have the keys train and val, or case_ids, got neither in "
                f"{str(path)!r}"
            )
    names: dict[str, None] = {}
    for row in listed:
        names |= dict.fromkeys(row)
    require_columns(names, required, path)
    if not listed:
        raise DatasetError(f"table must have rows, got none in {str(path)!r}")
    rows = []
    for row in listed:
        texts = {name: "" if cell is None else str(cell) for name, cell in row.items()}
        rows.append({name: text.strip() for name, text in texts.items()})
    return rows


def require_columns(
    columns: Iterable[str], required: Sequence[str], path: Path
) -> None:
    """Raises DatasetError: a table lacks a column; it says which columns the table has."""
    names = [*columns]
    for name in required:
        if name not in names:
            hint = nearest(name, names) if names else ""
            if "did you mean" not in hint:
                hint = ""  # the message lists the columns once
            raise DatasetError(
                f"table must have the column {name!r}, "
                f"got {', '.join(names) or 'none'} in {str(path)!r}{hint}"
            )


def _rows_of_lists(
    lists: Mapping[str, Json], split: str, first_row: int, path: Path
) -> list[Document]:
    """Rows of equally long lists; those of images count from `first_row` in the embeddings."""
    columns = {
        _COLUMN_BY_LIST[name]: values
        for name, values in lists.items()
        if name in _COLUMN_BY_LIST
    }
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        raise DatasetError(
            f"lists must have the same length, got {sorted(lengths)} in {str(path)!r}"
        )
    rows = []
    for place, values in enumerate(zip(*columns.values(), strict=True)):
        row = dict(zip(columns, values, strict=True))
        if split:
            row["split"] = split
        if "path" in row:  # of a file of embeddings in the list's order
            row["row"] = first_row + place
        for number, fold in enumerate(lists.get("folds", ())):
            row[f"fold_{number}"] = TRAIN if row["case_id"] in fold[TRAIN] else VAL
        rows.append(row)
    return rows


def split_name(text: str, where: str) -> str:
    """'train', 'val' or 'test' for a file's own word; raises DatasetError for another word."""
    word = text.strip().lower()
    if word not in SPLITS:
        raise DatasetError(f"split must be train, val or test, got {text!r} in {where}")
    return SPLITS[word]


def open_rows(
    rows: Sequence[TextRow], where: str, held_out: str = VAL
) -> list[TextRow]:
    """The rows with their split in our words, without those of test: they stay shut.

    Where `held_out` is test, its rows are val and all others train.
    """
    if not rows or "split" not in rows[0]:
        return [*rows]
    opened: list[TextRow] = []
    for row in rows:
        split = split_name(row["split"], where)
        if held_out != VAL:
            split = VAL if split == TEST else TRAIN
        if split != TEST:
            opened.append({**row, "split": split})
    return opened


def split_fold(splits: Sequence[str], where: str, remedy: str = "") -> Fold:
    """Rows of train and of val; raises DatasetError where one of them has none."""
    names = np.array(splits)
    train = np.flatnonzero(names == TRAIN)
    val = np.flatnonzero(names == VAL)
    if not len(train) or not len(val):
        raise DatasetError(
            f"split must name training and validation rows, got {len(train)} and {len(val)} in "
            f"{where}{remedy}"
        )
    return train, val


def column_folds(
    rows: Sequence[TextRow], columns: Sequence[str], where: str
) -> tuple[Fold, ...]:
    """A fold of each of some columns of splits."""
    folds = []
    for column in columns:
        splits = [split_name(row[column], where) for row in rows]
        folds.append(split_fold(splits, f"{column} of {where}"))
    return tuple(folds)


def unexpected(root: Path, kind: str, looked_for: Sequence[str]) -> DatasetError:
    """Error for a folder that does not look like a dataset: its content, and what was expected."""
    content = "no such folder"
    if root.exists():
        names = sorted(p.name + ("/" if p.is_dir() else "") for p in root.iterdir())
        content = ", ".join(names[:8])
        if len(names) > 8:
            content += f", ... ({len(names)})"
    return DatasetError(
        f"dataset must have the layout of {kind}, got {content or 'an empty folder'} in "
        f"{str(root)!r}; searched for {', '.join(looked_for)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTable:
    """Rows of a table of labels; columns of ids are also available under our own names.

    Attributes:
        path: the file.
        rows: cells by column.
        lines: line of the file, or row of the sheet, of each row.
        key: slide_id, case_id or patient_id: the kind of id that identifies a row.
        key_column: the table's column with these ids.
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
        self, slides: Iterable[str], patient_by_slide: Mapping[str, str]
    ) -> list[tuple[str, ...]]:
        """For each row, those of `slides` that it labels.

        Raises InvalidInputError: a name may mean two slides, or two names mean one slide.
        """
        where = repr(str(self.path))
        names = [row[self.key] for row in self.rows]
        if self.key == "slide_id":
            ids = KnownIds(slides).match(names, where)
            return [(ids[name],) if name in ids else () for name in names]
        by_patient = _slides_by_patient(slides, patient_by_slide)
        known = KnownIds(by_patient, self.key)
        ids = known.match(names, where)
        patients = [ids.get(name) or known.find(patient_of(name)) for name in names]
        return [
            () if patient is None else tuple(by_patient[patient])
            for patient in patients
        ]

    def why_unmatched(
        self,
        row: int,
        slides: KnownIds,
        reason_without_embeddings: Mapping[str, str],
    ) -> str:
        """Says why a row matches no embeddings: its slide has none, or its name is unknown."""
        name = self.name(row)
        slide = slides.find(name)
        if slide is not None and slide in reason_without_embeddings:
            return f"{slide} ({reason_without_embeddings[slide]})"
        return slides.words(name)


def _slides_by_patient(
    slides: Iterable[str], patient_by_slide: Mapping[str, str]
) -> dict[str, list[str]]:
    by_patient = defaultdict[str, list[str]](list)
    for slide in slides:
        by_patient[patient_by_slide.get(slide) or patient_of(slide)].append(slide)
    return by_patient


def read_label_table(
    path: Path,
    columns: Sequence[str],
    slides: Collection[str],
    patient_by_slide: Mapping[str, str],
) -> LabelTable:
    """Reads a table of labels.

    Args:
        path: the file, also 'labels.xlsx#Sheet2'.
        columns: columns that it must have.
        slides: slides of the results; () if none are known yet.
        patient_by_slide: slide id -> patient id, for slides whose patient the results know.

    Raises:
        ConfigError: the file does not exist.
        DatasetError: it is no table, lacks a column, or no column names a slide or a case.
    """
    if not path_and_sheet(path)[0].is_file():
        raise ConfigError(f"labels must be an existing file, got {str(path)!r}")
    table = open_table(path, columns)
    by_plain_name: dict[str, str] = {}
    for column in table.columns:
        by_plain_name.setdefault(_plain_name(column), column)
    case_column = _case_column(table, by_plain_name, slides, patient_by_slide)
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
    patient_by_slide: Mapping[str, str],
) -> str:
    """The column that names cases; '' if there is none.

    Of several columns, the one with the most known cases is used, since the case_id of GDC has
    other ids than the slides' names. If no case is known, it is the first column that does not
    consist of such ids (UUIDs) alone.
    """
    columns = [by_plain_name[name] for name in CASE_ALIASES if name in by_plain_name]
    if len(columns) < 2:
        return columns[0] if columns else ""
    known = KnownIds(_slides_by_patient(slides, patient_by_slide), "case_id")
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

    A column with another name than slide_id must contain the id of a known slide if there is also a
    column of cases: a column `slide` may hold numbers of slides.
    """
    if "slide_id" in by_plain_name:
        return by_plain_name["slide_id"]
    columns = [by_plain_name[name] for name in SLIDE_ALIASES if name in by_plain_name]
    known = KnownIds(slides)
    for column in columns:
        if any(known.find(row[column]) is not None for row in table.rows):
            return column
    return "" if has_case or not columns else columns[0]
