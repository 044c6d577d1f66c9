"""Targets of more kinds: ordered classes, several labels with blanks, values."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from sklearn.metrics import (
    brier_score_loss,
    cohen_kappa_score,
    mean_absolute_error,
    roc_auc_score,
)
from tests.predict.planted import write_embeddings
from tests.predict.test_training import config_for, files_of

from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import read_cohort
from thinsection.evaluation.target import Target
from thinsection.files.atomic import read_table
from thinsection.predict.config import FitConfig
from thinsection.predict.experiment import train
from thinsection.predict.heads.config import HEADS, HeadConfig
from thinsection.predict.heads.head import OrdinalHead, Thresholds, head_for
from thinsection.predict.pages import _copy_pairs
from thinsection.predict.predicting import (
    PredictRunConfig,
    ValidationConfig,
    predict,
)
from thinsection.predict.training import criterion_of

LINEAR = HeadConfig(head="linear")
QUICK = FitConfig(epochs=30, patience=10, lr=2e-2, device="cpu")
# housing satisfaction in Copenhagen, counts of low, medium, high satisfaction by influence (3),
# type (4: tower, apartment, atrium, terrace) and contact (2); Madsen 1976, `housing` of R's MASS
HOUSING = """21 21 28 34 22 36 10 11 36 61 23 17 43 35 40 26 18 54 13 9 10 8 8 12 6 7 9
18 6 7 15 13 13 7 5 11 14 19 37 17 23 40 3 5 23 78 46 43 48 45 86 15 25 62 20 23 20
10 22 24 7 10 21 57 23 13 31 21 13 5 6 13"""
# of Venables and Ripley, Modern Applied Statistics with S, 4th edition, page 204: polr
POLR = {
    "coefficients": [0.5664, 1.2888, -0.5724, -0.3662, -1.0910, 0.3603],
    "thresholds": [-0.4961, 0.6907],
    "deviance": 3479.149,
}


def target_of(count: int) -> Target:
    names = tuple(str(i + 1) for i in range(count))
    return Target(kind="ordinal", columns=("isup",), names=names)


def test_the_loss_is_the_likelihood_of_proportional_odds_in_r() -> None:
    counts = np.array(HOUSING.split(), dtype=float).reshape(2, 4, 3, 3)
    assert counts.sum() == 1681
    influence, kind, contact = np.eye(3)[:, 1:], np.eye(4)[:, 1:], np.array([[0], [1]])
    rows = [
        (np.r_[influence[i], kind[t], contact[c]], counts[c, t, i])
        for c in range(2) for t in range(4) for i in range(3)
    ]  # fmt: skip
    x = torch.tensor(np.stack([row for row, _ in rows]), dtype=torch.float64)
    weights = torch.tensor(np.stack([count for _, count in rows]))
    head = OrdinalHead(6, 3, LINEAR).double()
    link = head.thresholds
    with torch.no_grad():
        head.score.classifier.weight[:] = torch.tensor([POLR["coefficients"]])
        head.score.classifier.bias.zero_()
        first, second = POLR["thresholds"]
        link.first[:] = first
        link.log_gaps[:] = np.log(second - first)
        deviance = -2 * sum(
            (weights[i] * head(x[i : i + 1]).logits).sum() for i in range(len(x))
        )
    # published to four digits
    assert float(deviance) == pytest.approx(POLR["deviance"], abs=2e-3)


def test_thresholds_rise_and_classes_sum_to_one_whatever_the_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (3, 5):
        link = Thresholds(count)
        with torch.no_grad():
            for weight in link.parameters():
                weight.copy_(3 * torch.randn(weight.shape, generator=generator))
            score = 10 * torch.randn(50, 1, generator=generator)
            p = link(score).exp()
        assert p.shape == (50, count)
        np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
        below = p.cumsum(1)[:, :-1].double().logit()
        # the odds are proportional: the distance of thresholds is that of all cases
        inner = ((below > -6) & (below < 6)).all(1)
        gaps = below[inner].diff(dim=1)
        np.testing.assert_allclose(gaps, gaps[:1].expand_as(gaps), rtol=2e-2)


def test_the_classes_of_a_new_head_are_equally_probable() -> None:
    p = Thresholds(5)(torch.zeros(1)).exp()
    np.testing.assert_allclose(p.detach(), np.full(5, 0.2), atol=1e-6)


@pytest.mark.parametrize("head", [*HEADS.names()])
def test_every_head_learns_an_order_or_says_why_not(head: str) -> None:
    settings = HeadConfig(head=head, hidden_dim=16, attention_dim=4)
    if head.startswith("clam"):
        with pytest.raises(ConfigError, match="use 'abmil'"):
            head_for(settings, 8, target_of(4))
        return
    built = head_for(settings, 8, target_of(4)).train()
    cells = torch.stack([torch.arange(6), torch.zeros(6, dtype=torch.int64)], dim=1)
    output = built(torch.randn(6, 8), cells)
    assert output.logits.shape == (4,)
    label = torch.tensor(2)
    criterion = criterion_of(target_of(4), torch.arange(4), weighted=False)
    built.loss(output, label, criterion).backward()
    assert all(weight.grad is not None for weight in built.thresholds.parameters())


def test_a_head_that_knows_no_order_is_refused_before_training(tmp_path: Path) -> None:
    root = graded(tmp_path / "f", cases=30, classes=3)
    clam = HeadConfig(head="clam_sb", hidden_dim=8, attention_dim=4)
    config = config_for(root, head=clam, fit=QUICK, task="ordinal")
    with pytest.raises(ConfigError, match="head must not be clam_sb or clam_mb"):
        train(root, out=tmp_path / "e", config=config)
    assert not (tmp_path / "e" / "folds").exists()


def graded(root: Path, *, cases: int = 60, classes: int = 5, seed: int = 0) -> Path:
    """Embeddings whose first channel rises with a grade, which is read with an error."""
    rng = np.random.default_rng(seed)
    root.mkdir()
    latent = rng.normal(size=cases)
    noisy = latent + 0.3 * rng.logistic(size=cases)
    cuts = np.quantile(noisy, np.linspace(0, 1, classes + 1)[1:-1])
    grade = np.searchsorted(cuts, noisy) + 1
    lines = ["slide_id,label"]
    for i in range(cases):
        x = rng.normal(size=(12, 4))
        x[:, 0] += 2 * latent[i]
        write_embeddings(root / f"s{i:03}.h5", x)
        lines.append(f"s{i:03},ISUP {grade[i]}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def test_a_planted_order_is_found_scored_and_predicted_again(tmp_path: Path) -> None:
    root = graded(tmp_path / "f")
    config = config_for(root, head=LINEAR, fit=QUICK, task="ordinal")
    lines: list[str] = []
    document = train(root, out=tmp_path / "e", config=config, on_message=lines.append)
    assert any("ISUP 1 < ISUP 2 < ISUP 3 < ISUP 4 < ISUP 5" in line for line in lines)
    assert document["metric"] == "weighted_kappa"
    assert document["value"] > 0.6
    rows = read_table(tmp_path / "e" / "predictions.csv")
    truth = [int(row["truth"][-1]) for row in rows]
    predicted = [int(row["prediction"][-1]) for row in rows]
    scores = document["scores"]
    kappa = cohen_kappa_score(truth, predicted, weights="quadratic")
    assert scores["weighted_kappa"]["value"] == pytest.approx(kappa, abs=1e-12)
    assert scores["mae"]["value"] == pytest.approx(
        mean_absolute_error(truth, predicted)
    )
    for score in (scores["weighted_kappa"], scores["mae"]):
        assert score["low"] < score["value"] < score["high"]
    assert {*scores} == {"weighted_kappa", "mae", "balanced_accuracy"}
    page = (tmp_path / "e" / "index.html").read_text()
    assert "ISUP 1 &lt; ISUP 2" in page
    model = tmp_path / "e" / "model.safetensors"
    again = {
        row["slide_id"]: row
        for row in read_table(predict(model, root, out=tmp_path / "p").table)
    }
    for row in rows:
        for name in (f"p_ISUP {k}" for k in range(1, 6)):
            other = float(again[row["slide_id"]][name])
            assert other == pytest.approx(float(row[name]), abs=1e-6)


def test_new_cases_test_a_model_of_an_order(tmp_path: Path) -> None:
    root = graded(tmp_path / "f", classes=3)
    config = config_for(root, head=LINEAR, fit=QUICK, task="ordinal")
    train(root, out=tmp_path / "e", config=config)
    new = graded(tmp_path / "new", classes=3, seed=1)
    for path in sorted(new.glob("s*.h5")):
        path.rename(path.with_name(f"n{path.name[1:]}"))
    table = new / "labels.csv"
    table.write_text(table.read_text().replace("\ns", "\nn"))
    answered = predict(
        tmp_path / "e" / "model.safetensors", new, out=tmp_path / "p",
        config=PredictRunConfig(validation=ValidationConfig(labels=table)),
    )  # fmt: skip
    found = answered.validation
    assert found is not None
    rows = read_table(next((tmp_path / "p").rglob("cases.csv")))
    pairs = [(int(row["truth"][-1]), int(row["prediction"][-1])) for row in rows]
    kappa = cohen_kappa_score(*zip(*pairs, strict=True), weights="quadratic")
    assert found["value"] == pytest.approx(kappa)
    assert [one["name"] for one in found["outcomes"]] == [
        "ISUP 2 or higher",
        "ISUP 3 or higher",
    ]
    positives = [sum(truth >= k for truth, _ in pairs) for k in (2, 3)]
    assert [one["positive"] for one in found["outcomes"]] == positives


def test_classes_without_a_number_have_no_order(tmp_path: Path) -> None:
    root = graded(tmp_path / "f", classes=3)
    table = root / "labels.csv"
    text = table.read_text()
    for number, word in enumerate(("low", "middle", "high"), start=1):
        text = text.replace(f"ISUP {number}", word)
    table.write_text(text)
    config = config_for(root, head=LINEAR, fit=QUICK, task="ordinal")
    with pytest.raises(DatasetError, match="classes of label must have an order"):
        train(root, out=tmp_path / "e", config=config)
    numbered = ("low=1 low", "middle=2 middle", "high=3 high")
    config = replace(config, labels=replace(config.labels, read=numbered))
    document = train(root, out=tmp_path / "e", config=config)
    assert document["order_words"].startswith("1 low < 2 middle < 3 high")


LABELS = ("er", "pr", "her2")


def labelled(
    root: Path, *, cases: int = 60, blank: float = 0.25, seed: int = 0
) -> Path:
    """Embeddings with a channel for each label; some cells of the table are blank."""
    rng = np.random.default_rng(seed)
    root.mkdir()
    flags = rng.random((cases, len(LABELS))) < 0.45
    hidden = rng.random(flags.shape) < blank
    hidden[: cases // 3] = False
    lines = [f"slide_id,case_id,patient_id,{','.join(LABELS)}"]
    for i in range(cases):
        x = rng.normal(size=(12, 5))
        x[:, : len(LABELS)] += flags[i]
        write_embeddings(root / f"s{i:03}.h5", x)
        cells = [
            ("NA", "")[i % 2] if blanked else str(int(flag))
            for flag, blanked in zip(flags[i], hidden[i], strict=True)
        ]
        lines.append(f"s{i:03},c{i:03},p{i // 2:03},{','.join(cells)}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def test_a_masked_loss_is_that_of_the_cases_of_each_label() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 3, generator=generator)
    y = (torch.rand(30, 3, generator=generator) < 0.4).float()
    y[torch.rand(30, 3, generator=generator) < 0.3] = torch.nan
    y[5] = torch.nan
    target = Target(kind="multilabel", columns=LABELS, names=LABELS)
    for weighted in (False, True):
        criterion = criterion_of(target, y, weighted=weighted)
        masked = sum(criterion(z, row) for z, row in zip(logits, y, strict=True))
        parts = 0.0
        for k, name in enumerate(LABELS):
            known = ~y[:, k].isnan()
            one = Target(kind="multilabel", columns=(name,), names=(name,))
            alone = criterion_of(one, y[known][:, [k]], weighted=weighted)
            parts += sum(
                alone(z, row)
                for z, row in zip(logits[known][:, [k]], y[known][:, [k]], strict=True)
            )
        assert float(masked) == pytest.approx(float(parts) / 3, rel=1e-6)


@pytest.mark.parametrize("head", ["clam_sb", "dsmil", "abmil"])
def test_a_blank_label_moves_no_weight_of_its_output(head: str) -> None:
    settings = HeadConfig(
        head=head, hidden_dim=16, attention_dim=4, subtyping=True, dropout=0.0
    )
    target = Target(kind="multilabel", columns=LABELS, names=LABELS)
    torch.manual_seed(0)
    built = head_for(settings, 8, target).train()
    x = torch.randn(20, 8)
    y = torch.tensor([1.0, torch.nan, 0.0])
    criterion = criterion_of(target, y[None], weighted=False)
    built.loss(built(x), y, criterion).backward()
    for name, weight in built.named_parameters():
        if weight.grad is None:  # of an instance classifier that nothing asked
            assert name.startswith("instance_classifiers.1")
            continue
        assert weight.grad.isfinite().all()
        if name.startswith("classifier") and head != "dsmil":
            assert not weight.grad[1].any()
            assert weight.grad[0].any()


def test_each_label_is_scored_on_the_cases_that_have_it(tmp_path: Path) -> None:
    root = labelled(tmp_path / "f")
    config = config_for(root, head=LINEAR, fit=QUICK, target=LABELS)
    document = train(root, out=tmp_path / "e", config=config)
    rows = read_table(tmp_path / "e" / "predictions.csv")
    assert len(rows) == 60
    means = []
    for label in document["labels"]:
        name = label["name"]
        known = [row for row in rows if row[f"truth_{name}"] != ""]
        assert 0 < len(known) < 60
        assert label["cases"] == len(known)
        truth = np.array([float(row[f"truth_{name}"]) for row in known])
        p = np.array([float(row[f"p_{name}"]) for row in known])
        assert label["positive"] == truth.sum()
        # pairs of the same fold
        right = 0.0
        pairs = 0
        for fold in {row["fold"] for row in known}:
            of_fold = np.array([row["fold"] == fold for row in known])
            weight = int((truth[of_fold] == 1).sum() * (truth[of_fold] == 0).sum())
            if weight:
                right += weight * roc_auc_score(truth[of_fold], p[of_fold])
                pairs += weight
        assert label["scores"]["auroc"]["value"] == pytest.approx(right / pairs)
        assert label["scores"]["brier"]["value"] == pytest.approx(
            brier_score_loss(truth, p)
        )
        means.append(label["scores"]["auroc"]["value"])
    assert document["value"] == pytest.approx(np.mean(means))
    assert document["value"] > 0.75
    assert "30 patients" in document["interval_by"]
    page = (tmp_path / "e" / "index.html").read_text()
    assert "mean over 3 labels" in page
    assert re.search(r"\bnan\b", re.sub(r"base64,[^\"]*", "", page)) is None
    words = next(line for line in document["account"] if line.startswith("er, pr"))
    assert "blank)" in words


def test_blank_labels_test_a_model_on_new_cases(tmp_path: Path) -> None:
    root = labelled(tmp_path / "f", cases=40)
    config = config_for(root, head=LINEAR, fit=QUICK, target=LABELS)
    train(root, out=tmp_path / "e", config=config)
    new = labelled(tmp_path / "new", cases=40, seed=1)
    for path in sorted(new.glob("s*.h5")):
        path.rename(path.with_name(f"n{path.name[1:]}"))
    table = new / "labels.csv"
    lines = table.read_text().splitlines()
    renamed = [f"n{line[1:5]}d{line[6:10]}q{line[11:]}" for line in lines[1:]]
    table.write_text("\n".join([lines[0], *renamed]) + "\n")
    answered = predict(
        tmp_path / "e" / "model.safetensors",
        new,
        out=tmp_path / "p",
        config=PredictRunConfig(validation=ValidationConfig(labels=table)),
    )
    found = answered.validation
    assert found is not None
    rows = read_table(next((tmp_path / "p").rglob("cases.csv")))
    assert len(rows) == found["cases"]
    for outcome in found["outcomes"]:
        name = outcome["name"]
        known = [row for row in rows if row[f"truth_{name}"] != ""]
        truth = [float(row[f"truth_{name}"]) for row in known]
        p = [float(row[f"p_{name}"]) for row in known]
        assert outcome["cases"] == len(known) < len(rows)
        auroc = outcome["scores"]["auroc"]["value"]
        assert auroc == pytest.approx(roc_auc_score(truth, p))


def test_rows_of_a_case_fill_each_others_blanks_and_may_not_differ(
    tmp_path: Path,
) -> None:
    root = labelled(tmp_path / "f", cases=20, blank=0.0)
    table = root / "labels.csv"
    lines = [
        "slide_id,case_id,er,pr",
        "s000,a,1,",
        "s001,a,NA,0",
        "s002,b,,",
        "s003,c,0,1",
        "s004,d,,1",
    ]
    table.write_text("\n".join(lines) + "\n")
    columns = LabelsConfig(labels=table, target=("er", "pr"))
    cohort = read_cohort(root, columns)
    assert cohort.cases == ("a", "c", "d")
    assert cohort.values == ((1.0, 0.0), (0.0, 1.0), (None, 1.0))
    assert cohort.unlabelled == 1
    table.write_text("\n".join([*lines, "s005,a,0,0"]) + "\n")
    with pytest.raises(
        DatasetError,
        match=r"er must be the same in all rows of a case, got 1\.0 and 0\.0",
    ):
        read_cohort(root, columns)


def measured(root: Path, *, far: float | None = None) -> Path:
    """Embeddings whose first channel is a value; one case has a value far off."""
    rng = np.random.default_rng(4)
    root.mkdir()
    value = rng.normal(size=40)
    written = 10 + 3 * value + 0.3 * rng.normal(size=40)
    if far is not None:
        written[7] = far
    lines = ["slide_id,label"]
    for i in range(40):
        x = rng.normal(size=(12, 4))
        x[:, 0] += value[i]
        write_embeddings(root / f"s{i:03}.h5", x)
        lines.append(f"s{i:03},{written[i]:.4f}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def test_a_value_far_off_is_named_used_and_does_not_spoil_the_others(
    tmp_path: Path,
) -> None:
    scores = {}
    for name, far in (("usual", None), ("far", 65504.0)):
        root = measured(tmp_path / name, far=far)
        config = config_for(root, head=LINEAR, fit=replace(QUICK, lr=5e-2))
        out = tmp_path / f"e_{name}"
        document = train(root, out=out, config=config)
        lines = [line for line in document["warnings"] if "robust" in line]
        if far is None:
            assert lines == []
        else:
            (line,) = lines
            assert line.startswith("1 value of label lies more than 5 robust")
            assert "'65504.0000' (1) in line 9 (s007)" in line
        rows = read_table(out / "predictions.csv")
        assert len(rows) == 40
        pairs = [
            (float(row["truth_label"]), float(row["label"]))
            for row in rows
            if row["slide_id"] != "s007"
        ]
        scores[name] = float(np.corrcoef(np.array(pairs).T)[0, 1])
    assert scores["usual"] > 0.9
    assert scores["far"] > 0.9


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_unit_of_a_value_changes_no_prediction(
    tmp_path: Path, scale: float
) -> None:
    root = measured(tmp_path / "f")
    config = config_for(root, head=LINEAR, fit=replace(QUICK, epochs=3))
    answers = []
    for factor in (1.0, scale):
        rows = read_table(root / "labels.csv")
        lines = [f"{row['slide_id']},{float(row['label']) * factor!r}" for row in rows]
        (root / "labels.csv").write_text("\n".join(["slide_id,label", *lines]) + "\n")
        train(root, out=tmp_path / f"e{factor}", config=config)
        table = read_table(tmp_path / f"e{factor}" / "predictions.csv")
        answers.append(np.array([float(row["label"]) for row in table]) / factor)
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-3)


def test_the_shipped_mean_is_scored_on_cases_that_every_fold_tests(
    tmp_path: Path,
) -> None:
    root = graded(tmp_path / "f", cases=36, classes=2)
    rows = read_table(root / "labels.csv")
    lines = ["slide_id,fold_0,fold_1"]
    for i, row in enumerate(rows):
        sides = (
            ("test", "test") if i < 12 else (("val", "train"), ("train", "val"))[i % 2]
        )
        lines.append(",".join([row["slide_id"], *sides]))
    splits = tmp_path / "splits.csv"
    splits.write_text("\n".join(lines) + "\n")
    config = config_for(root, head=LINEAR, fit=QUICK)
    given = replace(config, cross=replace(config.cross, splits=splits))
    document = train(root, out=tmp_path / "e", config=given)
    shipped = document["shipped"]
    assert shipped["cases"] == 12
    table = new_answers(tmp_path / "e" / "model.safetensors", root, tmp_path / "p")
    held = [row["slide_id"] for row in rows[:12]]
    truth = [row["label"] == "ISUP 2" for row in rows[:12]]
    auroc = roc_auc_score(truth, [table[name] for name in held])
    assert shipped["score"]["value"] == pytest.approx(auroc)
    page = (tmp_path / "e" / "index.html").read_text()
    assert "Model file: AUROC" in page
    alone = train(root, out=tmp_path / "cv", config=config)["shipped"]
    assert alone["score"] is None
    assert "Its score is not known" in alone["words"]


def new_answers(model: Path, root: Path, out: Path) -> dict[str, float]:
    """Predicted probability of each slide by the model file."""
    table = read_table(predict(model, root, out=out).table)
    return {row["slide_id"]: float(row["p_ISUP 2"]) for row in table}


def test_copies_are_shown_side_by_side_where_there_are_pictures(tmp_path: Path) -> None:
    for name, color in (("a", "red"), ("b", "blue")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (40, 30), color).save(tmp_path / name / "thumbnail.jpg")
    document = {"audit": {"copied_slides": [["a", "b"], ["a", "c"]]}}
    first, second = _copy_pairs(document, tmp_path)
    assert [name for name, _ in first] == ["a", "b"]
    pictures = [picture for _, picture in (*first, *second)]
    assert all(picture.startswith("data:image/jpeg") for picture in pictures[:3])
    assert pictures[0] == pictures[2] != pictures[1]
    assert pictures[3] is None


def surviving(root: Path, *, cases: int = 60, tiles: int = 12, dim: int = 4) -> None:
    """Embeddings whose first channel is a log risk; a third of the cases is censored."""
    rng = np.random.default_rng(5)
    root.mkdir()
    lines = ["slide_id,dead,days,risk"]
    for i in range(cases):
        risk = rng.normal()
        x = rng.normal(size=(tiles, dim))
        x[:, 0] += risk
        write_embeddings(root / f"s{i:03}.h5", x)
        time = rng.exponential() * np.exp(-1.5 * risk) * 300
        end = rng.exponential() * 600
        lines.append(f"s{i:03},{int(time <= end)},{min(time, end):.1f},{risk:.4f}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("task", ["cox", "discrete"])
def test_the_hazard_rises_with_the_planted_risk(tmp_path: Path, task: str) -> None:
    root = tmp_path / "f"
    surviving(root)
    config = config_for(
        root, head=LINEAR, fit=QUICK, target=("dead",), time="days", task=task
    )
    document = train(root, out=tmp_path / "e", config=config)
    assert document["value"] > 0.65
    planted_risk = {
        row["slide_id"]: float(row["risk"]) for row in read_table(root / "labels.csv")
    }
    rows = read_table(tmp_path / "e" / "predictions.csv")
    again = read_table(
        predict(tmp_path / "e" / "model.safetensors", root, out=tmp_path / "p").table
    )
    for table in (rows, again):
        by_slide = {row["slide_id"]: float(row["risk"]) for row in table}
        pairs = [(planted_risk[name], risk) for name, risk in by_slide.items()]
        assert spearmanr(*zip(*pairs, strict=True)).statistic > 0.6
    if task == "discrete":
        # who is at high risk has the event in the first interval, not in the last
        early = [float(row["p_interval_1"]) for row in rows]
        late = [float(row["p_interval_4"]) for row in rows]
        risks = [planted_risk[row["slide_id"]] for row in rows]
        assert spearmanr(risks, early).statistic > 0.6
        assert spearmanr(risks, late).statistic < -0.6


@pytest.mark.parametrize("task", ["binary", "cox", "ordinal"])
def test_small_cases_give_the_same_bytes_with_two_threads_and_again(
    tmp_path: Path, task: str
) -> None:
    root = tmp_path / "f"
    if task == "cox":
        surviving(root, cases=24)
        own: dict[str, object] = {"target": ("dead",), "time": "days"}
    else:
        graded(root, cases=24, classes=2 if task == "binary" else 3)
        own = {}
    config = config_for(root, fit=replace(QUICK, epochs=2), task=task, **own)
    written = []
    for place, threads in enumerate((1, 2, 1)):
        executor = replace(config.executor, threads=threads)
        train(
            root,
            out=tmp_path / str(place) / "e",
            config=replace(config, executor=executor),
        )
        written.append(files_of(tmp_path / str(place) / "e"))
    assert written[0] == written[1] == written[2]
