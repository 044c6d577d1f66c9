"""Audit of a user's own rows before training: leaks, copies, and sites that follow the labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.audit import Audit, audit_rows
from thinsection.evaluation.cases import Groups, listed_names
from thinsection.evaluation.leaks import NamedTiles, check_copies, contents_of
from thinsection.evaluation.metrics import Fold, IndexArray
from thinsection.evaluation.own_folds import FoldRows
from thinsection.evaluation.own_rows import Values, labelled_rows
from thinsection.evaluation.parts import FoldCases
from thinsection.evaluation.target import TaskName
from thinsection.types import Reals, counted

# embeddings of the tiles of each row (n_i, D), or one embedding for each row (N, D)
RowEmbeddings = Sequence[npt.ArrayLike] | npt.NDArray[np.floating]


def audit(
    labels: Values,
    *,
    embeddings: RowEmbeddings | None = None,
    patients: Values | None = None,
    sites: Values | None = None,
    cases: Values | None = None,
    time: Values | None = None,
    folds: Sequence[FoldRows | Fold] | None = None,
    task: TaskName = "auto",
) -> Audit:
    """Audits rows before training: what would make a score too good, and what cannot be known.

    The checks are those of `thinsection audit`: ids of one patient that are written in two ways,
    copies of a slide under another patient, a site that is associated with the label. With `folds`
    also patients and copies that training and test set share.

    Args:
        labels: class, number or event of each row, (N,); a row is a slide.
        embeddings: for each row its tile embeddings (n, D), or one array (N, D). Arrays that are
            read on access, such as `results.embedding_rows(slide_id)`, are read one at a time.
        patients: patient of each row. Without patients, the barcodes of TCGA, CPTAC or GTEx in
            `cases` name them.
        sites: hospital of each row.
        cases: id of each row, for the messages.
        time: of survival, the time of the event or of the end of follow-up.
        folds: result of `ts.folds`, or pairs of training and test rows as scikit-learn gives them.
        task: kind of target, as in `train`; 'auto' decides by the labels.

    Returns:
        `warnings`, `notes` and `unknown` as sentences, with the figures behind them; `print` lists
        them.

    Memory: N D floats, five times, some 64 MiB for pairs and sampled tiles, and the embeddings of
    two rows.

    Raises:
        InvalidInputError: another length, a missing value, embeddings of another shape.

    Examples:
        >>> grades = ["low", "high"] * 10
        >>> patients = [f"P{number}" for number in range(20)]
        >>> sites = ["north" if grade == "low" else "south" for grade in grades]
        >>> found = ts.audit(grades, patients=patients, sites=sites)
        >>> found.warnings[0].split(":")[0]
        'the site alone determines labels'
    """
    rows = labelled_rows(
        labels, cases=cases, patients=patients, sites=sites, time=time, task=task
    )
    num_rows = len(rows.cases)
    cohort = rows.cohort(range(num_rows))
    contents = None
    if embeddings is not None:
        if len(embeddings) != num_rows:
            raise InvalidInputError(
                f"embeddings must have one entry per row, got {len(embeddings)} for "
                f"{num_rows} labels"
            )
        contents = contents_of(_tiles_of_rows(embeddings, rows.cases), num_rows)
    leaks: list[str] = []
    if folds is not None:
        parts = [_fold_cases(fold, num_rows) for fold in folds]
        leaks += _shared_patients(parts, rows.groups)
        if contents is not None:
            leaks += check_copies(cohort, parts, contents, allowed=True)

    def read(row: int, tiles: IndexArray) -> Reals:
        assert embeddings is not None
        return _tiles(embeddings[row], rows.cases[row])[tiles]

    return audit_rows(cohort, contents, read=read, leaks=leaks)


def _tiles_of_rows(
    embeddings: RowEmbeddings, names: Sequence[str]
) -> Iterator[NamedTiles]:
    for row, name in enumerate(names):
        yield NamedTiles(name, name, _tiles(embeddings[row], name))


def _tiles(values: npt.ArrayLike, name: str) -> Reals:
    """Embeddings of one row as (n, D)."""
    stored: Any = values
    # rows that are read on access give an array when they are sliced
    tiles = np.asarray(stored[:] if hasattr(stored, "shape") else stored)
    if tiles.ndim == 1:
        tiles = tiles[None]
    if tiles.ndim != 2 or tiles.dtype.kind != "f" or not len(tiles):
        raise InvalidInputError(
            f"embeddings of a row must be floating-point of shape (n, D) or (D,), got "
            f"{tiles.dtype} {tiles.shape} for {name!r}"
        )
    if not np.isfinite(tiles).all():
        raise InvalidInputError(
            f"embeddings must be finite, got NaN or infinity for {name!r}"
        )
    return tiles


def _fold_cases(fold: FoldRows | Fold, num_rows: int) -> FoldCases:
    """A fold as row numbers. Raises InvalidInputError: a number is outside the rows."""
    if isinstance(fold, FoldRows):
        numbers = [fold.train, fold.validation, fold.test]
    else:
        train, test = fold
        numbers = [np.asarray(train), np.empty(0, dtype=np.int64), np.asarray(test)]
    for part in numbers:
        if len(part) and not 0 <= part.min() <= part.max() < num_rows:
            raise InvalidInputError(
                f"folds must have rows 0 to {num_rows - 1}, got {part.min()} to {part.max()}"
            )
    return FoldCases(
        train=tuple(numbers[0].tolist()),
        stop=tuple(numbers[1].tolist()),
        test=tuple(numbers[2].tolist()),
    )


def _shared_patients(parts: Sequence[FoldCases], groups: Groups) -> list[str]:
    """A warning on patients (or rows) that a training and a test set share."""
    shared: dict[str, None] = {}
    num_folds = 0
    for part in parts:
        in_training = groups.take([*part.train, *part.stop])
        names = in_training.shared(groups.take(part.test))[groups.unit]
        shared |= dict.fromkeys(names)
        num_folds += bool(names)
    if not shared:
        return []
    one = groups.unit.removesuffix("s")
    shown = listed_names([repr(name) for name in shared])
    return [
        f"training and test set share {counted(len(shared), one)} ({shown}) in "
        f"{counted(num_folds, 'fold')}: the score is too optimistic; `ts.folds` keeps patients "
        "whole"
    ]
