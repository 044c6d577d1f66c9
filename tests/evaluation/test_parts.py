"""Folds: patients and sites whole, split files checked, every fold can be scored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import StratifiedGroupKFold

from thinsection.errors import ConfigError, DatasetError, InvalidInputError
from thinsection.evaluation.labels import Cohort, Target
from thinsection.evaluation.parts import Drawing, make_parts

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
    parts, lines = make_parts(cohort, Drawing(folds=4, seed=7, unit="site"))
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
    parts, lines = make_parts(cohort_of(labels, sites=sites), Drawing(unit="each-site"))
    assert [{sites[i] for i in part.test} for part in parts] == [
        {f"s{k}"} for k in range(4)
    ]
    assert all(set(range(40, 46)) <= {*part.train, *part.stop} for part in parts)
    assert lines == [
        "leave-one-site-out: 4 sites, each tested by a model of the others",
        "1 sites of 6 cases only train, as they alone cannot be scored (pure: only class 'b')",
    ]


def test_sites_that_cannot_make_folds_are_refused_before_training() -> None:
    labels = np.arange(12) % 2
    with pytest.raises(
        DatasetError, match=r"got none; pass --site COLUMN of the labels"
    ):
        make_parts(cohort_of(labels), Drawing(unit="site"))
    two = cohort_of(labels, sites=["x", "y"] * 6)
    with pytest.raises(
        InvalidInputError, match=r"sites must be at least 5 .* got 2; pass --folds 2"
    ):
        make_parts(two, Drawing(unit="site"))
    with pytest.raises(DatasetError, match="must allow a score, got only class"):
        make_parts(two, Drawing(unit="site", folds=2))
    with pytest.raises(DatasetError, match="leave-one-site-out must have two sites"):
        make_parts(two, Drawing(unit="each-site"))
    moved = cohort_of(labels, patients=["p"] * 12, sites=["x", "y"] * 6)
    with pytest.raises(
        DatasetError, match="a patient must be of one site, got 'x' and 'y' for 'p'"
    ):
        make_parts(moved, Drawing(unit="each-site"))


def test_repeats_draw_other_folds_and_the_first_are_those_without_repeats() -> None:
    cohort = cohort_of(np.arange(40) % 2)
    once, _ = make_parts(cohort, Drawing(folds=4))
    parts, (line,) = make_parts(cohort, Drawing(folds=4, repeats=3))
    assert parts[:4] == once
    assert [part.repeat for part in parts] == [0] * 4 + [1] * 4 + [2] * 4
    for repeat in range(3):
        tested = [i for part in parts if part.repeat == repeat for i in part.test]
        assert sorted(tested) == list(range(40))
    assert len({part.test for part in parts}) == 12
    assert line == "4 stratified folds of cases, drawn 3 times, seed 0"
    with pytest.raises(
        ConfigError, match="splits must not be given with --fold-unit or --repeats"
    ):
        make_parts(cohort, Drawing(repeats=2), Path("split.csv"))


def write_split(path: Path, rows: list[str], header: str = "slide_id,split") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_an_id_on_two_sides_is_refused(tmp_path: Path) -> None:
    cohort = cohort_of(np.arange(8) % 2)
    rows = [f"c{i},{'train' if i < 4 else 'test'}" for i in range(8)]
    table = write_split(tmp_path / "s.csv", [*rows, "C1 ,test"], "case_id,split")
    with pytest.raises(
        DatasetError,
        match=r"one side of a split, got 'C1' in train and test in fold 0 of '.*s\.csv'",
    ):
        make_parts(cohort, Drawing(), table)
    sides = {"train": ["c0", "c1", "c2", "c3"], "test": ["c3", "c4", "c5"]}
    (tmp_path / "s.json").write_text(json.dumps(sides))
    with pytest.raises(DatasetError, match="got 'c3' in train and test in fold 0"):
        make_parts(cohort, Drawing(), tmp_path / "s.json")


def test_slides_of_one_case_on_two_sides_are_refused_by_the_file_alone(
    tmp_path: Path,
) -> None:
    cohort = cohort_of(np.arange(8) % 2)
    rows = [
        f"slide-c{i},p{i // 2},{'train' if i % 4 < 2 else 'test'}" for i in range(8)
    ]
    header = "slide_id,case_id,split"
    table = write_split(tmp_path / "s.csv", rows, header)
    parts, _ = make_parts(cohort, Drawing(), table)
    assert parts[0].test == (2, 3, 6, 7)
    rows[1] = "slide-c1,p0,test"
    write_split(table, rows, header)
    with pytest.raises(DatasetError, match="got 'p0' in train and test"):
        make_parts(cohort, Drawing(), table)


def test_names_that_match_nothing_and_cases_left_out_are_counted(
    tmp_path: Path,
) -> None:
    cohort = cohort_of(np.arange(12) % 2)
    rows = [f"slide-c{i}.svs,{'train' if i < 6 else 'test'}" for i in range(10)]
    table = write_split(
        tmp_path / "s.csv", [*rows, "x1,train", "x2,test", "x3,test", "x4,test"]
    )
    (part,), lines = make_parts(cohort, Drawing(), table)
    assert part.test == (6, 7, 8, 9)
    assert lines == [
        "1 folds of s.csv",
        "4 names of s.csv match no case: x1, x2, x3, ...",
        "2 cases are in no fold of s.csv: c10, c11",
    ]


def test_a_patient_on_two_sides_is_refused_unless_that_is_allowed(
    tmp_path: Path,
) -> None:
    cohort = cohort_of(np.arange(8) % 2, patients=[f"p{i % 4}" for i in range(8)])
    rows = [f"c{i},{'train' if i < 4 else 'test'}" for i in range(8)]
    table = write_split(tmp_path / "s.csv", rows, "case_id,split")
    with pytest.raises(
        DatasetError,
        match=r"a patient must be on one side .* got 'p0' .* or pass --allow-leakage",
    ):
        make_parts(cohort, Drawing(), table)
    parts, _ = make_parts(cohort, Drawing(), table, allow_leakage=True)
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
        make_parts(cohort, Drawing(inner=2), table)


def test_a_class_that_no_training_case_has_is_refused(tmp_path: Path) -> None:
    target = Target(kind="multiclass", columns=("label",), names=("a", "b", "c"))
    cohort = cohort_of(np.array([0, 1] * 4 + [2, 0, 1, 2]), target=target)
    rows = [f"c{i},{'train' if i < 8 else 'test'}" for i in range(12)]
    table = write_split(tmp_path / "s.csv", rows, "case_id,split")
    with pytest.raises(
        DatasetError, match="must have every class, got none of c in fold 0"
    ):
        make_parts(cohort, Drawing(), table)
