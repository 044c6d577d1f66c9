"""A locked model on new cases: figures of other packages, training cases named, same bytes."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn import metrics as judge
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from tests.predict.planted import write_embeddings
from tests.support.survival_scores import plain_scores
from typer.testing import CliRunner

import thinsection as ts
from thinsection.cli.app import build_app
from thinsection.cli.predict import _validation_line
from thinsection.errors import (
    ConfigError,
    DatasetError,
    InvalidInputError,
    WeightsError,
)
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.embeddings import read_embeddings
from thinsection.evaluation.survival import breslow_baseline
from thinsection.evaluation.target import Target
from thinsection.predict import tested
from thinsection.predict.model_file import Lock, load_model, read_card, save_model
from thinsection.predict.predicting import predict
from thinsection.predict.validation_figures import figures
from thinsection.predict.validation_review import beside_training

DIM = 8
CLASSES = ("a", "b", "c")
EXACT = {"abs": 1e-9, "rel": 0}


def cohort(root: Path, *, cases: int, seed: int, name: str) -> Path:
    """A folder of embeddings with one mark a case, and labels of every kind that follow it.

    Every fifth case has two slides.
    """
    root.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(cases):
        mark = rng.normal()
        slides = [f"{name}{i:03}", f"{name}{i:03}-2"][: 2 if i % 5 == 0 else 1]
        death = rng.exponential(np.exp(-mark) * 60)
        censored = rng.uniform(20, 120)
        row = {
            "case_id": f"{name}case{i:03}",
            "grade": "high" if rng.random() < 1 / (1 + np.exp(-2 * mark)) else "low",
            "type": CLASSES[int(np.searchsorted([-0.4, 0.4], mark + rng.normal() / 2))],
            "one": int(rng.random() < 1 / (1 + np.exp(-2 * mark))),
            "two": int(rng.random() < 1 / (1 + np.exp(2 * mark))),
            "value": f"{10 + 3 * mark + rng.normal():.6f}",
            "dead": int(death <= censored),
            "days": int(np.ceil(min(death, censored))),
        }
        for slide in slides:
            tiles = rng.normal(size=(30, DIM))
            tiles[:, 0] += 1.5 * mark
            write_embeddings(root / f"{slide}.h5", tiles)
            rows.append({"slide_id": slide, **row})
    with (root.parent / f"{root.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return root


TASKS: dict[str, dict[str, Any]] = {
    "binary": {"target": ("grade",)},
    "multiclass": {"target": ("type",)},
    "multilabel": {"target": ("one", "two")},
    "regression": {"target": ("value",)},
    "cox": {"target": ("dead",), "time": "days"},
    "discrete": {"target": ("dead",), "time": "days", "task": "discrete"},
}


class Study:
    """Training and external cohorts, and a model of each task, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.training = cohort(root / "training", cases=45, seed=0, name="t")
        self.external = cohort(root / "external", cases=70, seed=1, name="e")
        self.experiments: dict[str, Path] = {}

    def experiment(self, task: str) -> Path:
        if task not in self.experiments:
            out = self.root / "experiments" / task
            config = ts.TrainConfig()
            config = replace(
                config,
                labels=replace(
                    config.labels, labels=self.root / "training.csv", **TASKS[task]
                ),
                head=replace(config.head, head="linear"),
                fit=replace(config.fit, epochs=3, lr=0.05, device="cpu"),
                cross=replace(config.cross, folds=3),
            )
            ts.train(self.training, out=out, config=config)
            self.experiments[task] = out
        return self.experiments[task]

    def model(self, task: str) -> Path:
        return self.experiment(task) / "model.safetensors"

    def validate(self, task: str, out: Path) -> tuple[dict[str, Any], Any]:
        """What the model says of the external cohort, and the arrays that it was judged on."""
        labels = self.root / "external.csv"
        predictions = predict(
            self.model(task), self.external, out=out, labels=labels, device="cpu"
        )
        assert predictions.validation is not None and predictions.page is not None
        told = json.loads((predictions.page.parent / "validation.json").read_text())
        assert told == predictions.validation
        return told, case_table(predictions.page.parent)


