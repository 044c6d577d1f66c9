"""Folds of a user's rows: those of `train`, patients and sites whole, errors that name the rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, cross_val_score
from tests.predict.planted import write_embeddings

import thinsection as ts
from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.leaks import read_labelled
from thinsection.evaluation.own_folds import Folds
from thinsection.predict.experiment import plan

pandas = pytest.importorskip("pandas", reason="pandas is not installed")


def table(rows: int = 60, *, seed: int = 0) -> Any:
    """Cases of 40 patients at two kinds of sites; a patient has one label and one site."""
    rng = np.random.default_rng(seed)
    patient = rng.integers(0, 40, rows)
    site = patient % 8
    return pandas.DataFrame(
        {
            "slide_id": [f"s {row:02}" for row in range(rows)],
            "case_id": [f"c:{row}" for row in range(rows)],
            "patient_id": [f"P{number:02}" for number in patient],
            "label": np.where(
                rng.permuted(np.arange(40) % 3 == 0)[patient], "high", "low"
            ),
            "grade": 1 + rng.permuted(np.arange(40) % 3)[patient],
            "age": np.round(rng.normal(60, 12, 40), 1)[patient],
            "months": np.round(rng.exponential(30, 40), 1)[patient],
            "died": (rng.random(40) < 0.6).astype(int)[patient],
            "hospital": [f"site {number}" for number in site],
        }
    )


def folds_of_train(
    folder: Path, frame: Any, target: str, **settings: object
) -> list[tuple[list[int], list[int], list[int]]]:
    """Rows of the table in the folds that `train` draws for its embeddings."""
    rng = np.random.default_rng(1)
    for slide in frame.slide_id:
        write_embeddings(folder / f"{slide}.h5", rng.normal(size=(6, 4)))
    frame.to_csv(folder / "labels.csv", index=False)
    cross = ts.TrainConfig().cross
    changed = {name: settings.pop(name) for name in ("fold_unit",) if name in settings}
    config = LabelsConfig(
        labels=folder / "labels.csv", target=(target,), site="hospital", **settings
    )  # type: ignore[arg-type]
    labelled = read_labelled(folder, config)
    study, _ = plan(
        labelled.cohort,
        labelled.contents,
        replace(cross, **changed),  # type: ignore[arg-type]
        ts.TrainConfig().fit.seed,
    )
    row_of = {case: row for row, case in enumerate(frame.case_id)}
    rows = [row_of[case] for case in study.cohort.cases]
    return [
        (
            sorted(rows[i] for i in part.train),
            sorted(rows[i] for i in part.stop),
            sorted(rows[i] for i in part.test),
        )
        for part in study.parts
    ]


def as_lists(
    folds: Folds,
) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        (fold.train.tolist(), fold.validation.tolist(), fold.test.tolist())
        for fold in folds
    ]


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("label", {}),
        ("label", {"fold_unit": "site"}),
        ("grade", {"fold_unit": "each-site"}),
        ("grade", {}),
        ("age", {}),
        ("died", {"time": "months"}),
    ],
)
def test_the_folds_are_those_of_train(
    target: str, settings: dict[str, str], tmp_path: Path
) -> None:
    frame = table()
    wanted = folds_of_train(tmp_path, frame, target, **settings)
    time = frame[settings["time"]] if "time" in settings else None
    got = ts.folds(
        frame[target],
        cases=frame.case_id,
        patients=frame.patient_id,
        sites=frame.hospital,
        time=time,
        fold_unit=settings.get("fold_unit", "patient"),  # type: ignore[arg-type]
    )
    assert as_lists(got) == wanted


def test_arrays_lists_and_series_with_any_index_give_the_same_folds() -> None:
    frame = table()
    shuffled = frame.set_index(np.arange(60)[::-1])
    of_series = ts.folds(shuffled.label, patients=shuffled.patient_id)
    of_lists = ts.folds([*frame.label], patients=[*frame.patient_id])
    of_arrays = ts.folds(np.array(frame.label), patients=np.array(frame.patient_id))
    categorical = ts.folds(
        pandas.Categorical(frame.label), patients=frame.patient_id.astype("category")
    )
    assert as_lists(of_series) == as_lists(of_lists)
    assert as_lists(of_series) == as_lists(of_arrays) == as_lists(categorical)


@pytest.mark.parametrize("seed", [0, 7])
def test_patients_are_whole_and_the_test_sets_are_scikit_learns(seed: int) -> None:
    frame = table(90, seed=seed)
    folds = ts.folds(frame.label, patients=frame.patient_id, folds=4, seed=seed)
    # the more frequent class is 0, as in training
    strata = (frame.label == "high").to_numpy().astype(int)
    judge = StratifiedGroupKFold(4, shuffle=True, random_state=seed)
    wanted = judge.split(np.zeros(90), strata, groups=frame.patient_id.to_numpy())
    for fold, (_, test) in zip(folds, wanted, strict=True):
        np.testing.assert_array_equal(fold.test, test)
        sides = [
            {*frame.patient_id.iloc[rows]}
            for rows in (fold.train, fold.validation, fold.test)
        ]
        assert (
            not sides[0] & sides[1]
            and not sides[0] & sides[2]
            and not sides[1] & sides[2]
        )
        assert all(
            {*frame.label.iloc[rows]} == {"high", "low"}
            for rows in (fold.train, fold.test)
        )
    assert sorted(np.concatenate([fold.test for fold in folds]).tolist()) == [
        *range(90)
    ]
    assert np.bincount(folds.test_fold).tolist() == [len(fold.test) for fold in folds]


def test_sites_are_whole_with_two_cases_of_a_patient() -> None:
    frame = table()
    folds = ts.folds(
        frame.label,
        patients=frame.patient_id,
        sites=frame.hospital,
        fold_unit="site",
        folds=3,
    )
    for fold in folds:
        assert not {*frame.hospital.iloc[fold.test]} & {
            *frame.hospital.iloc[fold.train]
        }
    assert "sites whole" in repr(folds) and "seed 0" in repr(folds)


def test_rows_of_one_case_stay_together_and_have_one_label() -> None:
    labels = ["a", "b"] * 10
    cases = [f"case {row % 10}" for row in range(20)]
    folds = ts.folds(labels, cases=cases, folds=3)
    for fold in folds:
        assert {cases[row] for row in fold.test}.isdisjoint(
            cases[row] for row in fold.train
        )
    with pytest.raises(InvalidInputError, match="one label, got two for 'case 0'"):
        ts.folds(["b", *labels[1:]], cases=cases, folds=3)


def test_a_barcode_names_the_patient() -> None:
    cases = [f"TCGA-AA-{row // 2:04}-01Z-00-DX{row % 2}" for row in range(24)]
    labels = [("x", "y")[row // 2 % 2] for row in range(24)]
    for fold in ts.folds(labels, cases=cases, folds=3):
        patients = [
            {cases[row][:12] for row in rows} for rows in (fold.train, fold.test)
        ]
        assert not patients[0] & patients[1]


def test_scikit_learn_takes_the_pairs() -> None:
    frame = table()
    folds = ts.folds(frame.label, patients=frame.patient_id)
    x = np.random.default_rng(0).normal(size=(60, 3))
    scores = cross_val_score(LogisticRegression(), x, frame.label, cv=folds.pairs)
    assert len(scores) == len(folds) == 5
    for (train, test), fold in zip(folds.pairs, folds, strict=True):
        assert len(train) == len(fold.train) + len(fold.validation)
        np.testing.assert_array_equal(test, fold.test)


def test_repeated_folds_have_their_number_and_no_single_fold_of_a_row() -> None:
    frame = table()
    folds = ts.folds(frame.label, patients=frame.patient_id, repeats=2)
    assert [fold.repeat for fold in folds] == [0] * 5 + [1] * 5
    assert folds[0].test.tolist() != folds[5].test.tolist()
    with pytest.raises(InvalidInputError, match="one draw of folds, got 2 draws"):
        folds.test_fold  # noqa: B018


def test_what_does_not_fit_is_refused_with_the_rows() -> None:
    labels = ["a", "b", None, "a", float("nan")]
    with pytest.raises(
        InvalidInputError, match=r"labels must not be missing, got None in rows 2, 4"
    ):
        ts.folds(labels)
    with pytest.raises(
        InvalidInputError, match="labels must not be missing, got 'n/a' in row 1"
    ):
        ts.folds(["a", "n/a", "b", "a"])
    with pytest.raises(
        InvalidInputError, match="patients must have one value per row, got 3 for 4"
    ):
        ts.folds(["a", "b", "a", "b"], patients=["p", "q", "r"])
    with pytest.raises(
        InvalidInputError, match=r"patients must not be missing, got <NA> in row 1"
    ):
        ts.folds(["a", "b"], patients=pandas.array(["p", None], dtype="string"))
    with pytest.raises(
        InvalidInputError, match=r"labels must be one value per row, got an array"
    ):
        ts.folds(np.zeros((4, 2)))
    with pytest.raises(
        InvalidInputError, match="labels must be one value per row, got str"
    ):
        ts.folds("labels.csv")
    with pytest.raises(
        InvalidInputError, match="sites must be given where fold_unit is 'site'"
    ):
        ts.folds(["a", "b"] * 5, fold_unit="site")
    with pytest.raises(
        InvalidInputError, match="5 folds must have >= 5 cases of each class"
    ):
        ts.folds(["a"] * 20 + ["b"] * 2)
    with pytest.raises(DatasetError, match="one site, got 'north' and 'south' for 'p'"):
        ts.folds(
            ["a", "b"] * 5,
            patients=["p", "p", *"abcdefgh"],
            sites=["north", "south"] * 5,
            fold_unit="site",
        )
