"""Intervals and comparisons of a user's predictions, judged by SciPy, sklearn and known truth."""

import numpy as np
import pytest
from scipy.stats import norm, ttest_rel, wilcoxon
from sklearn import metrics as judge

import thinsection as ts
from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.target import Target
from thinsection.predict import tested
from thinsection.predict.validation_figures import figures

N = 90


def data(seed: int = 0, n: int = N) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Labels 0 and 1, probabilities, and patients with several cases."""
    rng = np.random.default_rng(seed)
    patient = rng.integers(0, 2 * n // 3, n)
    base = rng.normal(size=n)[patient]
    labels = (base + rng.normal(size=n) > 0.4).astype(int)
    scores = 1 / (1 + np.exp(-(base + 0.5 * rng.normal(size=n))))
    return labels, scores, [f"P {number}" for number in patient]


def rows_of(
    target: Target, truth: np.ndarray, answers: np.ndarray, patients: list[str]
) -> tested.Tested:
    """The predictions as `validate` holds them."""
    n = len(patients)
    return tested.Tested(
        target=target,
        cases=tuple(f"c{i}" for i in range(n)),
        groups=Groups("patients", tuple(patients)),
        slides=tuple((f"s{i}",) for i in range(n)),
        fold=np.zeros(n, dtype=np.int64),
        truth=np.asarray(truth, dtype=np.float64).reshape(n, -1),
        answers=np.asarray(answers, dtype=np.float64).reshape(n, -1),
    )


def assert_those_of_validate(
    rows: tested.Tested,
    labels: object,
    scores: object,
    patients: list[str],
    **more: object,
) -> None:
    printed = figures(rows, None)["scores"]
    assert len(printed) >= 1
    for metric, wanted in printed.items():
        if metric == "mae" and rows.target.kind == "ordinal":
            continue
        got = ts.interval(labels, scores, metric, patients=patients, **more)  # type: ignore[arg-type]
        shown = {"value": got.value, "low": got.low, "high": got.high}
        assert shown == {name: wanted[name] for name in shown}, metric
        assert got.method == wanted["method"] and not got.missing


@pytest.mark.parametrize("positive", ["high", "low"])
def test_two_classes_have_the_intervals_of_validate(positive: str) -> None:
    labels, p, patients = data(n=240)
    names = ("low", "high")
    target = Target(kind="binary", columns=("grade",), names=names, positive=positive)
    rows = rows_of(target, labels, np.stack([1 - p, p], axis=1), patients)
    words = [names[label] for label in labels]
    score = p if positive == "high" else 1 - p
    assert_those_of_validate(rows, words, score, patients, positive=positive)
    columns = np.stack([1 - p, p], axis=1)
    assert_those_of_validate(
        rows, words, columns, patients, classes=names, positive=positive
    )


def test_three_classes_have_the_intervals_of_validate() -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, 120)
    z = rng.normal(size=(120, 3)) + 1.5 * np.eye(3)[labels]
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    patients = [f"P{number}" for number in rng.integers(0, 70, 120)]
    target = Target(kind="multiclass", columns=("kind",), names=("a", "b", "c"))
    words = [target.names[label] for label in labels]
    assert_those_of_validate(rows_of(target, labels, p, patients), words, p, patients)


def test_numbers_and_survival_have_the_intervals_of_validate() -> None:
    rng = np.random.default_rng(4)
    truth = rng.normal(60, 10, 80)
    predicted = truth + rng.normal(0, 8, 80)
    patients = [f"P{number}" for number in rng.integers(0, 50, 80)]
    target = Target(kind="regression", columns=("age",), names=("age",))
    assert_those_of_validate(
        rows_of(target, truth, predicted, patients), truth, predicted, patients
    )
    time = rng.exponential(30, 80)
    event = (rng.random(80) < 0.6).astype(int)
    risk = -np.log(time) + rng.normal(size=80)
    target = Target(kind="cox", columns=("died", "months"), names=("risk",))
    rows = rows_of(target, np.stack([event, time], axis=1), risk, patients)
    assert_those_of_validate(rows, event, risk, patients, time=time)


def test_the_values_are_those_of_scikit_learn() -> None:
    labels, p, patients = data()
    calls = (p > 0.5).astype(int)
    wanted = {
        "auroc": judge.roc_auc_score(labels, p),
        "auprc": judge.average_precision_score(labels, p),
        "brier": judge.brier_score_loss(labels, p),
        "balanced_accuracy": judge.balanced_accuracy_score(labels, calls),
        "macro_f1": judge.f1_score(labels, calls, average="macro"),
        "weighted_kappa": judge.cohen_kappa_score(labels, calls, weights="quadratic"),
        "mae": judge.mean_absolute_error(labels, p),
        "r2": judge.r2_score(labels, p),
    }
    for metric, value in wanted.items():
        got = ts.interval(labels, p, metric, patients=patients)
        assert got.value == pytest.approx(value, abs=1e-12), metric
        assert got.low < value < got.high
    of_calls = ts.interval(labels, calls, "macro_f1", patients=patients)
    assert of_calls.value == pytest.approx(wanted["macro_f1"])
    words = np.where(calls, "high", "low")
    of_words = ts.interval(np.where(labels, "high", "low"), words, "macro_f1")
    assert of_words.value == pytest.approx(wanted["macro_f1"])


def test_the_interval_covers_the_true_auroc_where_patients_have_several_cases() -> None:
    """Binormal scores with a patient's own effect; intervals of rows cover too rarely."""
    rng = np.random.default_rng(0)
    truth = float(norm.cdf(1 / np.sqrt(2)))
    covered = {"patients": 0, "rows": 0}
    repeats = 150
    for _ in range(repeats):
        patient = np.repeat(np.arange(30), 5)
        labels = (np.arange(30) % 2)[patient]
        effect = 0.9 * rng.normal(size=30)[patient]
        scores = labels + effect + np.sqrt(1 - 0.81) * rng.normal(size=150)
        for unit in covered:
            patients = patient if unit == "patients" else None
            bounds = ts.interval(labels, scores, patients=patients)
            covered[unit] += bounds.low <= truth <= bounds.high
    assert covered["patients"] >= 0.89 * repeats
    assert covered["rows"] < 0.75 * repeats


