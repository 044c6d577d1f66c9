"""Tables of cases before their embeddings are read: one entry per case, its slides, its folds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinsection.errors import DatasetError
from thinsection.probe.embedding_files import slide_files
from thinsection.probe.splits import Fold
from thinsection.probe.tables import Row


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
    rows: tuple[Row, ...]
    folds: tuple[Fold, ...] | None
    columns: tuple[str, ...]
    label_names: Mapping[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def files(self, folder: Path) -> list[list[Path]]:
        """Embedding files per case.

        Raises:
            DatasetError: a slide has none.
        """
        by_slide = slide_files(folder, [s for slides in self.slides for s in slides])
        return [[by_slide[s] for s in slides] for slides in self.slides]


def group_cases(
    name: str,
    rows: Sequence[Row],
    key: str,
    columns: tuple[str, ...],
    *,
    facts: dict[str, Any],
    label_names: Mapping[str, str] | None = None,
) -> CaseTable:
    """One entry per case; all rows of a case must agree on its label and folds."""
    first: dict[str, Row] = {}
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
