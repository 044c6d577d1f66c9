"""Tables of labels, splits and tiles as rows of text: CSV, TSV, Parquet, and nanopath's JSON."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.config import nearest
from thinsection.errors import DatasetError, importing, require, rewording
from thinsection.evaluation.metrics import Fold
from thinsection.files.json_text import read_json

TextRow = Mapping[str, str]
TRAIN, VAL, TEST = "train", "val", "test"
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".json")
_WORDS = {
    TRAIN: "train training",
    VAL: "val valid validation dev",
    TEST: "test testing",
}
SPLITS = {word: name for name, words in _WORDS.items() for word in words.split()}
_LISTED = dict.fromkeys(("case_slides", "slides", "slide_ids"), "slide_id")
_LISTED |= {"images": "path", "labels": "label", "events": "event", "days": "time"}
_LISTED["case_ids"] = "case_id"
check = partial(require, error=DatasetError)


def read_rows(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV (or TSV, Parquet or JSON, by its suffix) as text, spaces stripped."""
    with rewording(
        "table must be readable text", path, OSError, ValueError, error=DatasetError
    ):
        names, raw = _raw_rows(path)  # pyarrow's errors and UnicodeDecodeError are such
    require_columns([name.strip() for name in names], required, path)
    out = [
        {k.strip(): "" if v is None else str(v).strip() for k, v in r.items() if k}
        for r in raw
    ]
    check(out, "table must have rows", f"none in {str(path)!r}")
    return out


def require_columns(
    columns: Iterable[str], required: Sequence[str], path: Path
) -> None:
    """Raises DatasetError: a table lacks a column; it says what is there."""
    there = [*columns]
    for name in required:
        near = nearest(name, there) if there else ""
        got = f"{', '.join(there) or 'none'} in {str(path)!r}{near}"
        check(name in there, f"table must have the column {name!r}", got)


def _raw_rows(path: Path) -> tuple[Sequence[str], list[dict[str, Any]]]:
    """Column names and rows as they are in the file."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with importing("Parquet tables need pyarrow", "export"):
            from pyarrow import parquet
        table = parquet.read_table(path)
        return table.column_names, table.to_pylist()
    if suffix == ".json":
        rows = _listed(read_json(path), path)
        return [*dict.fromkeys(name for row in rows for name in row)], rows
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ",")
        return reader.fieldnames or (), list(reader)


def _listed(task: Any, path: Path) -> list[dict[str, Any]]:
    """Rows of a task as nanopath and THUNDER write it: lists by split, or cases with their folds.

    Lists of the test split are left out.
    """
    rows: list[dict[str, Any]] = []
    whole = isinstance(task, dict) and "case_ids" in task
    shape = whole or (isinstance(task, dict) and {TRAIN, VAL} <= task.keys())
    check(
        shape,
        "list must have train and val, or case_ids",
        f"something else in {str(path)!r}",
    )
    for split, part in (
        {"": task}.items() if whole else ((s, task[s]) for s in (TRAIN, VAL))
    ):
        columns = {
            _LISTED[name]: values for name, values in part.items() if name in _LISTED
        }
        sizes = {len(values) for values in columns.values()}
        check(
            len(sizes) == 1,
            "lists must be equally long",
            f"{sorted(sizes)} in {str(path)!r}",
        )
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True)) | (
                {"split": split} if split else {}
            )
            if "path" in row:  # of a file of embeddings in the list's order
                row["row"] = len(rows)
            for i, fold in enumerate(part.get("folds", ())):
                row[f"fold_{i}"] = TRAIN if row["case_id"] in fold[TRAIN] else VAL
            rows.append(row)
    return rows


def split_name(text: str, where: str) -> str:
    """'train', 'val' or 'test' of what a file calls it; raises DatasetError for another word."""
    word = text.strip().lower()
    check(word in SPLITS, "split must be train, val or test", f"{text!r} in {where}")
    return SPLITS[word]


def open_rows(
    rows: Sequence[TextRow], where: str, held_out: str = VAL
) -> list[TextRow]:
    """The rows with their split in our words, without those of test: they stay shut.

    Where `held_out` is test, its rows are val and all others train.
    """
    if not rows or "split" not in rows[0]:
        return [*rows]
    named = [{**r, "split": split_name(r["split"], where)} for r in rows]
    if held_out == VAL:
        return [r for r in named if r["split"] != TEST]
    return [{**r, "split": VAL if r["split"] == TEST else TRAIN} for r in named]


def split_fold(splits: Sequence[str], where: str, remedy: str = "") -> Fold:
    """Rows of train and of val; raises DatasetError where one of them has none."""
    train, val = (np.flatnonzero(np.array(splits) == name) for name in (TRAIN, VAL))
    found = f"{len(train)} and {len(val)} in {where}{remedy}"
    check(len(train) and len(val), "split must name train and val rows", found)
    return train, val


def unexpected(root: Path, kind: str, looked_for: Sequence[str]) -> DatasetError:
    """The error of a folder that is not what was expected: what is there, what was looked for."""
    there = "nothing: no such folder"
    if root.exists():
        names = sorted(p.name + ("/" if p.is_dir() else "") for p in root.iterdir())
        there = ", ".join(names[:8]) + (
            f", ... ({len(names)})" if len(names) > 8 else ""
        )
    found = f"{there or 'an empty folder'} in {str(root)!r}; looked for {', '.join(looked_for)}"
    return DatasetError(f"dataset must look like {kind}, got {found}")