def test_the_test_of_a_mean_error_is_the_paired_t_test_of_scipy() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=40)
    first = truth + rng.normal(size=40)
    second = truth + 1.2 * rng.normal(size=40)
    wanted = ttest_rel(np.abs(first - truth), np.abs(second - truth))
    got = ts.compare(truth, first, second, "mae")
    assert got.p_value == pytest.approx(wanted.pvalue, rel=1e-9)
    bounds = wanted.confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((bounds.low, bounds.high), rel=1e-9)
    assert got.difference == pytest.approx(got.first - got.second)
    turned = ts.compare(truth, second, first, "mae")
    assert (turned.difference, turned.p_value) == pytest.approx(
        (-got.difference, got.p_value)
    )
    # a test of ranks by other code agrees in direction and size
    assert (
        wilcoxon(np.abs(first - truth), np.abs(second - truth)).pvalue
        < 10 * got.p_value
    )


def test_equal_models_differ_in_one_of_twenty_comparisons() -> None:
    """Two models of the same quality, on patients with several cases."""
    rng = np.random.default_rng(2)
    repeats = 200
    found = 0
    for _ in range(repeats):
        patient = np.repeat(np.arange(40), 3)
        labels = (np.arange(40) % 2)[patient]
        shared = rng.normal(size=40)[patient]
        models = [
            labels
            + 0.5 * shared
            + 0.8 * rng.normal(size=40)[patient]
            + 0.3 * rng.normal(size=120)
            for _ in range(2)
        ]
        found += ts.compare(labels, *models, patients=patient).p_value < 0.05
    assert 2 <= found <= 22


