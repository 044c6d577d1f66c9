"""Tables of cases: which slides, labels or follow-ups, folds; then the vectors of their slides.

A Patho-Bench task is a folder with `k=all.tsv` (case_id, slide_id, fold_0 ..., the label columns)
and `config.yaml` (task_col, sample_col, label_dict; `<task>_event` and `<task>_days` for survival).
A sample whose rows are 'test' in every fold is a sealed official test: it is dropped.

Any other table: slide_id, optional case_id, and `label`, or `event` and `time`; optional `split`,
whose test rows are dropped (train and val are pooled, then folded).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, InvalidInputError, MissingDependencyError
from thinsection.probe.data.files import read_embeddings, slide_files
from thinsection.probe.data.sets import CaseSet, Embeddings, SurvivalSet
from thinsection.probe.data.tables import (
    TEST,
    TRAIN,
    TextRow,
    encode_labels,
    read_rows,
    split_name,
    unexpected,
)
from thinsection.probe.protocol import Protocol
from thinsection.probe.statistics import Fold

PATHOBENCH_TABLE, PATHOBENCH_CONFIG = "k=all.tsv", "config.yaml"

ReadEmbeddings = Callable[[Path], Embeddings]  # a file to (N, D)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable:
    """Cases before their embeddings are read.

    Attributes:
        name: of the task.
        ids: case ids in order of appearance.
        slides: slide ids of each case.
        rows: the first table row of each case.
        folds: of the file, or None.
        columns: names of the label column, or of the event and time columns.
        label_names: what the table's label values stand for, where the task says.
        facts: of the split.
    """

    name: str
    ids: tuple[str, ...]
    slides: tuple[tuple[str, ...], ...]
    rows: tuple[TextRow, ...]
    folds: tuple[Fold, ...] | None
    columns: tuple[str, ...]
    label_names: Mapping[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def files(self, folder: Path) -> tuple[tuple[Path, ...], ...]:
        """Embedding files per case.

        Raises:
            DatasetError: a slide has none.
        """
        by_slide = slide_files(folder, [s for slides in self.slides for s in slides])
        return tuple(tuple(by_slide[s] for s in slides) for slides in self.slides)


def group_cases(
    name: str,
    rows: Sequence[TextRow],
    key: str,
    columns: tuple[str, ...],
    *,
    facts: dict[str, Any],
    label_names: Mapping[str, str] | None = None,
) -> CaseTable:
    """One entry per case; all rows of a case must agree on its label and folds."""
    first: dict[str, TextRow] = {}
    slides: dict[str, list[str]] = {}
    agree = (*columns, *(c for c in (rows[0] if rows else {}) if c.startswith("fold_")))
    for row in rows:
        case = row[key]
        known = first.setdefault(case, row)
        slides.setdefault(case, []).extend(_slide_ids(row["slide_id"]))
        for column in agree:
            if row[column] != known[column]:
                raise DatasetError(
                    f"{column} must be the same in all rows of a case, got {known[column]!r} and "
                    f"{row[column]!r} for {case!r} in {name!r}"
                )
    if not first:
        raise DatasetError(f"table must leave cases to train on, got none in {name!r}")
    return CaseTable(
        name=name,
        ids=tuple(first),
        slides=tuple(tuple(s) for s in slides.values()),
        rows=tuple(first.values()),
        folds=None,
        columns=columns,
        label_names=label_names or {},
        facts=facts,
    )


def _slide_ids(text: str) -> list[str]:
    """One id, or a list written as "['a', 'b']" (Patho-Bench writes both)."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]


def load_case_table(path: Path, protocol: Protocol, *, survival: bool) -> CaseTable:
    """A Patho-Bench task folder, or a table.

    Raises:
        DatasetError: neither, or a column is missing.
    """
    if path.is_dir():
        return load_pathobench(path, protocol, survival=survival)
    wanted = ("event", "time") if survival else ("label",)
    rows = read_rows(path, ("slide_id", *wanted))
    if "split" in rows[0]:
        rows = [r for r in rows if split_name(r["split"], str(path)) != TEST]
    key = "case_id" if "case_id" in rows[0] else "slide_id"
    facts = {"table": path.name, "split_rule": "the protocol's folds"}
    return group_cases(path.stem, rows, key, wanted, facts=facts)


