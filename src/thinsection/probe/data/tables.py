"""Tables of labels: CSV, TSV and Parquet, their splits, labels to integers."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from thinsection.config import nearest
from thinsection.errors import DatasetError, MissingDependencyError
from thinsection.probe.data.sets import Labels
from thinsection.probe.statistics import Fold

TextRow = Mapping[str, str]
TRAIN, VAL, TEST = "train", "val", "test"
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
FOLDS = 3  # where data bring no split: one of so many validates
_SPLITS = {
    **{"train": TRAIN, "training": TRAIN},
    **{"val": VAL, "valid": VAL, "validation": VAL, "dev": VAL},
    **{"test": TEST, "testing": TEST},
}


def read_rows(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV (or TSV or Parquet, by its suffix) as text, spaces stripped.

    Raises:
        DatasetError: missing, empty, or without a required column (names the nearest).
        MissingDependencyError: Parquet without pyarrow.
    """
    try:
        if path.suffix.lower() == ".parquet":
            columns, rows = _parquet_rows(path)
        else:
            with path.open(newline="", encoding="utf-8-sig") as file:
                delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
                reader = csv.DictReader(file, delimiter=delimiter)
                columns = [c.strip() for c in reader.fieldnames or ()]
                reader.fieldnames = columns
                rows = [{k: (v or "").strip() for k, v in row.items() if k} for row in reader]
    except (OSError, ValueError) as error:  # pyarrow's errors and UnicodeDecodeError are such
        raise DatasetError(f"table must be readable text, got {str(path)!r}: {error}") from error
    for name in required:
        if name not in columns:
            raise DatasetError(
                f"table must have the column {name!r}, got {', '.join(columns) or 'none'} in "
                f"{str(path)!r}{nearest(name, columns) if columns else ''}"
            )
    if not rows:
        raise DatasetError(f"table must have rows, got none in {str(path)!r}")
    return rows


def _parquet_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Column names and rows; what is null is an empty text."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"Parquet tables need pyarrow, got {error}; install thinsection[export]"
        ) from error
    table = parquet.read_table(path)
    text = [
        {k: "" if v is None else str(v).strip() for k, v in r.items()} for r in table.to_pylist()
    ]
    return list(table.column_names), text


def split_name(text: str, where: str) -> str:
    """'train', 'val' or 'test'.

    Raises:
        DatasetError: another word.
    """
    name = _SPLITS.get(text.strip().lower())
    if name is None:
        raise DatasetError(f"split must be train, val or test, got {text!r} in {where}")
    return name


def split_fold(splits: Sequence[str | None], where: str, remedy: str = "") -> Fold:
    """Rows of train and of val.

    Raises:
        DatasetError: one of them has no rows.
    """
    kinds = np.array(splits)
    fold = np.flatnonzero(kinds == TRAIN), np.flatnonzero(kinds == VAL)
    if not len(fold[0]) or not len(fold[1]):
        raise DatasetError(
            f"split must name train and val rows, got {len(fold[0])} and {len(fold[1])} in "
            f"{where}{remedy}"
        )
    return fold


def encode_labels(texts: Sequence[str], where: str) -> tuple[tuple[str, ...], Labels]:
    """(class names, labels): names sorted, as numbers where all are; labels are their ranks.

    Raises:
        DatasetError: a label is empty.
    """
    if not all(texts):
        row = list(texts).index("")
        raise DatasetError(f"label must not be empty, got '' in row {row} of {where}")
    distinct = sorted(set(texts))
    if all(_is_integer(t) for t in distinct):
        distinct.sort(key=int)
    index = {name: i for i, name in enumerate(distinct)}
    return tuple(distinct), np.array([index[t] for t in texts], dtype=np.int64)


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdigit()


def unexpected(root: Path, kind: str, looked_for: Sequence[str]) -> DatasetError:
    """The error of a folder that is not what was expected: what is there, what was looked for."""
    if not root.exists():
        there = "nothing: no such folder"
    else:
        names = sorted(p.name + ("/" if p.is_dir() else "") for p in root.iterdir())
        there = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
    return DatasetError(
        f"dataset must look like {kind}, got {there or 'an empty folder'} in {str(root)!r}; "
        f"looked for {', '.join(looked_for)}"
    )