def test_the_difference_of_two_aurocs_is_that_of_train() -> None:
    labels, p, patients = data()
    q = np.clip(p + 0.2 * np.random.default_rng(5).normal(size=N), 0, 1)
    target = Target(kind="binary", columns=("grade",), names=("0", "1"), positive="1")
    models = [
        rows_of(target, labels, np.stack([1 - s, s], axis=1), patients) for s in (p, q)
    ]
    wanted = tested.difference(*models)
    got = ts.compare(labels, p, q, patients=patients)
    assert (got.low, got.high, got.p_value) == (
        wanted["low"],
        wanted["high"],
        wanted["p_value"],
    )


def test_folds_of_ts_folds_give_the_interval_of_a_cross_validation() -> None:
    labels, p, patients = data()
    folds = ts.folds(labels, patients=patients)
    of_one_model = ts.interval(labels, p, patients=patients)
    of_folds = ts.interval(labels, p, patients=patients, fold=folds.test_fold)
    assert of_folds.high - of_folds.low > of_one_model.high - of_one_model.low
    assert of_one_model.units == len({*patients})


def test_a_result_reads_as_a_sentence() -> None:
    labels, p, patients = data()
    score = ts.interval(labels, p, patients=patients)
    units = len({*patients})
    assert repr(score) == (
        f"AUROC {score.value:.2f}, 95 % CI {score.low:.2f} to {score.high:.2f} "
        f"(90 rows of {units} patients)"
    )
    few = ts.interval([0, 1, 0, 1], [0.1, 0.9, 0.2, 0.3])
    assert "no interval: at least 5 rows of each class are needed, got 2" in repr(few)
    assert np.isnan(few.low)
    assert "p = " in repr(ts.compare(labels, p, 1 - p, patients=patients))


def test_what_does_not_fit_is_refused() -> None:
    labels, p, _ = data()
    words = np.where(labels, "high", "low")
    with pytest.raises(
        InvalidInputError, match=r"metric must be one of .*; did you mean 'auroc'"
    ):
        ts.interval(labels, p, "auorc")
    with pytest.raises(
        InvalidInputError, match="positive must be 'high' or 'low' where scores"
    ):
        ts.interval(words, p)
    with pytest.raises(
        InvalidInputError, match="positive must be one of high, low, got 'hihg'"
    ):
        ts.interval(words, p, positive="hihg")
    with pytest.raises(
        InvalidInputError, match="scores must have one value per row, got 89 for 90"
    ):
        ts.interval(labels, p[1:])
    with pytest.raises(
        InvalidInputError, match="scores must be finite, got NaN or infinity in row 3"
    ):
        ts.interval(labels, np.where(np.arange(N) == 3, np.nan, p))
    with pytest.raises(
        InvalidInputError, match="probabilities from 0 to 1 for 'brier', got -"
    ):
        ts.interval(labels, p - 0.5, "brier")
    with pytest.raises(
        InvalidInputError, match=r"scores must be of shape .N, 3. for 3 classes"
    ):
        ts.interval(np.arange(N) % 3, p)
    with pytest.raises(
        InvalidInputError, match=r"scores must be of shape \(90, 2\), a column for"
    ):
        ts.interval(labels, np.ones((N, 3)) / 3)
    with pytest.raises(InvalidInputError, match="time must be given for 'c_index'"):
        ts.interval(labels, p, "c_index")
    with pytest.raises(
        InvalidInputError, match="labels must have two classes, got only '1'"
    ):
        ts.interval(np.ones(N), p)
    with pytest.raises(InvalidInputError, match="scores must be numbers, got 'x'"):
        ts.interval(p, ["x"] * N, "mae")
    with pytest.raises(InvalidInputError, match="difference has a test, got 'ece'"):
        ts.compare(labels, p, p, "ece")
    with pytest.raises(DatasetError, match="label must be one of"):
        ts.interval(words, p, positive="high", classes=["high", "middle"])
