"""Folds: patients and sites whole, split files checked, every fold can be scored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from thinsection.errors import ConfigError, DatasetError, InvalidInputError
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.parts import (
    FoldSettings,
    make_parts,
    read_splits,
    why_unscorable,
)
from thinsection.evaluation.target import Target

CLASSES = Target(kind="binary", columns=("label",), names=("a", "b"))


def cohort_of(
    values: np.ndarray,
    *,
    target: Target = CLASSES,
    patients: list[str] | None = None,
    sites: list[str] | None = None,
) -> Cohort:
    names = tuple(f"c{i}" for i in range(len(values)))
    rows = np.asarray(values, dtype=float).reshape(len(names), -1)
    return Cohort(
        target=target,
        place="here",
        cases=names,
        slides=tuple((f"slide-{name}",) for name in names),
        files=tuple((f"{name}.h5",) for name in names),
        values=tuple(tuple(row) for row in rows.tolist()),
        patients=tuple(patients or names),
        unit="patients",
        sites=tuple(sites or ()),
    )


def sited(n: int = 120, sites: int = 12, seed: int = 0) -> Cohort:
    rng = np.random.default_rng(seed)
    of_case = rng.integers(0, sites, n)
    share = rng.uniform(0.2, 0.8, sites)
    labels = rng.random(n) < share[of_case]
    return cohort_of(labels, sites=[f"site{s}" for s in of_case])


def test_site_preserved_folds_are_those_of_scikit_learn_and_keep_sites_whole() -> None:
    cohort = sited()
    parts, lines = make_parts(cohort, FoldSettings(folds=4, seed=7, unit="site"))
    judge = StratifiedGroupKFold(n_splits=4, shuffle=True, random_state=7)
    splits = judge.split(np.zeros(120), cohort.strata, groups=np.array(cohort.sites))
    for part, (_, test) in zip(parts, splits, strict=True):
        assert part.test == tuple(test.tolist())
        inside = {cohort.sites[i] for i in part.test}
        assert not inside & {cohort.sites[i] for i in (*part.train, *part.stop)}
    assert lines == ["4 stratified folds of cases, sites whole, seed 7"]


def test_each_site_is_tested_by_the_others_and_one_of_one_class_only_trains() -> None:
    labels = np.array([0, 1] * 20 + [1] * 6)
    sites = [f"s{i // 10}" for i in range(40)] + ["pure"] * 6
    parts, lines = make_parts(
        cohort_of(labels, sites=sites), FoldSettings(unit="each-site")
    )
    assert [{sites[i] for i in part.test} for part in parts] == [
        {f"s{k}"} for k in range(4)
    ]
    assert all(set(range(40, 46)) <= {*part.train, *part.stop} for part in parts)
    assert lines == [
        "leave-one-site-out: 4 sites, and a model of the other sites predicts each",
        "1 site with 6 cases only in training sets, because no score can be computed there "
        "(pure: only class 'b')",
    ]


def test_sites_that_cannot_make_folds_are_refused_before_training() -> None:
    labels = np.arange(12) % 2
    with pytest.raises(DatasetError, match=r"got none; pass site=COLUMN of the labels"):
        make_parts(cohort_of(labels), FoldSettings(unit="site"))
    two = cohort_of(labels, sites=["x", "y"] * 6)
    with pytest.raises(
        InvalidInputError, match=r"sites must be at least 5 .* got 2; pass folds=2"
    ):
        make_parts(two, FoldSettings(unit="site"))
    with pytest.raises(DatasetError, match="must allow a score, got only class"):
        make_parts(two, FoldSettings(unit="site", folds=2))
    with pytest.raises(
        DatasetError,
        match="leave-one-site-out must have two sites, one of which can be scored",
    ):
        make_parts(two, FoldSettings(unit="each-site"))
    moved = cohort_of(labels, patients=["p"] * 12, sites=["x", "y"] * 6)
    with pytest.raises(
        DatasetError, match="a patient must belong to one site, got 'x' and 'y' for 'p'"
    ):
        make_parts(moved, FoldSettings(unit="each-site"))


def test_repeats_draw_other_folds_and_the_first_are_those_without_repeats() -> None:
    cohort = cohort_of(np.arange(40) % 2)
    once, _ = make_parts(cohort, FoldSettings(folds=4))
    parts, (line,) = make_parts(cohort, FoldSettings(folds=4, repeats=3))
    assert parts[:4] == once
    assert [part.repeat for part in parts] == [0] * 4 + [1] * 4 + [2] * 4
    for repeat in range(3):
        tested = [i for part in parts if part.repeat == repeat for i in part.test]
        assert sorted(tested) == list(range(40))
    assert len({part.test for part in parts}) == 12
    assert line == "4 stratified folds of cases, drawn 3 times, seed 0"
    with pytest.raises(
        ConfigError, match="splits must not be combined with fold_unit or repeats"
    ):
        make_parts(cohort, FoldSettings(repeats=2), Path("split.csv"))


def write_split(path: Path, rows: list[str], header: str = "slide_id,split") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_an_id_on_two_sides_is_refused(tmp_path: Path) -> None:
    cohort = cohort_of(np.arange(8) % 2)
    rows = [f"c{i},{'train' if i < 4 else 'test'}" for i in range(8)]
    table = write_split(tmp_path / "s.csv", [*rows, "c1.svs ,test"], "case_id,split")
    with pytest.raises(
        DatasetError,
        match=r"one side of a split, got 'c1.svs' in train and test in fold 0 of '.*s\.csv'",
    ):
        make_parts(cohort, FoldSettings(), table)
    sides = {"train": ["c0", "c1", "c2", "c3"], "test": ["c3", "c4", "c5"]}
    (tmp_path / "s.json").write_text(json.dumps(sides))
    with pytest.raises(DatasetError, match="got 'c3' in train and test in fold 0"):
        make_parts(cohort, FoldSettings(), tmp_path / "s.json")


def test_slides_of_one_case_on_two_sides_are_refused_by_the_file_alone(
    tmp_path: Path,
) -> None:
    cohort = cohort_of(np.arange(8) % 2)
    rows = [
        f"slide-c{i},p{i // 2},{'train' if i % 4 < 2 else 'test'}" for i in range(8)
    ]
    header = "slide_id,case_id,split"
    table = write_split(tmp_path / "s.csv", rows, header)
    parts, _ = make_parts(cohort, FoldSettings(), table)
    assert parts[0].test == (2, 3, 6, 7)
    rows[1] = "slide-c1,p0,test"
    write_split(table, rows, header)
    with pytest.raises(DatasetError, match="got 'p0' in train and test"):
        make_parts(cohort, FoldSettings(), table)


def test_names_that_match_nothing_and_cases_left_out_are_counted(
    tmp_path: Path,
) -> None:
    cohort = cohort_of(np.arange(12) % 2)
    rows = [f"slide-c{i}.svs,{'train' if i < 6 else 'test'}" for i in range(10)]
    table = write_split(
        tmp_path / "s.csv", [*rows, "x1,train", "x2,test", "x3,test", "x4,test"]
    )
    (part,), lines = make_parts(cohort, FoldSettings(), table)
    assert part.test == (6, 7, 8, 9)
    assert lines == [
        "1 fold of s.csv",
        "s.csv has 4 names without a case: x1, x2, x3, ...",
        "s.csv has no fold for 2 cases: c10, c11",
    ]


def test_a_patient_on_two_sides_is_refused_unless_that_is_allowed(
    tmp_path: Path,
) -> None:
    cohort = cohort_of(np.arange(8) % 2, patients=[f"p{i % 4}" for i in range(8)])
    rows = [f"c{i},{'train' if i < 4 else 'test'}" for i in range(8)]
    table = write_split(tmp_path / "s.csv", rows, "case_id,split")
    with pytest.raises(
        DatasetError,
        match=r"a patient must be on one side .* got 'p0' .* or pass allow_leakage=True",
    ):
        make_parts(cohort, FoldSettings(), table)
    parts, _ = make_parts(cohort, FoldSettings(), table, allow_leakage=True)
    assert parts[0].test == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        ("binary", [[0], [1]] * 4 + [[0]] * 4, "only class 'a' in fold 0"),
        ("regression", [[i] for i in range(8)] + [[3]] * 4, "one value in fold 0"),
        (
            "multilabel",
            [[0, 1], [1, 0]] * 4 + [[1, 0], [0, 0]] * 2,
            "one value of b in fold 0",
        ),
        ("cox", [[1, 5], [0, 9]] * 4 + [[0, 3], [1, 9]] * 2, "no event before the end"),
    ],
)
def test_test_cases_without_a_score_are_refused_before_training(
    kind: str, values: list[list[float]], sentence: str, tmp_path: Path
) -> None:
    target = replace(CLASSES, kind=kind)  # type: ignore[arg-type]
    cohort = cohort_of(np.array(values), target=target)
    rows = [f"c{i},{'train' if i < 8 else 'test'}" for i in range(12)]
    table = write_split(tmp_path / "s.csv", rows, "case_id,split")
    with pytest.raises(DatasetError, match=f"must allow a score, got .*{sentence}"):
        make_parts(cohort, FoldSettings(inner=2), table)


def test_a_class_that_no_training_case_has_is_refused(tmp_path: Path) -> None:
    target = Target(kind="multiclass", columns=("label",), names=("a", "b", "c"))
    cohort = cohort_of(np.array([0, 1] * 4 + [2, 0, 1, 2]), target=target)
    rows = [f"c{i},{'train' if i < 8 else 'test'}" for i in range(12)]
    table = write_split(tmp_path / "s.csv", rows, "case_id,split")
    with pytest.raises(
        DatasetError, match="must have every class, got none of c in fold 0"
    ):
        make_parts(cohort, FoldSettings(), table)


def test_a_case_whose_slide_and_patient_are_on_two_sides_is_refused(
    tmp_path: Path,
) -> None:
    cohort = cohort_of(np.arange(8) % 2)
    rows = [f"c{i},{'train' if i < 4 else 'test'}" for i in range(8)]
    table = write_split(tmp_path / "s.csv", [*rows, "slide-c1,test"], "case_id,split")
    with pytest.raises(
        DatasetError, match=r"a case must be .* got 'c1' in \['test', 'train'\]"
    ):
        make_parts(cohort, FoldSettings(), table)


def test_a_name_with_one_id_that_is_known_matches(tmp_path: Path) -> None:
    cohort = cohort_of(np.arange(8) % 2)
    rows = [f"c{i},x{i},{'train' if i < 4 else 'test'}" for i in range(8)]
    table = write_split(tmp_path / "s.csv", rows, "case_id,slide_id,split")
    (part,), lines = make_parts(cohort, FoldSettings(), table)
    assert part.test == (4, 5, 6, 7)
    assert lines == ["1 fold of s.csv"]


def test_cases_of_no_side_neither_train_nor_test(tmp_path: Path) -> None:
    cohort = cohort_of(np.arange(12) % 2)
    rows = [f"c{i},{'test' if i < 4 else 'train'}" for i in range(10)]
    table = write_split(tmp_path / "s.csv", rows, "case_id,split")
    (part,), lines = make_parts(cohort, FoldSettings(inner=3), table)
    assert sorted((*part.train, *part.stop)) == [4, 5, 6, 7, 8, 9]
    assert lines[1:] == ["s.csv has no fold for 2 cases: c10, c11"]


@pytest.mark.parametrize(
    ("sides", "counts"), [("train", "8 and 0"), ("val", "0 and 8")]
)
def test_a_split_of_one_side_is_refused(
    tmp_path: Path, sides: str, counts: str
) -> None:
    cohort = cohort_of(np.arange(8) % 2)
    rows = [f"c{i},{sides}" for i in range(8)]
    table = write_split(tmp_path / "s.csv", rows, "case_id,split")
    with pytest.raises(
        DatasetError, match=f"in training and test set, got {counts} of 8"
    ):
        make_parts(cohort, FoldSettings(), table)


def test_folds_of_clam_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for fold in reversed(range(8)):
        lines = ["train,val,test", f"a{fold},b{fold},c{fold}", f"d{fold},,"]
        (tmp_path / f"splits_{fold}.csv").write_text("\n".join(lines) + "\n")
    assert list(read_splits(tmp_path)) == [
        [
            ((f"a{fold}",), "train"),
            ((f"b{fold}",), "val"),
            ((f"c{fold}",), "test"),
            ((f"d{fold}",), "train"),
        ]
        for fold in range(8)
    ]


def test_a_folder_without_a_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "splits_0_bool.csv").write_text("train,val,test\n")
    with pytest.raises(DatasetError, match=r"k=all\.tsv or splits_0\.csv, got neither"):
        list(read_splits(tmp_path))


def test_a_table_of_one_row_has_a_fold_for_each_column_with_a_cell(
    tmp_path: Path,
) -> None:
    header = "slide_id,case_id,fold_0,fold_1,fold_2"
    table = write_split(tmp_path / "s.csv", ["s,c,train,,dev"], header)
    assert list(read_splits(table)) == [
        [(("c", "s"), "train")],
        [],
        [(("c", "s"), "val")],
    ]


@pytest.mark.parametrize("header", ["slide_id,group", "name,split"])
def test_a_table_without_ids_or_sides_is_refused(tmp_path: Path, header: str) -> None:
    table = write_split(tmp_path / "s.csv", ["a,train"], header)
    with pytest.raises(DatasetError, match="case_id or slide_id, and fold_0 or split"):
        list(read_splits(table))


@pytest.mark.parametrize("word", ["cases", "case_ids", "slides", "slide_ids", "ids"])
def test_sides_of_json_are_lists_or_stand_under_a_word(
    tmp_path: Path, word: str
) -> None:
    path = tmp_path / "s.json"
    folds = [{"train": {"more": 1, word: ["a", 2]}, "test": ["b"]}, {"val": {}}]
    path.write_text(json.dumps({"folds": folds}))
    assert list(read_splits(path)) == [
        [(("a",), "train"), (("2",), "train"), (("b",), "test")],
        [],
    ]


def test_a_side_of_json_that_is_no_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"train": "a"}))
    with pytest.raises(DatasetError, match="must be a list of ids, got 'a'"):
        list(read_splits(path))


# patients with several cases


def test_patients_with_several_cases_are_kept_whole_in_every_part() -> None:
    patients = [f"p{i // 2}" for i in range(60)]
    cohort = cohort_of(np.arange(60) // 2 % 2, patients=patients)
    parts, lines = make_parts(cohort, FoldSettings(folds=3))
    for part in parts:
        owners = [
            {patients[i] for i in side} for side in (part.train, part.stop, part.test)
        ]
        assert sum(map(len, owners)) == len(set().union(*owners)) == 30
    assert lines == ["3 stratified folds of cases, patients whole, seed 0"]


def test_fewer_patients_than_folds_are_refused_and_as_many_are_not() -> None:
    labels = np.array([0, 1] * 4)
    patients = ["p", "p", "q", "q", "r", "r", "r", "r"]
    parts, _ = make_parts(
        cohort_of(labels, patients=patients), FoldSettings(folds=3, inner=2)
    )
    assert len(parts) == 3
    with pytest.raises(
        InvalidInputError,
        match="patients must be at least 4 for 4 folds, got 3; pass folds=3",
    ):
        make_parts(cohort_of(labels, patients=patients), FoldSettings(folds=4))


def test_fewer_cases_of_a_class_than_folds_are_refused_by_its_name() -> None:
    labels = np.array([0] * 10 + [1] * 2)
    patients = [f"p{i // 2}" for i in range(12)]
    with pytest.raises(
        InvalidInputError,
        match=r"must have >= 3 cases of each class, .*got 2 cases of class 'b'",
    ):
        make_parts(cohort_of(labels, patients=patients), FoldSettings(folds=3))


def test_fewer_cases_of_the_rarest_value_of_a_label_are_refused() -> None:
    target = replace(CLASSES, kind="multilabel")
    values = np.array([[0, 1]] * 10 + [[1, 1]] * 2)
    cohort = cohort_of(
        values, target=target, patients=[f"p{i // 2}" for i in range(12)]
    )
    with pytest.raises(
        InvalidInputError, match="got 2 cases with the rarest value of a label"
    ):
        make_parts(cohort, FoldSettings(folds=3))


# inner cases and scores


def test_fewer_patients_than_inner_parts_give_fewer_parts() -> None:
    labels = [0, 1] * 10
    patients = [f"p{case // 4}" for case in range(20)]
    parts, _ = make_parts(cohort_of(labels, patients=patients), FoldSettings(folds=5))
    assert len(parts) == 5
    for part in parts:
        owners = [{patients[case] for case in rows} for rows in (part.train, part.stop)]
        assert [len(names) for names in owners] == [3, 1]
        assert not owners[0] & owners[1]


def test_one_patient_in_training_is_an_error_with_the_fold() -> None:
    patients = ["p"] * 6 + ["q"] * 6
    with pytest.raises(InvalidInputError, match="fold 1 must have >= 2 patients"):
        make_parts(cohort_of([0, 1] * 6, patients=patients), FoldSettings(folds=2))


@pytest.mark.parametrize(("inner", "num_inner"), [(2, 16), (4, 8), (8, 4)])
def test_one_of_so_many_training_cases_stops_the_training(
    inner: int, num_inner: int
) -> None:
    cohort = cohort_of(np.arange(40) % 2)
    parts, _ = make_parts(cohort, FoldSettings(folds=5, inner=inner))
    for part in parts:
        assert len(part.stop) == num_inner
        assert sum(i % 2 for i in part.stop) == num_inner // 2
        assert len(part.train) == 32 - num_inner
        assert sorted((*part.train, *part.stop, *part.test)) == list(range(40))


def test_a_rare_class_has_an_inner_case_of_each_fold_and_one_that_trains() -> None:
    """3 of 30 training cases are rare, so that a third of them is taken, not a fifth."""
    labels = np.r_[np.zeros(36, int), np.ones(4, int)]
    parts, _ = make_parts(cohort_of(labels), FoldSettings(folds=4))
    for part in parts:
        assert len(part.stop) == 10
        assert sum(labels[list(part.stop)]) == 1
        assert sum(labels[list(part.train)]) == 2


def test_inner_cases_of_other_folds_are_drawn_with_other_seeds() -> None:
    cohort = cohort_of(np.arange(40) % 2)
    (part, *_), _ = make_parts(cohort, FoldSettings(folds=5, seed=3))
    train = np.array(sorted((*part.train, *part.stop)))
    judge = StratifiedKFold(n_splits=5, shuffle=True, random_state=3 + 0 + 1)
    _, stop = next(judge.split(train, train % 2))
    assert part.stop == tuple(train[stop].tolist())


def test_two_sites_are_enough_to_leave_one_out() -> None:
    cohort = cohort_of(np.array([0, 0, 1, 1] * 4), sites=["x", "y"] * 8)
    parts, lines = make_parts(cohort, FoldSettings(unit="each-site", inner=2))
    assert [part.test[:2] for part in parts] == [(0, 2), (1, 3)]
    assert lines == [
        "leave-one-site-out: 2 sites, and a model of the other sites predicts each"
    ]


def test_one_site_cannot_be_left_out() -> None:
    cohort = cohort_of(np.arange(8) % 2, sites=["x"] * 8)
    with pytest.raises(DatasetError, match=r"must have two sites, .* got x"):
        make_parts(cohort, FoldSettings(unit="each-site"))


@pytest.mark.parametrize(
    ("kind", "values", "why"),
    [
        ("binary", [[0], [1]], ""),
        ("binary", [[1], [1]], "only class 'b'"),
        ("regression", [[1.0], [2.0]], ""),
        ("regression", [[2.0], [2.0]], "one value"),
        ("multilabel", [[0, 1], [1, 0]], ""),
        ("multilabel", [[0, 1], [0, 0]], "one value of a"),
        ("multilabel", [[0, 1], [0, 1]], "one value of a, b"),
        ("cox", [[1, 2.0], [0, 3.0]], ""),
        ("cox", [[0, 2.0], [0, 3.0]], "no event before the end of another case's"),
        ("cox", [[1, 3.0], [0, 3.0]], "no event before the end of another case's"),
        ("cox", [[0, 2.0], [1, 3.0]], "no event before the end of another case's"),
    ],
)
def test_two_cases_allow_a_score_where_they_differ(
    kind: str, values: list[list[float]], why: str
) -> None:
    target = replace(CLASSES, kind=kind)  # type: ignore[arg-type]
    cohort = cohort_of(np.array(values), target=target)
    reason = why_unscorable(cohort, np.arange(2))
    assert reason.startswith(why)
    assert bool(reason) == bool(why)


def test_an_id_in_other_capitals_is_asked_back_and_on_no_side(tmp_path: Path) -> None:
    cohort = cohort_of(np.arange(8) % 2)
    rows = [f"c{i},{'train' if i < 4 else 'test'}" for i in range(7)]
    table = write_split(tmp_path / "s.csv", [*rows, "C7,test"], "case_id,split")
    (part,), lines = make_parts(cohort, FoldSettings(inner=2), table)
    assert 7 not in {*part.train, *part.stop, *part.test}
    assert "s.csv has 1 name without a case: C7 (did you mean c7?)" in lines
