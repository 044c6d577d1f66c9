"""Tables of labels: CSV, TSV and Parquet, their splits, labels to integers."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        names, raw = _raw_rows(path)
    except (OSError, ValueError) as error:  # pyarrow's errors and UnicodeDecodeError are such
        raise DatasetError(f"table must be readable text, got {str(path)!r}: {error}") from error
    columns = [name.strip() for name in names]
    rows = [
        {k.strip(): "" if v is None else str(v).strip() for k, v in r.items() if k} for r in raw
    ]
    for name in required:
        if name not in columns:
            raise DatasetError(
                f"table must have the column {name!r}, got {', '.join(columns) or 'none'} in "
                f"{str(path)!r}{nearest(name, columns) if columns else ''}"
            )
    if not rows:
        raise DatasetError(f"table must have rows, got none in {str(path)!r}")
    return rows


def _raw_rows(path: Path) -> tuple[Sequence[str], list[dict[str, Any]]]:
    """Column names and rows as they are in the file."""
    if path.suffix.lower() != ".parquet":
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            return reader.fieldnames or (), list(reader)
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"Parquet tables need pyarrow, got {error}; install thinsection[export]"
        ) from error
    table = parquet.read_table(path)
    return table.column_names, table.to_pylist()


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
    train, val = (np.flatnonzero(np.array(splits) == name) for name in (TRAIN, VAL))
    if not len(train) or not len(val):
        found = f"{len(train)} and {len(val)} in {where}{remedy}"
        raise DatasetError(f"split must name train and val rows, got {found}")
    return train, val


def encode_labels(texts: Sequence[str], where: str) -> tuple[tuple[str, ...], Labels]:
    """(class names, labels): names sorted, as numbers where all are; labels are their ranks.

    Raises:
        DatasetError: a label is empty.
    """
    if "" in texts:
        row = texts.index("")
        raise DatasetError(f"label must not be empty, got '' in row {row} of {where}")
    distinct = sorted(set(texts))
    if all(t.removeprefix("-").isdigit() for t in distinct):
        distinct.sort(key=int)
    index = {name: i for i, name in enumerate(distinct)}
    return tuple(distinct), np.array([index[t] for t in texts], dtype=np.int64)


def unexpected(root: Path, kind: str, looked_for: Sequence[str]) -> DatasetError:
    """The error of a folder that is not what was expected: what is there, what was looked for."""
    there = "nothing: no such folder"
    if root.exists():
        names = sorted(p.name + ("/" if p.is_dir() else "") for p in root.iterdir())
        there = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
    return DatasetError(
        f"dataset must look like {kind}, got {there or 'an empty folder'} in {str(root)!r}; "
        f"looked for {', '.join(looked_for)}"
    )
