"""The positive class of two: chosen or the rarer one, named everywhere, and mirrored exactly."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from sklearn import metrics as judge
from tests.predict.planted import write_embeddings

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.predict.config import TrainConfig
from thinsection.predict.model_file import card_markdown, read_card
from thinsection.predict.predicting import predict
from thinsection.weights.files import MODEL_KEY, write_tensors

DIM = 6
WORDS = {1: "mutated", 0: "wild"}


def cases(folder: Path, *, positive: int, negative: int, seed: int) -> list[int]:
    """Embeddings of s00.h5, ... whose first channel follows the class of the case."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    classes = rng.permutation([1] * positive + [0] * negative).tolist()
    for number, label in enumerate(classes):
        tiles = rng.normal(size=(12, DIM))
        tiles[:, 0] += label + rng.normal()
        write_embeddings(folder / f"{folder.name}{number:02}.h5", tiles)
    return classes


def table(folder: Path, classes: list[int], words: dict[int, str], name: str) -> Path:
    """A table of labels in some words beside the folder."""
    path = folder.parent / f"{folder.name}_{name}.csv"
    rows = [f"{folder.name}{i:02},{words[label]}" for i, label in enumerate(classes)]
    path.write_text("\n".join(["slide_id,status", *rows]) + "\n")
    return path


def trained(data: Path, labels: Path, out: Path, **settings: object) -> dict[str, Any]:
    chosen = {
        "labels": labels,
        "target": ["status"],
        "head": "linear",
        "epochs": 4,
        "lr": 0.05,
        "folds": 3,
        "device": "cpu",
        **settings,
    }
    return ts.train(data, out=out, config=replace_flat(TrainConfig(), chosen))


