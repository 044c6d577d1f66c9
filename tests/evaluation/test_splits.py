"""Folds cover every row once, keep what belongs together whole, and follow their seed."""

from collections.abc import Sequence

import numpy as np
import pytest
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.metrics import Fold
from thinsection.evaluation.splits import (
    draw_rows,
    drawn_folds,
    grouped_folds,
    shuffled_folds,
    stratified_folds,
)

LABELS = np.random.default_rng(0).integers(0, 4, 200)
PATIENTS = [f"p{i % 17}" for i in range(200)]


def check_cover(folds: Sequence[Fold], num_rows: int) -> None:
    """Each row is validated in one fold, and trains in all others."""
    validated = np.concatenate([validation for _, validation in folds])
    assert sorted(validated.tolist()) == list(range(num_rows))
    for train, validation in folds:
        assert sorted([*train, *validation]) == list(range(num_rows))


def check_same(folds: Sequence[Fold], others: Sequence[Fold]) -> None:
    for (train, validation), (train2, validation2) in zip(folds, others, strict=True):
        np.testing.assert_array_equal(train, train2)
        np.testing.assert_array_equal(validation, validation2)


# stratified


def test_three_stratified_folds_share_every_class_evenly() -> None:
    folds = stratified_folds(LABELS)
    assert len(folds) == 3
    check_cover(folds, 200)
    for _, validation in folds:
        counts = np.bincount(LABELS[validation], minlength=4)
        assert (abs(counts - np.bincount(LABELS) / 3) <= 1).all()


def test_stratified_folds_are_those_of_the_suites_settings_of_scikit_learn() -> None:
    judge = StratifiedKFold(5, shuffle=True, random_state=7)
    expected = list(judge.split(np.zeros(200), LABELS))
    check_same(stratified_folds(LABELS, folds=5, seed=7), expected)


def test_a_class_of_as_many_rows_as_folds_is_enough() -> None:
    folds = stratified_folds([0, 0, 0, 1, 1, 1])
    assert all(len(validation) == 2 for _, validation in folds)


def test_a_class_smaller_than_the_folds_is_refused() -> None:
    with pytest.raises(
        InvalidInputError,
        match=r"must have >= 3 rows for 3 folds, got 2 of class '1'$",
    ):
        stratified_folds([0, 0, 0, 1, 1])


def test_a_class_smaller_than_the_folds_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidInputError, match="got 2 of class 'tumour'"):
        stratified_folds([0, 0, 0, 1, 1], class_names=("normal", "tumour"))


# grouped


def test_grouped_folds_keep_a_patient_whole() -> None:
    folds = grouped_folds(LABELS, PATIENTS)
    assert len(folds) == 3
    check_cover(folds, 200)
    for train, validation in folds:
        assert not {PATIENTS[i] for i in train} & {PATIENTS[i] for i in validation}


def test_grouped_folds_are_those_of_the_suites_settings_of_scikit_learn() -> None:
    judge = StratifiedGroupKFold(4, shuffle=True, random_state=7)
    expected = list(judge.split(np.zeros(200), LABELS, groups=np.array(PATIENTS)))
    check_same(grouped_folds(LABELS, PATIENTS, folds=4, seed=7), expected)


def test_as_many_groups_as_folds_are_enough_and_one_less_is_refused() -> None:
    labels = [0, 1] * 3
    assert len(grouped_folds(labels, ["a", "a", "b", "b", "c", "c"])) == 3
    with pytest.raises(
        InvalidInputError, match="groups must be at least 3 for 3 folds, got 2"
    ):
        grouped_folds(labels, ["a", "a", "b", "b", "b", "b"])


def test_groups_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="one entry per row, got 5 for 6 rows"):
        grouped_folds([0, 1] * 3, ["a", "b", "c", "d", "e"])


# over patients where there are enough


def test_folds_are_drawn_over_patients_where_there_are_as_many_as_folds() -> None:
    groups = Groups("patients", tuple(PATIENTS))
    folds, words = drawn_folds(LABELS, groups, folds=17, seed=2)
    assert words == "over patients"
    check_same(folds, grouped_folds(LABELS, PATIENTS, folds=17, seed=2))


def test_folds_are_drawn_over_rows_where_there_are_fewer_patients_than_folds() -> None:
    groups = Groups("patients", tuple(PATIENTS))
    folds, words = drawn_folds(LABELS, groups, folds=18, seed=2)
    assert words == ""
    check_same(folds, stratified_folds(LABELS, folds=18, seed=2))


def test_folds_are_drawn_over_rows_where_nobody_knows_the_patients() -> None:
    folds, words = drawn_folds(LABELS, None, folds=3, seed=2)
    assert words == ""
    check_same(folds, stratified_folds(LABELS, folds=3, seed=2))


# shuffled


def test_shuffled_folds_are_the_suites_own() -> None:
    order = np.arange(11)
    np.random.default_rng(1337).shuffle(order)
    folds = shuffled_folds(11)
    check_cover(folds, 11)
    parts = np.array_split(order, 3)
    for (_, validation), part in zip(folds, parts, strict=True):
        np.testing.assert_array_equal(validation, part)


def test_as_many_rows_as_folds_are_enough_and_one_less_is_refused() -> None:
    check_cover(shuffled_folds(4, folds=4), 4)
    with pytest.raises(
        InvalidInputError, match="number of rows must be >= 4 for 4 folds, got 3"
    ):
        shuffled_folds(3, folds=4)


# rows of each class


def test_at_most_so_many_rows_of_each_class_are_drawn_each_once() -> None:
    labels = np.repeat([2, 0, 1, 0], [30, 10, 7, 15])
    rows = draw_rows(labels, 20, seed=0)
    assert sorted(set(rows.tolist())) == rows.tolist()
    assert np.bincount(labels[rows]).tolist() == [20, 7, 20]


def test_a_class_that_is_taken_whole_does_not_change_the_draw_of_another() -> None:
    alone = draw_rows(np.ones(50, int), 4, seed=5)
    beside = draw_rows(np.repeat([0, 1], [4, 50]), 4, seed=5)
    assert beside[:4].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(beside[4:] - 4, alone)