def case_table(folder: Path) -> list[dict[str, str]]:
    with (folder / "cases.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def assert_nearly_wilson(found: dict[str, float], hits: int, n: int) -> None:
    """Where each patient has one case, an interval is Wilson's but for Student's t."""
    wilson = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    ratio = (found["high"] - found["low"]) / (wilson.high - wilson.low)
    assert found["low"] <= found["value"] <= found["high"]
    assert 0.98 <= ratio <= 1.15


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return Study(tmp_path_factory.mktemp("locked"))


def test_figures_of_two_classes_are_scikit_learns(study: Study, tmp_path: Path) -> None:
    told, rows = study.validate("binary", tmp_path)
    assert told["validation"] == "external" and told["left_out"] == []
    assert (told["cases"], told["slides"], told["patients"]) == (70, 84, 70)
    truth = np.array([row["truth"] for row in rows]) == "low"
    share = column(rows, "p_low")
    (outcome,) = told["outcomes"]
    assert outcome["name"] == "low" and outcome["positive"] == truth.sum()
    expected = {
        "auroc": judge.roc_auc_score(truth, share),
        "auprc": judge.average_precision_score(truth, share),
        "brier": judge.brier_score_loss(truth, share),
    }
    for name, value in expected.items():
        score = outcome["scores"][name]
        assert score["value"] == pytest.approx(value, **EXACT)
        assert score["low"] < value < score["high"]
    threshold = read_card(study.model("binary")).lock.thresholds["low"]
    assert outcome["threshold"] == threshold
    called = share >= threshold
    tn, fp, fn, tp = judge.confusion_matrix(truth, called).ravel().tolist()
    calls = {
        "accuracy": (tp + tn, 70),
        "sensitivity": (tp, tp + fn),
        "specificity": (tn, tn + fp),
        "ppv": (tp, tp + fp),
        "npv": (tn, tn + fn),
    }
    for name, (hits, n) in calls.items():
        found = outcome["calls"][name]
        assert found["value"] == pytest.approx(hits / n, **EXACT)
        assert (found["hits"], found["cases"], found["units"]) == (hits, n, n)
        assert_nearly_wilson(found, hits, n)
    observed, predicted = calibration_curve(
        truth, share, n_bins=10, strategy="quantile"
    )
    bins = outcome["calibration_curve"]
    assert [b["observed"]["value"] for b in bins] == pytest.approx(observed, **EXACT)
    assert [b["predicted"] for b in bins] == pytest.approx(predicted, **EXACT)
    logit = np.log(share / (1 - share))[:, None]
    fitted = LogisticRegression(
        C=np.inf, tol=1e-13, max_iter=10_000, solver="newton-cholesky"
    ).fit(logit, truth)
    assert outcome["calibration"]["slope"]["value"] == pytest.approx(
        fitted.coef_[0, 0], abs=1e-9
    )
    curve = outcome["decision_curve"]
    at = curve["thresholds"].index(0.3)
    _, fp, _, tp = judge.confusion_matrix(truth, share >= 0.3).ravel()
    assert curve["model"][at] == pytest.approx(tp / 70 - fp / 70 * 0.3 / 0.7, **EXACT)


def test_the_table_of_cases_has_the_class_that_the_figures_count(
    study: Study, tmp_path: Path
) -> None:
    told, rows = study.validate("binary", tmp_path)
    (outcome,) = told["outcomes"]
    called = [row["class_at_threshold"] == "low" for row in rows]
    truth = [row["truth"] == "low" for row in rows]
    both = [x and y for x, y in zip(called, truth, strict=True)]
    assert sum(both) == outcome["counts"]["true_positive"]
    assert called == [float(row["p_low"]) >= outcome["threshold"] for row in rows]
    assert any(row["class_at_threshold"] != row["prediction"] for row in rows)
    page = (tmp_path / "validation_binary" / "index.html").read_text()
    assert "class_at_threshold" in page


def test_the_threshold_is_youdens_on_the_inner_cases_of_all_folds(study: Study) -> None:
    from safetensors.numpy import load_file

    out = study.experiment("binary")
    document = json.loads((out / "experiment.json").read_text())
    parts = json.loads((out / "cohort.json").read_text())
    truth, share = [], []
    for part, name in zip(parts["parts"], document["heads"], strict=True):
        logits = load_file(out / "folds" / f"{name}.safetensors")["stop"]
        z = logits / document["temperature"]
        share += (1 / (1 + np.exp(z[:, 0] - z[:, 1]))).tolist()
        truth += [parts["cohort"]["values"][i][0] == 1 for i in part["stop"]]
    false, true, _ = judge.roc_curve(truth, share)
    lock = read_card(out / "model.safetensors").lock
    called = np.array(share) >= lock.thresholds["low"]
    gain = judge.balanced_accuracy_score(truth, called)
    assert 2 * gain - 1 == pytest.approx((true - false).max(), abs=1e-12)
    assert lock.inner_cases == len({i for p in parts["parts"] for i in p["stop"]})


def test_figures_of_several_classes_are_scikit_learns(
    study: Study, tmp_path: Path
) -> None:
    told, rows = study.validate("multiclass", tmp_path)
    truth = np.array([row["truth"] for row in rows])
    shares = np.stack([column(rows, f"p_{name}") for name in CLASSES], axis=1)
    said = np.array(CLASSES)[shares.argmax(axis=1)]
    assert told["value"] == pytest.approx(
        judge.roc_auc_score(truth, shares, multi_class="ovr"), **EXACT
    )
    assert told["scores"]["balanced_accuracy"]["value"] == pytest.approx(
        judge.balanced_accuracy_score(truth, said), **EXACT
    )
    matrix = judge.confusion_matrix(truth, said, labels=CLASSES)
    assert told["classes"]["counts"] == matrix.tolist()
    found = told["classes"]["shares"][0][0]
    assert_nearly_wilson(found, int(matrix[0, 0]), int(matrix[0].sum()))
    for k, outcome in enumerate(told["outcomes"]):
        positive = truth == CLASSES[k]
        assert outcome["scores"]["auroc"]["value"] == pytest.approx(
            judge.roc_auc_score(positive, shares[:, k]), **EXACT
        )
        assert outcome["calls"]["sensitivity"]["value"] == pytest.approx(
            judge.recall_score(positive, said == CLASSES[k]), **EXACT
        )


def test_each_label_of_several_has_its_threshold_and_figures(
    study: Study, tmp_path: Path
) -> None:
    told, rows = study.validate("multilabel", tmp_path)
    assert [outcome["name"] for outcome in told["outcomes"]] == ["one", "two"]
    for outcome in told["outcomes"]:
        truth = column(rows, f"truth_{outcome['name']}") == 1
        share = column(rows, f"p_{outcome['name']}")
        assert outcome["scores"]["auroc"]["value"] == pytest.approx(
            judge.roc_auc_score(truth, share), **EXACT
        )
        called = share >= outcome["threshold"]
        assert outcome["calls"]["ppv"]["value"] == pytest.approx(
            judge.precision_score(truth, called), **EXACT
        )
    areas = [one["scores"]["auroc"]["value"] for one in told["outcomes"]]
    assert told["averaged"] == ["one", "two"]
    assert told["value"] == pytest.approx(np.mean(areas), **EXACT)
    assert told["interval"][0] < told["value"] < told["interval"][1]
    page = next(tmp_path.rglob("validation_*/index.html")).read_text()
    assert "mean over 2 labels: one, two" in page


def test_a_label_of_one_class_is_not_in_the_mean_over_labels_and_it_is_said() -> None:
    rng = np.random.default_rng(4)
    truth = (rng.random((60, 3)) < 0.5).astype(float)
    truth[::4, 0] = np.nan
    truth[:, 1] = 1
    answers = np.clip(0.3 * truth + 0.6 * rng.random((60, 3)), 0, 1)
    answers[::4, 0] = 0.5
    rows = tested.Tested(
        cases=tuple(map(str, range(60))),
        slides=tuple((str(i),) for i in range(60)),
        fold=np.zeros(60, dtype=np.int64),
        target=Target(
            kind="multilabel", columns=("a", "b", "c"), names=("a", "b", "c")
        ),
        truth=truth,
        answers=answers,
        groups=Groups("patients", tuple(f"{i // 2}" for i in range(60))),
    )
    found = figures(rows, Lock())
    known = np.isfinite(truth[:, 0])
    areas = [
        judge.roc_auc_score(truth[known, 0], answers[known, 0]),
        judge.roc_auc_score(truth[:, 2], answers[:, 2]),
    ]
    assert found["averaged"] == ["a", "c"]
    assert found["value"] == pytest.approx(np.mean(areas), **EXACT)
    assert (
        "b: not in the mean over labels, because it has no cases of two classes"
        in (found["missing"])
    )
    none = figures(replace(rows, truth=np.ones((60, 3))), Lock())
    assert none["value"] is None
    assert none["averaged"] == []


def test_figures_of_values_are_scikit_learns(study: Study, tmp_path: Path) -> None:
    told, rows = study.validate("regression", tmp_path)
    truth = column(rows, "truth_value")
    said = column(rows, "value")
    expected = {
        "r2": judge.r2_score(truth, said),
        "mae": judge.mean_absolute_error(truth, said),
        "pearson": np.corrcoef(truth, said)[0, 1],
    }
    for name, value in expected.items():
        assert told["scores"][name]["value"] == pytest.approx(value, **EXACT)
        assert told["scores"][name]["low"] < value < told["scores"][name]["high"]
    slope, intercept = np.polyfit(said, truth, 1)
    assert told["values"]["slope"]["value"] == pytest.approx(slope, abs=1e-9)
    assert told["values"]["intercept"]["value"] == pytest.approx(intercept, abs=1e-9)


def test_figures_of_survival_are_lifelines(study: Study, tmp_path: Path) -> None:
    lifelines = pytest.importorskip("lifelines")
    import pandas

    told, rows = study.validate("cox", tmp_path)
    event, time = column(rows, "truth_dead") == 1, column(rows, "truth_days")
    risk = column(rows, "risk")
    assert told["value"] == pytest.approx(
        lifelines.utils.concordance_index(time, -risk, event), **EXACT
    )
    survival = told["survival"]
    lock = read_card(study.model("cox")).lock
    assert survival["risk_cut"] == lock.risk_cut
    high = risk > lock.risk_cut
    for group, of_group in zip(survival["groups"], (~high, high), strict=True):
        fitted = lifelines.KaplanMeierFitter().fit(time[of_group], event[of_group])
        ours = np.array(group["survival"])
        theirs = fitted.predict(group["times"]).to_numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
        bounds = fitted.confidence_interval_.loc[group["times"]].to_numpy()
        inside = (ours > 0) & (ours < 1)
        np.testing.assert_allclose(
            np.stack([group["low"], group["high"]], axis=1)[inside],
            bounds[inside],
            atol=1e-9,
        )
        assert group["at_risk"] == [
            int((time[of_group] >= tick).sum()) for tick in survival["ticks"]
        ]
    table = pandas.DataFrame({"event": event, "time": time, "x": high.astype(float)})
    cox = lifelines.CoxPHFitter().fit(
        table, "time", "event", fit_options={"precision": 1e-13}
    )
    ratio = survival["hazard_ratio"]
    log_ends = np.log([ratio["value"], ratio["low"], ratio["high"]])
    theirs = [cox.params_["x"], *cox.confidence_intervals_.loc["x"]]
    np.testing.assert_allclose(log_ends, theirs, atol=1e-9)
    times = [one["time"] for one in survival["at_times"]]
    assert times == list(lock.horizons)
    hazard = np.r_[0, lock.hazard][np.searchsorted(lock.times, times, side="right")]
    predicted = np.exp(-np.exp(risk)[:, None] * hazard)
    expected = plain_scores(event, time, risk, predicted, times=times)
    for (auroc, brier), one in zip(expected, survival["at_times"], strict=True):
        assert one["auroc"]["value"] == pytest.approx(auroc, **EXACT)
        assert one["brier"]["value"] == pytest.approx(brier, **EXACT)
        assert one["auroc"]["low"] < auroc < one["auroc"]["high"]
        assert one["brier"]["low"] < brier < one["brier"]["high"]


def test_the_baseline_is_of_out_of_fold_risks_centred_by_head(study: Study) -> None:
    out = study.experiment("cox")
    with (out / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    own: dict[str, dict[str, str]] = {}
    for (
        row
    ) in rows:  # a case of several slides has its own row, before those of its slides
        own.setdefault(row["case_id"], row)
    cases = [*own.values()]
    risk, fold = column(cases, "risk"), column(cases, "fold")
    means = {f: risk[fold == f].mean() for f in np.unique(fold)}
    centred = risk - [means[f] for f in fold] + np.mean([*means.values()])
    event, time = column(cases, "truth_dead") == 1, column(cases, "truth_days")
    lock = read_card(out / "model.safetensors").lock
    times, hazard = breslow_baseline(event, time, centred)
    np.testing.assert_array_equal(lock.times, times)
    np.testing.assert_allclose(lock.hazard, hazard, rtol=1e-9)
    assert lock.risk_cut == pytest.approx(np.median(centred), abs=1e-9)


def test_risks_by_intervals_have_groups_and_no_brier_score(
    study: Study, tmp_path: Path
) -> None:
    told, _ = study.validate("discrete", tmp_path)
    assert len(told["survival"]["groups"]) == 2
    assert all("brier" not in one for one in told["survival"]["at_times"])
    assert any("no Brier score" in line for line in told["missing"])


def test_a_second_run_gives_the_same_bytes(study: Study, tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        study.validate("binary", tmp_path)
        folder = tmp_path / "validation_binary"
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0].keys() == {"validation.json", "index.html", "cases.csv"}
    assert contents[0] == contents[1]


def test_the_page_names_the_models_hash_and_says_external_validation(
    study: Study, tmp_path: Path
) -> None:
    told, _ = study.validate("cox", tmp_path)
    page = (tmp_path / "validation_cox" / "index.html").read_text()
    assert "External validation of cox" in page
    assert told["model"]["sha256"] in page and len(told["model"]["sha256"]) == 64
    assert "Nothing was fitted or chosen on these cases" in page
    assert f"{told['survival']['hazard_ratio']['value']:.2f}" in page
    assert "84 slides of 70 cases for testing" in page


def test_a_copy_of_the_training_cohort_is_no_external_validation(
    study: Study, tmp_path: Path
) -> None:
    found = predict(
        study.model("binary"),
        study.training,
        out=tmp_path,
        labels=study.root / "training.csv",
        device="cpu",
    )
    told = found.validation
    assert told["validation"] == "internal" and told["cases"] == 45
    page = found.page.read_text()
    assert "This is not an external validation." in page
    assert "External validation" not in page
    # each case is answered by the head that has not seen it: the scores of training again
    with (study.experiment("binary") / "predictions.csv").open(newline="") as file:
        out_of_fold: dict[str, float] = {}
        for row in csv.DictReader(file):
            out_of_fold.setdefault(row["case_id"], float(row["p_low"]))
    for row in case_table(tmp_path / "validation_binary"):
        assert float(row["p_low"]) == pytest.approx(
            out_of_fold[row["case_id"]], abs=1e-6
        )


@pytest.mark.parametrize("task", [*TASKS])
def test_an_internal_validation_has_the_scores_of_training(
    study: Study, tmp_path: Path, task: str
) -> None:
    found = predict(
        study.model(task),
        study.training,
        out=tmp_path,
        labels=study.root / "training.csv",
        device="cpu",
    )
    experiment = json.loads((study.experiment(task) / "experiment.json").read_text())
    shared = found.validation["scores"].keys() & experiment["scores"].keys()
    assert experiment["metric"] in shared
    for metric in shared:
        here, there = (
            document["scores"][metric] for document in (found.validation, experiment)
        )
        assert here["value"] == pytest.approx(there["value"], abs=1e-6), metric


def test_training_cases_among_new_ones_are_left_out_and_named(
    study: Study, tmp_path: Path
) -> None:
    data = tmp_path / "mixed"
    shutil.copytree(study.external, data)
    shutil.copy(study.training / "t001.h5", data / "renamed.h5")  # by its embeddings
    shutil.copy(study.external / "e002.h5", data / "T003.h5")  # by its name
    rows = (study.root / "external.csv").read_text().splitlines()
    like = next(row for row in rows if row.startswith("e002,")).split(",")
    rows += [",".join(["renamed", "new", *like[2:]])]
    rows += [",".join(["T003", "other", *like[2:]])]
    labels = tmp_path / "mixed.csv"
    labels.write_text("\n".join(rows) + "\n")
    told = predict(
        study.model("binary"), data, out=tmp_path / "out", labels=labels, device="cpu"
    ).validation
    assert told["validation"] == "external" and told["cases"] == 70
    why = {one["case"]: one["why"] for one in told["left_out"]}
    assert why == {
        "new": "the embeddings of a training slide with another name",
        "other": "part of the training study",
    }
    alone, _ = study.validate("binary", tmp_path / "alone")
    assert told["outcomes"] == alone["outcomes"]


def test_another_patient_id_of_a_training_case_is_known(
    study: Study, tmp_path: Path
) -> None:
    """A new slide of a training patient: the table says whose it is."""
    data = tmp_path / "new"
    data.mkdir()
    rng = np.random.default_rng(5)
    for name in ("n1", "n2", "n3"):
        write_embeddings(data / f"{name}.h5", rng.normal(size=(20, DIM)))
    labels = tmp_path / "new.csv"
    labels.write_text(
        "slide_id,patient_id,grade\nn1,TCASE7,low\nn2,p2,high\nn3,p3,low\n"
    )
    told = predict(
        study.model("binary"), data, out=tmp_path, labels=labels, device="cpu"
    ).validation
    assert told["left_out"] == [{"case": "TCASE7", "why": "part of the training study"}]
    assert told["cases"] == 2 and told["interval"] == [None, None]


def test_slides_that_nobody_labelled_join_no_labelled_case(
    study: Study, tmp_path: Path
) -> None:
    data = tmp_path / "new"
    data.mkdir()
    rng = np.random.default_rng(6)
    names = ["TCGA-AA-0001-01", "TCGA-AA-0001-02", "x1", "x2", "x3"]
    for name in names:
        write_embeddings(data / f"{name}.h5", rng.normal(size=(20, DIM)))
    labels = tmp_path / "new.csv"
    labels.write_text(
        "slide_id,grade\nTCGA-AA-0001-01,low\nx1,high\nx2,low\ngone,low\n"
    )
    found = predict(
        study.model("binary"), data, out=tmp_path, labels=labels, device="cpu"
    )
    assert found.validation["slides"] == 3
    assert not [row for row in found.rows if row.level == "case"]
    account = " ".join(found.validation["account"])
    assert "no embeddings for 1 labelled slide: gone" in account
    assert "no label for 2 slides with embeddings: TCGA-AA-0001-02, x3" in account


def test_a_model_without_a_lock_says_what_is_missing(
    study: Study, tmp_path: Path
) -> None:
    model = load_model(study.model("binary"))
    path = tmp_path / "old.safetensors"
    save_model(path, replace(model, card=replace(model.card, lock=None)))
    told = predict(
        path,
        study.external,
        out=tmp_path,
        labels=study.root / "external.csv",
        device="cpu",
    ).validation
    (outcome,) = told["outcomes"]
    assert outcome["calls"] is None and outcome["scores"]["auroc"]["value"] > 0.5
    assert "contains no threshold" in told["missing"][0]


@pytest.mark.parametrize(
    ("lock", "message"),
    [
        (Lock(thresholds={"low": 1.5}), "thresholds must be in 0..1"),
        (Lock(times=(1.0, 2.0), hazard=(0.2, 0.1)), "baseline hazard must rise"),
        (Lock(times=(1.0,), hazard=()), "got 0 values at 1 times"),
    ],
)
def test_a_lock_that_makes_no_sense_is_refused(
    study: Study, tmp_path: Path, lock: Lock, message: str
) -> None:
    model = load_model(study.model("binary"))
    path = tmp_path / "bad.safetensors"
    save_model(path, replace(model, card=replace(model.card, lock=lock)))
    with pytest.raises(WeightsError, match=message):
        read_card(path)


@pytest.mark.parametrize("table", [None, {"columns": 1}, {"rows": [[]]}])
def test_a_damaged_description_of_the_training_cohort_is_refused(
    study: Study, table: Any
) -> None:
    data = read_card(study.model("binary")).data
    with pytest.raises(WeightsError, match="must describe its training cohort"):
        beside_training(data, {"table_one": table, "prevalence": {}})
    assert beside_training(data, {})["missing"]


def test_labels_that_do_not_fit_are_refused(study: Study, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("slide_id,grade\ne001,medium\ne002,medium\n")
    model = study.model("binary")
    with pytest.raises(DatasetError, match="one of high, low, got 'medium'"):
        predict(model, study.external, out=tmp_path, labels=labels)
    with pytest.raises(
        ConfigError, match="site and subgroup must be combined with labels"
    ):
        predict(model, study.external, out=tmp_path, target=("grade",))
    labels.write_text("slide_id,dead,days\ne001,0,5\ne002,1,9\n")
    with pytest.raises(DatasetError, match="two cases whose times can be compared"):
        predict(study.model("cox"), study.external, out=tmp_path, labels=labels)


def test_a_validation_of_other_labels_is_replaced_only_on_request(
    study: Study, tmp_path: Path
) -> None:
    study.validate("binary", tmp_path)
    study.validate("binary", tmp_path)  # the same again is welcome
    labels = tmp_path / "others.csv"
    labels.write_text((study.root / "external.csv").read_text().replace("e001", "x"))
    arguments = (study.model("binary"), study.external)
    with pytest.raises(
        InvalidInputError, match=r"got other labels in .*overwrite=True"
    ):
        predict(*arguments, out=tmp_path, labels=labels, device="cpu")
    predict(*arguments, out=tmp_path, labels=labels, device="cpu", overwrite=True)
    page = (tmp_path / "validation_binary" / "index.html").read_text()
    assert "others.csv" in page


def external_table(study: Study) -> list[dict[str, str]]:
    with (study.root / "external.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write_labels(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_sites_subgroups_and_patients_stand_beside_their_scores(
    study: Study, tmp_path: Path
) -> None:
    rows = external_table(study)
    for row in rows:
        number = int(row["case_id"].removeprefix("ecase"))
        row["patient_id"] = f"p{number // 2}"
        row["hospital"] = "NW"[number % 4 > 1]
        row["sex"] = "fm"[number % 3 > 0]
    told = predict(
        study.model("binary"),
        study.external,
        out=tmp_path,
        labels=write_labels(tmp_path / "l" / "sites.csv", rows),
        site="hospital",
        subgroup=("sex",),
        device="cpu",
    ).validation
    assert (told["cases"], told["patients"]) == (70, 35)
    by_column = {table["column"]: table["rows"] for table in told["subgroups"]}
    assert [*by_column] == ["site", "sex"]
    truth = {row["case_id"]: row["grade"] for row in rows}
    cases = case_table(tmp_path / "validation_binary")
    (first, second) = by_column["site"]
    own = [row for row in cases if int(row["case_id"][5:]) % 4 <= 1]
    assert first["subgroup"] == "N" and first["cases"] == len(own)
    positive = [truth[row["case_id"]] == "low" for row in own]
    assert first["positive"] == sum(positive) and first["patients"] == 18
    auroc = judge.roc_auc_score(positive, column(own, "p_low"))
    assert first["value"] == pytest.approx(auroc, **EXACT)
    assert first["low"] < auroc < first["high"] and second["patients"] == 17
    (outcome,) = told["outcomes"]
    assert outcome["calls"]["accuracy"]["units"] == 35
    page = (tmp_path / "validation_binary" / "index.html").read_text()
    assert "70 cases of 35 patients" in page and "By sex" in page
    assert "of 70 cases of 35 patients" in page
    answers = {item["number"]: item["answer"] for item in told["checklist"]}
    assert answers["6a"].startswith("2 sites") and "sex" in answers["23a"]
    assert "not applicable" in answers["12c"]


def test_unknown_patients_are_nowhere_counted(study: Study, tmp_path: Path) -> None:
    rows = [
        {"slide_id": row["slide_id"], "grade": row["grade"]}
        for row in external_table(study)
    ]
    labels = write_labels(tmp_path / "l" / "slides.csv", rows)
    told = predict(
        study.model("binary"), study.external, out=tmp_path, labels=labels, device="cpu"
    ).validation
    assert told["patients"] is None
    page = (tmp_path / "validation_binary" / "index.html").read_text()
    text = re.sub(r"<[^>]*>", " ", page)
    assert "84 cases of unknown patients" in text
    assert text.count("patients unknown") == 2  # beside the score and in the checklist
    assert not re.search(r"\d+ patients?\b", text)


def test_table_1_and_prevalence_stand_beside_those_of_training(
    study: Study, tmp_path: Path
) -> None:
    told, _ = study.validate("binary", tmp_path)
    beside = told["beside_training"]
    assert beside["missing"] == ""
    columns = beside["table_one"]["columns"]
    rows = {
        row[0]: dict(zip(columns, row, strict=True))
        for row in beside["table_one"]["rows"]
    }
    assert rows["cases (% of all)"]["all, test"] == "70 (100 %)"
    assert rows["cases (% of all)"]["all, training"] == "45 (100 %)"
    assert rows["slides"]["all, training"] == "54"
    with (study.root / "training.csv").open(newline="") as file:
        grades = {row["case_id"]: row["grade"] for row in csv.DictReader(file)}
    low = [*grades.values()].count("low")
    assert rows["cases (% of all)"]["grade: low, training"].startswith(f"{low} (")
    (shift,) = beside["prevalence"]
    assert (shift["name"], shift["training"]["hits"]) == ("low", low)
    difference = shift["test"]["value"] - shift["training"]["value"]
    assert shift["difference"]["value"] == pytest.approx(difference, **EXACT)
    assert shift["difference"]["low"] < difference < shift["difference"]["high"]
    assert "t001" not in json.dumps(read_card(study.model("binary")).data)
    survival, _ = study.validate("cox", tmp_path / "cox")
    names = [row[0] for row in survival["beside_training"]["table_one"]["rows"]]
    assert "median follow-up (reverse Kaplan-Meier)" in names


def test_cases_of_a_new_class_are_counted_and_left_out(
    study: Study, tmp_path: Path
) -> None:
    rows = external_table(study)
    for row in rows:
        if row["case_id"] in ("ecase003", "ecase010"):  # one and two slides
            row["grade"] = "unclear"
    labels = write_labels(tmp_path / "l" / "new.csv", rows)
    told = predict(
        study.model("binary"), study.external, out=tmp_path, labels=labels, device="cpu"
    ).validation
    assert told["cases"] == 68
    why = "class 'unclear', which the model does not have"
    assert told["left_out"] == [
        {"case": name, "why": why} for name in ("ecase003", "ecase010")
    ]  # the second one has two slides
    assert "left out 3 slides of a class that the model does not have" in " ".join(
        told["account"]
    )
    left_out = [
        row for row in case_table(tmp_path / "validation_binary") if row["left_out"]
    ]
    assert [row["truth"] for row in left_out] == ["unclear"] * 2
    page = (tmp_path / "validation_binary" / "index.html").read_text()
    assert "2 labelled cases not used" in page
    assert "not used: the model does not have this class" in page
    for row in rows:
        row["grade"] = row["grade"].replace("low", "Low")
    with pytest.raises(DatasetError, match="one of high, low, got 'Low'"):
        predict(
            study.model("binary"),
            study.external,
            out=tmp_path / "other",
            labels=write_labels(tmp_path / "l" / "capitals.csv", rows),
            device="cpu",
        )


def test_a_copy_inside_the_set_and_earlier_tests_are_on_the_page(
    study: Study, tmp_path: Path
) -> None:
    data = tmp_path / "copied"
    shutil.copytree(study.external, data)
    shutil.copy(data / "e002.h5", data / "again.h5")
    rows = external_table(study)
    like = next(row for row in rows if row["slide_id"] == "e002")
    rows.append({**like, "slide_id": "again", "case_id": "another"})
    labels = write_labels(tmp_path / "l" / "copied.csv", rows)
    pages = []
    for task in ("binary", "multiclass"):
        path = study.model(task)
        target = TASKS[task]["target"]
        told = predict(
            path, data, out=tmp_path / task, labels=labels, target=target, device="cpu"
        )
        assert told.validation["copies"]["pairs"] == [["e002", "again"]]
        assert told.validation["uses"]["number"] == 1  # other labels are another set
        pages.append(told.page.read_text())
    words = "1 pair of slides of different patients in the test set look like copies"
    assert words in pages[0]
    model = load_model(study.model("binary"))
    renamed = tmp_path / "second.safetensors"
    save_model(renamed, replace(model, card=replace(model.card, name="second")))
    lines: list[str] = []
    second = predict(
        renamed, data, out=tmp_path / "third", labels=labels, device="cpu",
        on_message=lines.append,
    )  # fmt: skip
    assert second.validation["uses"]["number"] == 2
    words = "this is the 2nd model tested on these cases, after binary ("
    assert any(line.startswith(words) for line in lines)
    assert words in second.page.read_text()


def test_a_rescan_of_a_training_slide_is_named_where_the_training_cohort_is_at_hand(
    study: Study, tmp_path: Path
) -> None:
    data = tmp_path / "rescanned"
    shutil.copytree(study.external, data)
    tiles = read_embeddings(study.training / "t011.h5")
    noise = 0.02 * np.random.default_rng(0).normal(size=tiles.shape)
    write_embeddings(data / "rescan.h5", (tiles + noise)[::-1])
    rows = external_table(study)
    rows.append({**rows[0], "slide_id": "rescan", "case_id": "another"})
    labels = write_labels(tmp_path / "l" / "rescans.csv", rows)
    model = study.model("binary")
    alone = tmp_path / "alone" / "model.safetensors"
    alone.parent.mkdir()
    shutil.copy(model, alone)
    for path, known in ((model, True), (alone, False)):
        out = tmp_path / path.parent.name
        told = predict(path, data, out=out, labels=labels, device="cpu").validation
        copies = told["copies"]
        assert copies["pairs"] == []
        assert copies["pairs_with_training"] == ([["rescan", "t011"]] if known else [])
        words = "'rescan' and 't011'"
        assert any(words in line for line in told["warnings"]) is known
        assert ("not known: rescans" in copies["training"]) is not known


def test_calibration_before_and_after_recalibration(
    study: Study, tmp_path: Path
) -> None:
    told, rows = study.validate("binary", tmp_path)
    (outcome,) = told["outcomes"]
    again = outcome["recalibration"]
    assert again["slope"]["value"] == outcome["calibration"]["slope"]["value"]
    after = again["calibration"]
    assert after["slope"]["low"] < 1 < after["slope"]["high"]
    assert after["intercept"]["value"] == pytest.approx(0, abs=0.1)
    smooth = outcome["smooth_calibration"]
    share = column(rows, "p_low")
    assert (smooth["predicted"][0], smooth["predicted"][-1]) == pytest.approx(
        (share.min(), share.max())
    )
    curve = outcome["decision_curve"]
    place = curve["thresholds"].index(0.4)
    assert curve["called"][place] == (share >= 0.4).sum()
    truth = np.array([row["truth"] for row in rows]) == "low"
    assert curve["events"][place] == (truth & (share >= 0.4)).sum()
    assert curve["low"][place] < curve["model"][place] < curve["high"][place]
    assert (
        "the mean of the 3 models of the folds"
        in (tmp_path / "validation_binary" / "index.html").read_text()
    )


def test_the_command_prints_the_headline_and_the_page(
    study: Study, tmp_path: Path
) -> None:
    words = ["predict", str(study.model("binary")), str(study.external)]
    words += ["--out", str(tmp_path), "--labels", str(study.root / "external.csv")]
    words += ["--target", "grade", "--device", "cpu"]
    done = CliRunner().invoke(build_app(["predict"]), words)
    assert done.exit_code == 0, done.output
    assert "external validation on 70 cases: AUROC 0." in done.output
    assert "84 slides of 70 cases for testing" in done.output
    assert str(tmp_path / "validation_binary" / "index.html") in done.output


def test_the_headline_says_why_it_has_no_interval() -> None:
    validation = {
        "validation": "external",
        "cases": 3,
        "metric": "auroc",
        "value": 1.0,
        "interval": [None, None],
        "averaged": [],
        "scores": {"auroc": {"missing": "fewer than 3 cases of a class"}},
        "positive_words": "high (chosen with --positive)",
        "left_out": [],
    }
    line = _validation_line(validation)
    assert line == (
        "external validation on 3 cases: AUROC 1.00 "
        "(no interval: fewer than 3 cases of a class); "
        "positive class: high (chosen with --positive)"
    )