class Cohorts:
    """A training cohort, a cohort of another place, and the classes of both."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.training = root / "t"
        self.other = root / "e"
        self.classes = cases(self.training, positive=12, negative=20, seed=0)
        self.other_classes = cases(self.other, positive=22, negative=18, seed=1)

    def tested(
        self, name: str, words: dict[int, str], **settings: object
    ) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, str]]]:
        """experiment.json, validation.json and cases.csv of a model in some words."""
        labels = table(self.training, self.classes, words, name)
        out = self.root / "experiments" / name
        experiment = trained(self.training, labels, out, **settings)
        external = table(self.other, self.other_classes, words, name)
        found = predict(
            out / "model.safetensors",
            self.other,
            out=self.root / "tested" / name,
            labels=external,
            device="cpu",
        )
        assert found.page is not None and found.validation is not None
        with (found.page.parent / "cases.csv").open(newline="") as file:
            return experiment, found.validation, list(csv.DictReader(file))


@pytest.fixture(scope="module")
def cohorts(tmp_path_factory: pytest.TempPathFactory) -> Cohorts:
    return Cohorts(tmp_path_factory.mktemp("cohorts"))


MIRRORED = {
    "sensitivity": "specificity",
    "specificity": "sensitivity",
    "ppv": "npv",
    "npv": "ppv",
    "accuracy": "accuracy",
}


def calls(validation: dict[str, Any]) -> dict[str, float]:
    (outcome,) = validation["outcomes"]
    return {name: outcome["calls"][name]["value"] for name in MIRRORED}


def test_the_rarer_class_is_positive_and_the_other_choice_mirrors_its_figures(
    cohorts: Cohorts,
) -> None:
    experiment, validation, _ = cohorts.tested("rarer", WORDS)
    assert experiment["positive"] == validation["positive"] == "mutated"
    swapped, mirrored, _ = cohorts.tested("swapped", WORDS, positive="wild")
    assert swapped["positive"] == mirrored["positive"] == "wild"
    for first, second in ((experiment, swapped), (validation, mirrored)):
        for metric in ("auroc", "brier"):
            of_first = first["scores"][metric]
            assert of_first["value"] == pytest.approx(second["scores"][metric]["value"])
        assert first["scores"]["auprc"]["value"] != second["scores"]["auprc"]["value"]
    direct, mirror = calls(validation), calls(mirrored)
    assert direct["sensitivity"] != direct["specificity"]
    for name, other in MIRRORED.items():
        assert direct[name] == pytest.approx(mirror[other])
    thresholds = [v["outcomes"][0]["threshold"] for v in (validation, mirrored)]
    assert sum(thresholds) == pytest.approx(1)


@pytest.mark.parametrize("words", [{1: "a", 0: "b"}, {1: "wild", 0: "mutated"}])
def test_other_words_for_the_classes_change_no_figure(
    cohorts: Cohorts, words: dict[int, str]
) -> None:
    experiment, validation, _ = cohorts.tested("first", WORDS)
    name = f"copy_{words[1]}"
    relabelled, copy, _ = cohorts.tested(name, words)
    assert relabelled["positive"] == copy["positive"] == words[1]
    assert relabelled["scores"] == experiment["scores"]
    assert copy["scores"] == validation["scores"]
    assert calls(copy) == calls(validation)


@pytest.mark.parametrize("positive", ["mutated", "wild"])
def test_figures_are_those_of_scikit_learn_with_pos_label(
    cohorts: Cohorts, positive: str
) -> None:
    _, validation, rows = cohorts.tested(f"judged_{positive}", WORDS, positive=positive)
    truth = [row["truth"] for row in rows]
    called = [row["class_at_threshold"] for row in rows]
    probability = [float(row[f"p_{positive}"]) for row in rows]
    found = calls(validation)
    recall = judge.recall_score(truth, called, pos_label=positive)
    precision = judge.precision_score(truth, called, pos_label=positive)
    assert found["sensitivity"] == pytest.approx(recall)
    assert found["ppv"] == pytest.approx(precision)
    is_positive = [one == positive for one in truth]
    average = judge.average_precision_score(is_positive, probability)
    area = judge.roc_auc_score(is_positive, probability)
    assert validation["scores"]["auprc"]["value"] == pytest.approx(average)
    assert validation["scores"]["auroc"]["value"] == pytest.approx(area)
    assert validation["outcomes"][0]["name"] == positive
    assert validation["outcomes"][0]["positive"] == sum(is_positive)


def test_out_of_fold_figures_are_of_the_chosen_class(cohorts: Cohorts) -> None:
    experiment, _, _ = cohorts.tested("folds", WORDS, positive="wild")
    path = cohorts.root / "experiments" / "folds" / "predictions.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    is_wild = [row["truth"] == "wild" for row in rows]
    average = judge.average_precision_score(is_wild, [float(r["p_wild"]) for r in rows])
    assert experiment["scores"]["auprc"]["value"] == pytest.approx(average)


def test_each_page_and_the_card_name_the_positive_class_and_the_reason(
    cohorts: Cohorts,
) -> None:
    experiment, validation, _ = cohorts.tested("named", WORDS)
    out = cohorts.root / "experiments" / "named"
    pages = [out / "index.html"]
    pages += sorted((cohorts.root / "tested" / "named").glob("validation_*/index.html"))
    assert len(pages) == 2
    card = read_card(out / "model.safetensors")
    texts = [page.read_text() for page in pages] + [card_markdown(card)]
    for text in texts:
        assert "mutated (the rarer class in training" in text
    for text in texts[:2]:
        assert "Positive class: mutated." in text  # under the curves
    assert "mutated (the rarer class" in experiment["positive_words"]
    assert "mutated (the rarer class" in validation["positive_words"]
    assert any("positive class: mutated" in line for line in experiment["account"])


def test_of_equally_frequent_classes_the_last_in_the_alphabet_is_positive(
    tmp_path: Path,
) -> None:
    classes = cases(tmp_path / "t", positive=9, negative=9, seed=2)
    for name, words, last in (
        ("words", {1: "a", 0: "b"}, "b"),
        ("numbers", {1: "9", 0: "10"}, "10"),
    ):
        labels = table(tmp_path / "t", classes, words, name)
        experiment = trained(tmp_path / "t", labels, tmp_path / name)
        assert experiment["positive"] == last
        assert "equally frequent" in experiment["positive_words"]


def test_a_positive_class_that_does_not_exist_is_answered_with_the_nearest(
    cohorts: Cohorts, tmp_path: Path
) -> None:
    labels = table(cohorts.training, cohorts.classes, WORDS, "wrong")
    with pytest.raises(ConfigError, match=r"got 'mutate'; did you mean 'mutated'\?"):
        trained(cohorts.training, labels, tmp_path, positive="mutate")
    numbers = table(cohorts.training, cohorts.classes, {1: "1.0", 0: "0"}, "numbers")
    experiment = trained(cohorts.training, numbers, tmp_path / "n", positive="1.0")
    assert experiment["positive"] == "1"
    with pytest.raises(ConfigError, match="positive must be set for two classes only"):
        trained(cohorts.training, numbers, tmp_path, positive="1", task="regression")


def test_another_positive_class_is_another_model_but_trains_nothing_again(
    cohorts: Cohorts, tmp_path: Path
) -> None:
    labels = table(cohorts.training, cohorts.classes, WORDS, "again")
    trained(cohorts.training, labels, tmp_path)
    folds = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "folds").glob("*.safe*")}
    with pytest.raises(InvalidInputError, match="positive class mutated, now wild"):
        trained(cohorts.training, labels, tmp_path, positive="wild")
    config = replace_flat(
        TrainConfig(),
        {
            "labels": labels,
            "target": ["status"],
            "head": "linear",
            "epochs": 4,
            "lr": 0.05,
            "folds": 3,
            "device": "cpu",
            "positive": "wild",
        },
    )
    ts.train(cohorts.training, out=tmp_path, config=config, overwrite=True)
    assert read_card(tmp_path / "model.safetensors").target.positive == "wild"
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "folds").glob("*.safe*")}
    assert after == folds


def as_earlier_version(model: Path) -> None:
    """Takes the positive class out of a model file; its classes are in alphabetical order."""
    with safe_open(model, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        card = json.loads(file.metadata()[MODEL_KEY])
    for target in (card["target"], *(member["target"] for member in card["members"])):
        assert target["names"] == ["high", "low"]
        del target["positive"], target["positive_by"]
    write_tensors(model, tensors, {MODEL_KEY: json.dumps(card)})


def test_a_model_of_an_earlier_version_keeps_its_positive_class_and_says_so(
    cohorts: Cohorts, tmp_path: Path
) -> None:
    words = {1: "low", 0: "high"}
    _, today, _ = cohorts.tested("today", words)
    labels = table(cohorts.other, cohorts.other_classes, words, "old")
    model = tmp_path / "model.safetensors"
    newer = cohorts.root / "experiments" / "today" / "model.safetensors"
    model.write_bytes(newer.read_bytes())
    as_earlier_version(model)
    found = predict(
        model, cohorts.other, out=tmp_path / "out", labels=labels, device="cpu"
    ).validation
    assert found is not None
    assert found["positive"] == today["positive"] == "low"
    assert "models of earlier versions" in found["positive_words"]
    assert calls(found) == pytest.approx(calls(today))


def test_an_experiment_of_another_positive_class_is_compared_by_the_same_areas(
    cohorts: Cohorts, tmp_path: Path
) -> None:
    labels = table(cohorts.training, cohorts.classes, WORDS, "pair")
    first = trained(cohorts.training, labels, tmp_path / "first")
    config = {"labels": labels, "target": ["status"], "head": "linear", "folds": 3}
    more = {"epochs": 4, "lr": 0.05, "device": "cpu", "positive": "wild"}
    second = ts.train(
        cohorts.training,
        out=tmp_path / "second",
        config=replace_flat(TrainConfig(), {**config, **more}),
        against=[tmp_path / "first"],
    )
    assert first["scores"]["auroc"]["value"] == second["scores"]["auroc"]["value"]
    assert second["against"][0]["value"] == pytest.approx(0)


def test_epochs_are_those_of_each_start(tmp_path: Path) -> None:
    classes = cases(tmp_path / "t", positive=10, negative=10, seed=3)
    labels = table(tmp_path / "t", classes, WORDS, "labels")
    lines: list[str] = []
    config = {"labels": labels, "target": ["status"], "folds": 2, "device": "cpu"}
    document = ts.train(
        tmp_path / "t",
        out=tmp_path / "out",
        config=replace_flat(TrainConfig(), {**config, "epochs": 2, "lr": 1e-6}),
        on_message=lines.append,
    )
    for fold in document["folds"]:
        assert fold["epochs"] == [2, 2, 2]
        assert 1 <= fold["best_epoch"] <= 2 and 1 <= fold["best_start"] <= 3
    told = [line for line in lines if line.startswith("fold")]
    assert len(told) == 2
    for line in told:
        assert re.search(
            r"best epoch [12] of start [123], 3 random starts of 2 epochs each", line
        )


def test_the_page_shows_the_predicted_class_beside_the_true_one_and_wrong_ones_first(
    cohorts: Cohorts,
) -> None:
    cohorts.tested("page", WORDS)
    out = cohorts.root / "experiments" / "page"
    page = (out / "index.html").read_text()
    with (out / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    wrong = {row["case_id"] for row in rows if row["prediction"] != row["truth"]}
    cards = re.findall(r"<figure>\s*<strong>(\w+)</strong>(.*?)</figure>", page, re.S)
    assert len(cards) == 12 and 0 < len(wrong) < len(rows)
    assert (
        f"{len(wrong)} of {len(rows)} cases are wrong. 12 of {len(rows)} cases" in page
    )
    marked = ["wrong</strong>" in card for _, card in cards]
    assert marked == sorted(marked, reverse=True)
    assert {
        case for (case, _), mark in zip(cards, marked, strict=True) if mark
    } <= wrong
    by_case = {row["case_id"]: row for row in rows}
    for case, card in cards:
        assert f"true status</span> {by_case[case]['truth']}" in card
        assert f"predicted status</span> {by_case[case]['prediction']}" in card


def test_scores_of_few_cases_have_two_decimals(cohorts: Cohorts) -> None:
    cohorts.tested("decimals", WORDS)
    out = cohorts.root / "experiments" / "decimals"
    pages = [out / "index.html"]
    pages += (cohorts.root / "tested" / "decimals").glob("validation_*/index.html")
    card = card_markdown(read_card(out / "model.safetensors"))
    texts = [
        re.sub(r"<pre>.*?</pre>", "", page.read_text(), flags=re.S) for page in pages
    ]
    assert len(texts) == 2
    for text in (*texts, card):
        cells = re.sub(r"base64,[\w+/=]+", "", text)
        # a version such as 2.0.1234 is no score, and a p value of a test has its own digits
        assert not re.findall(r"(?<![\d.])[-+]?\d\.\d{4,}\b", cells)