def labelled_cases(table: CaseTable, folder: Path) -> CaseSet:
    """The cases with the mean vectors of their slides.

    Memory: one slide's embeddings + 4 n D.
    """
    texts = [_label_text(r[table.columns[0]], table.label_names) for r in table.rows]
    if table.label_names:
        names = tuple(table.label_names.values())
        unknown = sorted(set(texts) - set(names))
        if unknown:
            raise DatasetError(
                f"label must be one of {', '.join(names)}, got {unknown[0]!r} in {table.name!r}"
            )
        labels = np.array([names.index(t) for t in texts], dtype=np.int64)
    else:
        names, labels = encode_labels(texts, table.name)
    return CaseSet(class_names=names, labels=labels, **_common(table, folder))


def survival_cases(table: CaseTable, folder: Path) -> SurvivalSet:
    """The cases with their follow-up and the mean vectors of their slides.

    Memory: one slide's embeddings + 4 n D.
    """
    event_column, time_column = table.columns
    try:
        event = np.array([_flag(r[event_column]) for r in table.rows])
        time = np.array([float(r[time_column]) for r in table.rows])
    except ValueError as error:
        raise DatasetError(
            f"{event_column} must be 0 or 1 and {time_column} a number, got {error} in "
            f"{table.name!r}"
        ) from error
    return SurvivalSet(event=event, time=time, **_common(table, folder))


def _common(table: CaseTable, folder: Path) -> dict[str, Any]:
    """What labelled and survival cases share."""
    files = table.files(folder)
    return {
        "name": table.name,
        "ids": table.ids,
        "vectors": mean_vectors(files, read_embeddings),
        "files": files,
        "folds": table.folds,
        "facts": table.facts,
    }


def _label_text(value: str, names: Mapping[str, str]) -> str:
    """What a label value stands for; pandas writes whole numbers of a column with gaps as '1.0'."""
    return names.get(value) or names.get(value.removesuffix(".0"), value)


def _flag(text: str) -> bool:
    words = {"1": True, "0": False, "true": True, "false": False, "1.0": True, "0.0": False}
    if text.lower() not in words:
        raise ValueError(repr(text))
    return words[text.lower()]


def mean_vectors(files_of_case: Sequence[Sequence[Path]], read: ReadEmbeddings) -> Embeddings:
    """Mean of tile embeddings per slide, then mean of slides per case, float32 (n, D).

    A file with one row (a slide embedding) is its own mean.

    Memory: one slide's embeddings + 4 n D.

    Raises:
        InvalidInputError: a case without slides, or slides of different widths.
    """
    vectors = []
    for files in files_of_case:
        if not files:
            raise InvalidInputError("each case must have a slide, got a case without any")
        vectors.append(np.mean([_slide_mean(path, read) for path in files], axis=0))
        if len(vectors[-1]) != len(vectors[0]):
            raise InvalidInputError(
                f"embeddings must have the same D, got {len(vectors[-1])} after "
                f"{len(vectors[0])} in {str(files[0])!r}; were two encoders mixed?"
            )
    return np.stack(vectors).astype(np.float32)


def _slide_mean(path: Path, read: ReadEmbeddings) -> npt.NDArray[np.float64]:
    tiles = read(path)
    if not len(tiles):
        raise InvalidInputError(f"a slide must have tile embeddings, got none in {str(path)!r}")
    mean: npt.NDArray[np.float64] = tiles.mean(axis=0, dtype=np.float64)
    return mean


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
    rows = read_rows(table, (key, "slide_id", *columns))
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


def _file_fold(rows: Sequence[TextRow], column: str, table: Path) -> Fold:
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
