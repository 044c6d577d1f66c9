"""Slide, survival and robustness probes against scikit-learn, scikit-survival and plain loops."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from tests.support import scikit_survival_figures
from tests.support.scikit_survival_figures import figures

from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation.splits import stratified_folds
from thinsection.probe.data.cases import mean_vectors
from thinsection.probe.data.sets import CaseSet, RobustnessSet, SurvivalSet
from thinsection.probe.probes.cases import slide_probe, survival_probe
from thinsection.probe.probes.pathorob import robustness_probe
from thinsection.probe.protocol import NANOPATH, PATHOBENCH, Protocol


def labelled_cases(n: int = 75, classes: int = 2) -> CaseSet:
    rng = np.random.default_rng(4)
    labels = np.arange(n) % classes
    vectors = rng.normal(size=(n, 6)) + 0.8 * np.eye(6)[labels]
    return CaseSet(
        name="cases",
        class_names=tuple(f"c{i}" for i in range(classes)),
        ids=tuple(f"case{i}" for i in range(n)),
        labels=labels,
        vectors=vectors.astype(np.float32),
    )


@pytest.mark.parametrize("classes", [2, 3])
def test_slide_scores_are_scikit_learns_over_the_suites_folds(classes: int) -> None:
    cases = labelled_cases(classes=classes)
    result = slide_probe(cases)
    by_c = {}
    x = cases.vectors.astype(np.float64)
    for c in (0.001, 0.01, 0.1, 0.5, 1, 10, 100):
        fold_scores = []
        for train, val in stratified_folds(cases.labels):
            model = LogisticRegression(C=c, class_weight="balanced", max_iter=5000)
            p = model.fit(x[train], cases.labels[train]).predict_proba(x[val])
            score = p[:, 1] if classes == 2 else p
            fold_scores.append(
                roc_auc_score(cases.labels[val], score, multi_class="ovr")
            )
        by_c[f"{c:g}"] = np.mean(fold_scores)
    assert result.details["score_by_c"] == pytest.approx(by_c)
    assert result.score == pytest.approx(max(by_c.values()))
    assert result.interval is not None
    assert result.interval.low < result.score < result.interval.high


def test_folds_of_the_dataset_are_used_as_they_are() -> None:
    cases = labelled_cases(40)
    fold = (np.arange(30), np.arange(30, 40))
    result = slide_probe(dataclasses.replace(cases, folds=(fold,)), protocol=PATHOBENCH)
    assert result.predictions is not None
    assert result.predictions.ids == cases.ids[30:]
    assert result.details["best_c"] == 0.5


def test_a_fold_without_a_class_is_refused() -> None:
    odd = (np.arange(0, 40, 2), np.arange(1, 40, 2))
    cases = dataclasses.replace(labelled_cases(40), folds=(odd,))
    with pytest.raises(
        DatasetError, match="train part of each fold must contain every class, got no"
    ):
        slide_probe(cases)


def test_a_case_is_the_mean_of_its_slides_means() -> None:
    content = {
        "a": np.array([[0.0, 2], [2, 4]]),
        "b": np.array([[5.0, 5]]),
        "c": np.zeros((3, 2)),
    }
    files = [[Path("a"), Path("b")], [Path("c")]]
    vectors = mean_vectors(files, lambda path: content[path.name].astype(np.float32))
    np.testing.assert_array_equal(vectors, [[3, 4], [0, 0]])


def test_slides_of_two_encoders_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="same number of channels, got 3 after 2 in 'bb'; use"
    ):
        mean_vectors(
            [[Path("a")], [Path("bb")]], lambda p: np.ones((2, 1 + len(p.name)), "f4")
        )


def test_cases_given_twice_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="case ids must be distinct, got 'case0' twice"
    ):
        dataclasses.replace(labelled_cases(2), ids=("case0", "case0"))


def survivors(n: int = 90) -> SurvivalSet:
    drawn = scikit_survival_figures.survivors()
    return SurvivalSet(
        name="survivors",
        ids=tuple(map(str, range(n))),
        event=drawn.event[:n],
        time=drawn.time[:n],
        vectors=drawn.x[:n],
    )


def test_survival_is_scikit_survivals_cox_on_z_scores_of_the_training_fold() -> None:
    result = survival_probe(survivors())
    expected = figures()["probe"]["nanopath"]
    assert result.details["fold_scores"] == pytest.approx(expected, abs=1e-12)
    assert 0.6 < result.score < 1.0
    assert result.interval is not None
    assert result.interval.low < result.score < result.interval.high


@pytest.mark.parametrize("protocol", [NANOPATH, PATHOBENCH])
def test_a_fold_that_trains_on_censored_cases_alone_is_refused(
    protocol: Protocol,
) -> None:
    cases = survivors(40)
    event = np.arange(40) >= 30
    fold = (np.arange(30), np.arange(30, 40))
    cases = dataclasses.replace(cases, event=event, folds=(fold,))
    with pytest.raises(
        DatasetError,
        match="train part of each fold must contain a case with an event, got censored cases alone "
        "in fold 0 of 'survivors'",
    ):
        survival_probe(cases, protocol=protocol)


@pytest.mark.parametrize("protocol", [NANOPATH, PATHOBENCH])
def test_a_constant_channel_does_not_change_survival(protocol: Protocol) -> None:
    cases = survivors()
    more = np.column_stack([cases.vectors, np.full(90, 3, np.float32)])
    scores = [
        survival_probe(dataclasses.replace(cases, vectors=x), protocol=protocol).score
        for x in (cases.vectors, more)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)


def test_a_time_that_is_not_positive_is_refused_by_case() -> None:
    cases = survivors(20)
    time = cases.time.copy()
    time[3] = 0
    with pytest.raises(
        InvalidInputError, match=r"finite and > 0, got 0.0 for case '3'"
    ):
        dataclasses.replace(cases, time=time)


def test_censored_cases_alone_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="got only censored cases"):
        dataclasses.replace(survivors(20), event=np.zeros(20, bool))


def tiles_of_centres(n: int = 120) -> RobustnessSet:
    rng = np.random.default_rng(6)
    biology = rng.integers(0, 2, n)
    slide = rng.integers(0, 12, n)
    centre = slide % 3
    x = rng.normal(size=(n, 8))
    x[:, 0] += 2 * biology
    x[:, 1] += 2 * centre
    return RobustnessSet(
        name="own",
        embeddings=x.astype(np.float32),
        biological_class=tuple(f"b{b}" for b in biology),
        medical_center=tuple(f"m{c}" for c in centre),
        slide_id=tuple(f"s{s}" for s in slide),
        facts={},
    )


def test_the_robustness_index_is_that_of_a_plain_loop() -> None:
    data = tiles_of_centres()
    result = robustness_probe(data, k=7)
    x = data.embeddings.astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    so = os_ = 0
    for i, row in enumerate(x @ x.T):
        others = [
            j
            for j in np.argsort(-row, kind="stable")
            if data.slide_id[j] != data.slide_id[i]
        ]
        for j in others[:7]:
            same = data.biological_class[i] == data.biological_class[j]
            home = data.medical_center[i] == data.medical_center[j]
            so, os_ = so + (same and not home), os_ + (home and not same)
    assert (result.details["so"], result.details["os"]) == (so, os_)
    assert result.score == so / (so + os_)
    assert 0 < result.score < 1


def test_the_published_k_goes_with_the_subset() -> None:
    data = tiles_of_centres()
    assert robustness_probe(data).details["k"] == 11
    assert (
        robustness_probe(dataclasses.replace(data, name="tolkach_esca")).details["k"]
        == 46
    )


def test_one_centre_and_one_class_give_no_index() -> None:
    data = dataclasses.replace(
        tiles_of_centres(30), medical_center=("m",) * 30, biological_class=("b",) * 30
    )
    with pytest.raises(
        InvalidInputError, match="the index needs two classes and two centres"
    ):
        robustness_probe(data, k=3)


def test_the_task_surgen_is_solved_by_liblinears_dual_as_nanopath_has_it() -> None:
    cases = dataclasses.replace(labelled_cases(40), name="surgen")
    wide = np.random.default_rng(0).normal(size=(40, 50)) + 0.4 * cases.labels[:, None]
    cases = dataclasses.replace(cases, vectors=wide.astype(np.float32))
    given = {"class_weight": "balanced", "max_iter": 5000, "random_state": 0}
    expected = []
    for train, val in stratified_folds(cases.labels):
        model = LogisticRegression(C=0.01, solver="liblinear", dual=True, **given)
        p = model.fit(cases.vectors[train], cases.labels[train]).predict_proba(
            cases.vectors[val]
        )
        expected.append(roc_auc_score(cases.labels[val], p[:, 1]))
    assert slide_probe(cases).details["score_by_c"]["0.01"] == pytest.approx(
        np.mean(expected)
    )


def test_pathobench_fits_coxnet_on_vectors_as_they_are() -> None:
    cases = survivors()
    train, val = np.arange(0, 60), np.arange(60, len(cases.ids))
    result = survival_probe(
        dataclasses.replace(cases, folds=((train, val),)), protocol=PATHOBENCH
    )
    expected = figures()["probe"]["pathobench"]
    assert result.details["fold_scores"] == pytest.approx(expected, abs=1e-12)
