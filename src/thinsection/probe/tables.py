"""Tables of labels: CSV and TSV with a header, split names, labels to integers."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from thinsection.config import nearest
from thinsection.errors import DatasetError
from thinsection.probe.examples import Labels

Row = Mapping[str, str]
TRAIN, VAL, TEST = "train", "val", "test"
_SPLITS = {
    **{"train": TRAIN, "training": TRAIN},
    **{"val": VAL, "valid": VAL, "validation": VAL, "dev": VAL},
    **{"test": TEST, "testing": TEST},
}


def read_table(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV (or TSV, by its suffix) as text, spaces stripped.

    Raises:
        DatasetError: missing, empty, or without a required column (names the nearest).
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter=delimiter)
            columns = [c.strip() for c in reader.fieldnames or ()]
            reader.fieldnames = columns
            rows = [{k: (v or "").strip() for k, v in row.items() if k} for row in reader]
    except (OSError, UnicodeDecodeError) as error:
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


def split_name(text: str, where: str) -> str:
    """'train', 'val' or 'test'.

    Raises:
        DatasetError: another word.
    """
    name = _SPLITS.get(text.strip().lower())
    if name is None:
        raise DatasetError(f"split must be train, val or test, got {text!r} in {where}")
    return name


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
