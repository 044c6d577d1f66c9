"""Patho-Bench tasks: a folder with `k=all.tsv` and `config.yaml`.

The table has case_id, slide_id, fold_0 ... and the label columns; the configuration task_col,
sample_col, label_dict; `<task>_event` and `<task>_days` for survival. A sample whose rows are
'test' in every fold is a sealed official test: it is dropped.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.errors import DatasetError, MissingDependencyError
from thinsection.probe.case_tables import CaseTable, group_cases
from thinsection.probe.protocol import Protocol
from thinsection.probe.splits import Fold
from thinsection.probe.tables import TRAIN, Row, read_table, split_name, unexpected

PATHOBENCH_TABLE, PATHOBENCH_CONFIG = "k=all.tsv", "config.yaml"


def load_pathobench(root: Path, protocol: Protocol, *, survival: bool) -> CaseTable:
    """The cases of a task with its folds, or the training cases of its first fold alone.

    Args:
        root: the task's folder.
        protocol: `file_folds` decides which of the two.
        survival: True reads the event and time columns instead of the label's.

    Raises:
        DatasetError: a file, column or configuration key is missing, or rows of a case differ.
        MissingDependencyError: PyYAML is not installed.
    """
    table, config_path = root / PATHOBENCH_TABLE, root / PATHOBENCH_CONFIG
    if not (table.is_file() and config_path.is_file()):
        raise unexpected(root, "a Patho-Bench task", [PATHOBENCH_TABLE, PATHOBENCH_CONFIG])
    config = _read_yaml(config_path)
    task = config.get("task_col")
    if not isinstance(task, str):
        raise DatasetError(
            f"config must have a text task_col, got {task!r} in {str(config_path)!r}"
        )
    columns = (f"{task}_event", f"{task}_days") if survival else (task,)
    key = str(config.get("sample_col") or "case_id")
    rows = read_table(table, (key, "slide_id", *columns))
    fold_columns = [c for c in rows[0] if c.startswith("fold_")]
    if not fold_columns:
        raise DatasetError(f"table must have fold_* columns, got {list(rows[0])} in {str(table)!r}")
    used = fold_columns if protocol.file_folds else fold_columns[:1]
    # a sample that trains in no fold is a sealed test: it is never looked at
    kept = [r for r in rows if any(split_name(r[c], str(table)) == TRAIN for c in used if r[c])]
    label_dict = config.get("label_dict") or {}
    rotating = protocol.file_folds and len(fold_columns) > 1
    facts = {
        "task": task,
        "split_rule": (
            f"the file's {len(fold_columns)} folds"
            if rotating
            else f"training rows of {fold_columns[0]}, then the protocol's folds"
        ),
        "sealed_rows_dropped": len(rows) - len(kept),
    }
    grouped = group_cases(
        f"{root.parent.name}/{root.name}",
        kept,
        key,
        columns,
        facts=facts,
        label_names={} if survival else {str(k): str(v) for k, v in label_dict.items()},
    )
    if not rotating:
        return grouped
    folds = tuple(_file_fold(grouped.rows, column, table) for column in fold_columns)
    return dataclasses.replace(grouped, folds=folds)


def _file_fold(rows: Sequence[Row], column: str, table: Path) -> Fold:
    """The fold's training rows, and its held-out rows (which train in other folds)."""
    training = np.array([split_name(r[column], str(table)) == TRAIN for r in rows])
    if training.all() or not training.any():
        raise DatasetError(
            f"{column} must hold train and held-out rows, got {training.sum()} train of "
            f"{len(rows)} in {str(table)!r}"
        )
    return np.flatnonzero(training), np.flatnonzero(~training)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError(
            f"Patho-Bench tasks need PyYAML, got {error}; install thinsection[probe]"
        ) from error
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DatasetError(f"config must be YAML, got {str(path)!r}: {error}") from error
    if not isinstance(document, dict):
        raise DatasetError(f"config must be a mapping, got {document!r} in {str(path)!r}")
    return document
