"""Tables of labels, splits and tiles as rows of text; nanopath's and THUNDER's JSON lists too."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from thinsection.config import nearest
from thinsection.errors import DatasetError, rewording
from thinsection.evaluation.metrics import Fold
from thinsection.files.atomic import read_json
from thinsection.files.tables import SUFFIXES, open_table
from thinsection.types import Json

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


def read_rows(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a table as text, see `files.tables`; or of nanopath's or THUNDER's JSON list."""
    if path.suffix.lower() != ".json":
        return list(open_table(path, required).rows)
    with rewording(
        "table must be readable text", path, OSError, ValueError, error=DatasetError
    ):
        listed = _listed_rows(read_json(path), path)
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
            raise DatasetError(
                f"table must have the column {name!r}, "
                f"got {', '.join(names) or 'none'} in {str(path)!r}{hint}"
            )


def _listed_rows(task: Json, path: Path) -> list[dict[str, Json]]:
    """Rows of a task as nanopath and THUNDER write it: lists by split, or cases with their folds.

    Lists of the test split are left out.
    """
    if isinstance(task, dict) and "case_ids" in task:
        return _rows_of_lists(task, "", 0, path)
    if not isinstance(task, dict) or not {TRAIN, VAL} <= task.keys():
        raise DatasetError(
            f"list must have the keys train and val, or case_ids, got neither in {str(path)!r}"
        )
    rows: list[dict[str, Json]] = []
    for split in (TRAIN, VAL):
        rows += _rows_of_lists(task[split], split, len(rows), path)
    return rows


def _rows_of_lists(
    lists: Mapping[str, Json], split: str, first_row: int, path: Path
) -> list[dict[str, Json]]:
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
