import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, r2_score
from tests.predict.planted import write_embeddings

from thinsection.evaluation import intervals, metrics
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.target import Target
from thinsection.predict import tested
from thinsection.predict.config import FitConfig, FoldsConfig, TrainConfig
from thinsection.predict.experiment import train
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.review import OPEN, checklist, subgroup_rows

FIT = FitConfig(epochs=3, lr=1e-2, device="cpu")


def cohort(root: Path) -> Path:
    """44 TCGA cases of 4 sites, the site and the class in the embeddings."""
    rng = np.random.default_rng(0)
    root.mkdir()
    rows = ["slide_id,label,sex,grade"]
    for i in range(44):
        name = f"TCGA-{'ABCD'[i % 4]}1-{i:04}-01Z-00-DX1"
        label = int(rng.random() < 0.5)
        x = rng.normal(size=(12, 8))
        x[:, 0] += 1.0 * label
        x[:, 1] += 4.0 * (i % 4)
        write_embeddings(root / f"{name}.h5", x)
        sex = "" if i == 7 else "FM"[i // 4 % 2]
        rows.append(f"{name},{label},{sex},{label + rng.normal():.4f}")
    rows.append("TCGA-A1-9999-01Z-00-DX1,1,F,1.0")
    rows.append("TCGA-A1-0000-01Z-00-DX1,,F,")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return root


def trained(root: Path, out: Path, *, target: str, repeats: int = 1) -> dict:
    labels = LabelsConfig(
        labels=root / "labels.csv", target=(target,), subgroup=("sex",)
    )
    config = TrainConfig(
        labels=labels,
        head=HeadConfig(head="linear"),
        fit=FIT,
        cross=FoldsConfig(folds=3, repeats=repeats),
    )
    return train(root, out=out, config=config)


def test_the_page_has_what_a_reviewer_asks_for(tmp_path: Path) -> None:
    root = cohort(tmp_path / "f")
    document = trained(root, tmp_path / "e", target="label", repeats=2)
    review = document["review"]
    assert json.loads((tmp_path / "e" / "experiment.json").read_text())["review"]
    rows = {row[0]: row[1] for row in review["table_one"]["rows"]}
    assert rows["cases (% of all)"] == "44 (100 %)"
    assert rows["sites"] == "4"
    assert rows["tiles"] == str(44 * 12)
    assert rows["label missing, not used"] == "1"
    assert rows["no embeddings, not used"] == "1"
    assert [row["repeat"] for row in review["repeats"]] == [1, 2]
    site, sex = review["subgroups"]
    assert [row["subgroup"] for row in site["rows"]] == [f"TCGA-{x}1" for x in "ABCD"]
    by_sex = {row["subgroup"]: row for row in sex["rows"]}
    assert by_sex["missing"]["value"] is None
    assert (
        "at least 5 patients of each class are needed" in by_sex["missing"]["missing"]
    )
    assert by_sex["F"]["low"] < by_sex["F"]["value"] < by_sex["F"]["high"]
    assert review["sites"]["permuted"]["value"] > 0.8
    assert review["sites"]["permuted"]["p_value"] == pytest.approx(0.01)
    assert review["permuted"]["metric"] == "AUROC"
    page = (tmp_path / "e" / "index.html").read_text()
    for words in ("Table 1", "By site", "By sex", "Decision curve", "TRIPOD+AI"):
        assert words in page
    # a p value has its null hypothesis, an interval of a subgroup and a band its unit
    assert page.count("p = ") == page.count("Null hypothesis: ") == 2
    assert "Intervals over the patients of each row: DeLong" in page
    assert "The AUROC is not the area under this curve" in page
    assert page.count("resamples of the 44 patients") == 2
    # a case that two repetitions test counts once
    assert by_sex["F"]["positive"] <= by_sex["F"]["cases"] == by_sex["F"]["patients"]
    assert page.count(OPEN) > 10


def test_values_have_r2_and_mae_of_scikit_learn(tmp_path: Path) -> None:
    root = cohort(tmp_path / "f")
    document = trained(root, tmp_path / "e", target="grade")
    lines = np.genfromtxt(
        tmp_path / "e" / "predictions.csv",
        delimiter=",",
        names=True,
        dtype=None,
        encoding="utf-8",
    )
    truth, answer = lines["truth_grade"], lines["grade"]
    scores = document["scores"]
    assert scores["r2"]["value"] == pytest.approx(r2_score(truth, answer), abs=1e-9)
    error = mean_absolute_error(truth, answer)
    assert scores["mae"]["value"] == pytest.approx(error, abs=1e-9)
    assert document["review"]["permuted"]["metric"] == "Pearson correlation"


def test_a_subgroup_has_the_figures_of_its_cases_alone() -> None:
    rng = np.random.default_rng(1)
    n = 60
    truth = rng.integers(0, 2, n).astype(float)
    p = 1 / (1 + np.exp(-rng.normal(size=n) - truth))
    rows = tested.Tested(
        target=Target(kind="binary", columns=("y",), names=("no", "yes")),
        cases=tuple(f"c{i}" for i in range(n)),
        groups=Groups("patients", tuple(f"p{i}" for i in range(n))),
        slides=tuple((f"s{i}",) for i in range(n)),
        fold=np.arange(n) % 3,
        truth=truth[:, None],
        answers=np.stack([1 - p, p], axis=1),
    )
    label_by_case = {f"c{i}": "few" if i < 3 else "ab"[i % 2] for i in range(n)}
    found = {row["subgroup"]: row for row in subgroup_rows(rows, label_by_case, seed=4)}
    for name in "ab":
        members = [i for i in range(n) if label_by_case[f"c{i}"] == name]
        alone = rows.take(np.array(members))
        scores = metrics.all_scores(alone.scorers, len(members))
        own = intervals.interval(
            alone.sampling, alone.scorers["auroc"], "auroc", seed=4
        )
        assert found[name]["value"] == scores["auroc"]
        assert (found[name]["low"], found[name]["high"]) == (own.low, own.high)
        assert found[name]["cases"] == len(members)
    assert found["few"]["value"] is None
    assert found["few"]["missing"]


def test_items_without_an_answer_are_left_to_the_authors() -> None:
    items = checklist({"13": "none"})
    assert len(items) == len({item.number for item in items}) == 52
    assert [item.answer for item in items if item.number == "13"] == ["none"]
    assert sum(item.answer == OPEN for item in items) == 51
    with pytest.raises(KeyError, match=r"TRIPOD\+AI"):
        checklist({"99": "x"})
