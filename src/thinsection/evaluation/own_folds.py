"""Folds of a user's own rows, drawn by the rule of `thinsection train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.evaluation.metrics import Fold, IndexArray
from thinsection.evaluation.own_rows import LabelledRows, Values, labelled_rows
from thinsection.evaluation.parts import FoldCases, FoldSettings, FoldUnit, make_parts
from thinsection.evaluation.target import TaskName
from thinsection.types import counted

_DEFAULT = FoldSettings()


@dataclass(frozen=True, eq=False, kw_only=True)
class FoldRows:
    """Rows of one fold, as sorted numbers."""

    train: IndexArray
    validation: IndexArray  # decides when training stops, and other choices
    test: IndexArray
    repeat: int = 0  # number of the draw, if folds are drawn several times

    def __repr__(self) -> str:
        sizes = f"{len(self.train)} train, {len(self.validation)} validation"
        return f"FoldRows({sizes}, {len(self.test)} test)"


@dataclass(frozen=True, eq=False, kw_only=True)
class Folds(Sequence[FoldRows]):
    """Folds of N rows: `len(folds)`, `folds[0].train`, `for fold in folds`.

    `pairs` gives rows for training and test alone, as scikit-learn's `cv` takes them.
    """

    folds: tuple[FoldRows, ...]
    num_rows: int
    words: str  # how the folds were drawn

    def __len__(self) -> int:
        return len(self.folds)

    @overload
    def __getitem__(self, index: int) -> FoldRows: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[FoldRows]: ...

    def __getitem__(self, index: int | slice) -> FoldRows | Sequence[FoldRows]:
        return self.folds[index]

    def __iter__(self) -> Iterator[FoldRows]:
        return iter(self.folds)

    def __repr__(self) -> str:
        return f"Folds({counted(self.num_rows, 'row')}: {self.words})"

    @property
    def pairs(self) -> list[Fold]:
        """Training and test rows of each fold; the validation rows are added to the training rows.

        `cross_val_score(model, x, y, cv=folds.pairs)` of scikit-learn takes them.
        """
        pairs: list[Fold] = []
        for fold in self.folds:
            train = np.sort(np.concatenate([fold.train, fold.validation]))
            pairs.append((train, fold.test))
        return pairs

    @property
    def test_fold(self) -> IndexArray:
        """Number of the fold that tests each row, int64 (N,); -1 for a row that none tests.

        Raises InvalidInputError: the folds were drawn several times.
        """
        repeats = {fold.repeat for fold in self.folds}
        if len(repeats) > 1:
            raise InvalidInputError(
                f"test_fold must be asked of one draw of folds, got {len(repeats)} draws; use "
                "the rows of each fold"
            )
        numbers = np.full(self.num_rows, -1, dtype=np.int64)
        for number, fold in enumerate(self.folds):
            numbers[fold.test] = number
        return numbers


def folds(
    labels: Values,
    *,
    patients: Values | None = None,
    sites: Values | None = None,
    cases: Values | None = None,
    time: Values | None = None,
    task: TaskName = "auto",
    folds: int = _DEFAULT.folds,
    inner_folds: int = _DEFAULT.inner,
    fold_unit: FoldUnit = _DEFAULT.unit,
    repeats: int = _DEFAULT.repeats,
    seed: int = _DEFAULT.seed,
) -> Folds:
    """Draws folds in which patients are whole and classes are balanced.

    The rule is that of `train`: the same rows in the same order, with the same seed, get the same
    folds. A table of `train` that has patient_id and no case_id counts the rows of a patient as one
    case; here `cases=patients` does that.

    Args:
        labels: class, number or event of each row, (N,): a list, an array or a pandas column.
        patients: patient of each row. A patient is in one set of a fold. Without patients, the
            barcodes of TCGA, CPTAC or GTEx in `cases` name them.
        sites: hospital of each row, for `fold_unit`.
        cases: id of each row. Rows with one id are one case and have one label.
        time: of survival, the time of the event or of the end of follow-up.
        task: kind of target, as in `train`; 'auto' decides by the labels.
        folds: number of folds.
        inner_folds: number of parts of the training rows, one of which is the validation set.
        fold_unit: 'patient'; 'site' keeps sites whole too; 'each-site' tests one site per fold.
        repeats: number of draws, each with another seed.
        seed: decides the draw.

    Returns:
        The rows of each fold: `fold.train`, `fold.validation` and `fold.test`.

    Memory: 24 bytes per row and fold.

    Raises:
        InvalidInputError: columns of different lengths, missing values, too few rows of a class.
        DatasetError: a case with two labels or two patients, a test set that cannot be scored.

    Examples:
        >>> patients = ["p1", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8"]
        >>> grades = ["low", "low", "high", "low", "high", "low", "high", "low", "high"]
        >>> folds = ts.folds(grades, patients=patients, folds=3)
        >>> [len(fold.test) for fold in folds]
        [3, 3, 3]
        >>> folds
        Folds(9 rows: 3 stratified folds of cases, patients whole, seed 0)
    """
    if folds < 2 or repeats < 1:
        raise InvalidInputError(
            f"folds must be >= 2 and repeats >= 1, got {folds} and {repeats}"
        )
    if fold_unit != "patient" and sites is None:
        raise InvalidInputError(
            f"sites must be given where fold_unit is {fold_unit!r}, got none; pass sites=..., one "
            "for each row"
        )
    rows = labelled_rows(
        labels, cases=cases, patients=patients, sites=sites, time=time, task=task
    )
    # numbers of the rows of each case, in the order of the first of them
    rows_by_case: dict[str, list[int]] = {}
    for row, case in enumerate(rows.cases):
        rows_by_case.setdefault(case, []).append(row)
    _check_cases(rows, rows_by_case)
    cohort = rows.cohort([case_rows[0] for case_rows in rows_by_case.values()])
    settings = FoldSettings(
        folds=folds, inner=inner_folds, seed=seed, unit=fold_unit, repeats=repeats
    )
    parts, lines = make_parts(cohort, settings)
    all_rows = [*rows_by_case.values()]
    return Folds(
        folds=tuple(_fold_rows(part, all_rows) for part in parts),
        num_rows=len(rows.cases),
        words="; ".join(lines),
    )


def _check_cases(rows: LabelledRows, rows_by_case: dict[str, list[int]]) -> None:
    """Refuses a case whose rows differ in the label, the patient or the site."""
    for case, of_case in rows_by_case.items():
        first = of_case[0]
        for row in of_case[1:]:
            same_label = np.array_equal(
                rows.values[row], rows.values[first], equal_nan=True
            )
            differing = {
                "label": not same_label,
                "patient": rows.groups.of_row[row] != rows.groups.of_row[first],
                "site": bool(rows.sites) and rows.sites[row] != rows.sites[first],
            }
            for word, differs in differing.items():
                if differs:
                    raise InvalidInputError(
                        f"rows of a case must have one {word}, got two for {case!r} in rows "
                        f"{first} and {row}; pass the patients as patients, and leave cases out"
                    )


def _fold_rows(part: FoldCases, rows_of_cases: Sequence[Sequence[int]]) -> FoldRows:
    """Rows of the cases of a fold."""

    def rows(cases: Sequence[int]) -> IndexArray:
        numbers = [row for case in cases for row in rows_of_cases[case]]
        return np.sort(np.array(numbers, dtype=np.int64))

    return FoldRows(
        train=rows(part.train),
        validation=rows(part.stop),
        test=rows(part.test),
        repeat=part.repeat,
    )
