"""Covariates: they are found, scaled by the training cases alone, and asked for at `predict`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.predict.lesions import Trained
from tests.predict.planted import write_embeddings
from tests.support.cell_files import run_with_cells, write_cells

from thinsection.errors import ConfigError, DatasetError, ThinsectionError
from thinsection.evaluation.covariates import (
    CovariateSource,
    case_covariates,
    check_before_embedding,
    check_values_of_folds,
)
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.leaks import read_labelled
from thinsection.evaluation.parts import FoldCases
from thinsection.evaluation.target import Target
from thinsection.files.atomic import read_table
from thinsection.predict.bags import Bags
from thinsection.predict.config import FitConfig, FoldsConfig, TrainConfig
from thinsection.predict.experiment import train
from thinsection.predict.folds import Study, read_fold
from thinsection.predict.heads.config import HEADS, HeadConfig
from thinsection.predict.heads.head import fit_covariates, head_for
from thinsection.predict.heatmap import heatmap
from thinsection.predict.model_file import load_model
from thinsection.predict.predicting import predict
from thinsection.predict.training import Trainer
from thinsection.testing.synthetic import write_he_slide

LINEAR = HeadConfig(head="linear", dropout=0.0)
FIT = FitConfig(epochs=40, patience=40, lr=2e-2, device="cpu")
COVARIATES = ("age", "grade")
DIM = 4
# CLAM has no ordered classes
HEADS_AND_KINDS = [
    (name, kind)
    for name in HEADS.names()
    for kind in ("multiclass", "ordinal", "cox")
    if not (kind == "ordinal" and name.startswith("clam"))
]


def cohort_of(
    root: Path, *, cases: int = 48, changed: dict[int, float] | None = None
) -> Path:
    """Embeddings of noise; the label follows the age, and the grade is noise.

    Each fifth case has no age, and some have two slides. `changed` gives other ages.
    """
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    age = rng.normal(60, 12, cases)
    label = rng.random(cases) < 1 / (1 + np.exp(-(age - 60) / 5))
    grade = rng.integers(1, 4, cases)
    rows = ["slide_id,case_id,label,age,grade"]
    for case in range(cases):
        for slide in range(1 + (case % 7 == 0)):
            name = f"s{case:03}{'ab'[slide]}"
            write_embeddings(root / f"{name}.h5", rng.normal(size=(6, DIM)))
            own_age = (changed or {}).get(case, age[case])
            text = "" if case % 5 == 4 else f"{own_age:.3f}"
            word = "high" if label[case] else "low"
            rows.append(f"{name},c{case:03},{word},{text},{grade[case]}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return root


def config_for(root: Path, covariates: tuple[str, ...] = COVARIATES) -> TrainConfig:
    labels = LabelsConfig(
        labels=root / "labels.csv", target=("label",), covariate=covariates
    )
    return TrainConfig(labels=labels, head=LINEAR, fit=FIT, cross=FoldsConfig(folds=3))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cohort_of(tmp_path_factory.mktemp("covariates") / "data")


@pytest.fixture(scope="module")
def experiment(root: Path) -> tuple[Path, dict[str, Any]]:
    """Folder and document of a model with both covariates."""
    out = root.parent / "with"
    return out, train(root, out=out, config=config_for(root))


def test_an_effect_that_only_a_covariate_has_is_found(
    root: Path, experiment: tuple[Path, dict[str, Any]]
) -> None:
    out, found = experiment
    without = train(root, out=root.parent / "without", config=config_for(root, ()))
    assert found["value"] > 0.75
    assert without["value"] < 0.7
    assert "covariate age: from labels.csv" in found["account"]
    (warning,) = [text for text in found["warnings"] if "covariate" in text]
    assert warning.startswith("covariate age is missing for 9 cases")
    card = load_model(out / "model.safetensors").card
    assert card.covariates == COVARIATES


def scales(out: Path, study: Study) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean and standard deviation that each fold has stored."""
    stored = []
    for fold in range(len(study.parts)):
        result = read_fold(out, f"fold{fold}-0")
        assert result is not None
        state = result.state
        stored.append(
            (state["covariates.center"].numpy(), state["covariates.spread"].numpy())
        )
    return stored


def test_the_scale_of_a_fold_is_that_of_its_training_cases(
    experiment: tuple[Path, dict[str, Any]],
) -> None:
    out, _ = experiment
    study = Study.load(out)
    values = study.cohort.covariate_array
    assert values is not None
    for part, (center, spread) in zip(study.parts, scales(out, study), strict=True):
        own = values[list(part.train)]
        np.testing.assert_allclose(center, np.nanmean(own, axis=0), rtol=1e-5)
        np.testing.assert_allclose(spread, np.nanstd(own, axis=0), rtol=1e-5)
        assert abs(center[0] - np.nanmean(values[:, 0])) > 1e-3


def test_test_cases_decide_nothing_of_their_fold(
    experiment: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, _ = experiment
    study = Study.load(out)
    far = {
        int(study.cohort.cases[row][1:]): 1e6
        for row in (*study.parts[0].test, *study.parts[0].stop)
    }
    other_root = cohort_of(tmp_path / "data", changed=far)
    train(other_root, out=tmp_path / "e", config=config_for(other_root))
    other = Study.load(tmp_path / "e")
    assert other.parts[0] == study.parts[0]
    np.testing.assert_array_equal(
        scales(tmp_path / "e", other)[0], scales(out, study)[0]
    )
    # of the other folds they are training cases
    assert scales(tmp_path / "e", other)[1][0][0] > 1000


@pytest.mark.check  # thousands of steps
def test_a_linear_head_has_the_weights_of_scikit_learn(root: Path) -> None:
    """The cases that end the training are those of training: it goes on to the least loss."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    cohort = read_labelled(root, config_for(root).labels).cohort
    train_rows = tuple(range(0, 40))
    part = FoldCases(train=train_rows, stop=train_rows, test=(40, 41))
    fit = replace(
        FIT,
        epochs=120,
        patience=120,
        starts=1,
        weight_decay=0.0,
        batch_cases=40,
        lr=0.1,
    )
    values = cohort.covariate_array
    assert values is not None
    with Bags(cohort.paths, covariates=values) as bags:
        trainer = Trainer(bags, cohort, part, fold=0, fit=fit)
        trainer.run(LINEAR, root.parent / "checkpoint", "key")
        means = np.stack([bags.read(row).features.mean(axis=0) for row in train_rows])
        logits = trainer.predict(bags, part.test).numpy()
        test_means = np.stack(
            [bags.read(row).features.mean(axis=0) for row in (40, 41)]
        )
    own = values[list(train_rows)]
    center, spread = np.nanmean(own, axis=0), np.nanstd(own, axis=0)

    def inputs(means: np.ndarray, covariates: np.ndarray) -> np.ndarray:
        scaled = np.nan_to_num((covariates - center) / spread)
        return np.concatenate([means, scaled], axis=1)

    y = cohort.array[list(train_rows), 0].astype(int)
    model = linear_model.LogisticRegression(C=np.inf, max_iter=10_000, tol=1e-8).fit(
        inputs(means, own), y
    )
    expected = model.decision_function(inputs(test_means, values[[40, 41]]))
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], expected, rtol=0.03)
    covariates = trainer.head.covariates
    assert covariates is not None
    weight = covariates.weight.detach().numpy()
    np.testing.assert_allclose(weight[1] - weight[0], model.coef_[0, DIM:], rtol=0.03)


@pytest.mark.parametrize(("name", "kind"), HEADS_AND_KINDS)
def test_covariates_add_a_linear_term_to_any_head(name: str, kind: str) -> None:
    names = ("risk",) if kind == "cox" else ("g1", "g2", "g3")
    target = Target(kind=kind, columns=("y",), names=names)  # type: ignore[arg-type]
    settings = HeadConfig(head=name, hidden_dim=16, attention_dim=8, num_heads=2)
    torch.manual_seed(0)
    plain = head_for(settings, DIM, target).eval()
    torch.manual_seed(0)
    head = head_for(settings, DIM, target, 2).eval()
    fit_covariates(head, torch.tensor([[1.0, 5.0], [3.0, torch.nan], [2.0, 9.0]]))
    scored: Any = head.score if kind == "ordinal" else head
    outputs = 1 if kind == "ordinal" else len(names)
    weight = torch.arange(2.0 * outputs).reshape(outputs, 2) / 7 + 0.1
    scored.covariates.weight.data.copy_(weight)
    tiles = torch.randn(9, DIM)
    coords = torch.tensor([[i % 3, i // 3] for i in range(9)])
    values = torch.tensor([4.0, torch.nan])
    with torch.inference_mode():
        before = plain(tiles, coords)
        after = head(tiles, coords, values)
        # mean 2, standard deviation sqrt(2 / 3); the missing one adds nothing
        added = weight[:, 0] * (4 - 2) / (2 / 3) ** 0.5
        if kind == "ordinal":
            score = plain.score(tiles, coords).logits + added  # type: ignore[operator]
            expected = plain.thresholds(score)  # type: ignore[operator]
        else:
            expected = before.logits + added
        torch.testing.assert_close(after.logits, expected)
        if before.evidence is not None:
            torch.testing.assert_close(after.evidence, before.evidence)
        if head.reads_blocks:
            survey = head.survey(tiles, ()) if head.surveys else ()
            of_case = head.of_case(head.of_block(tiles, survey), values)
            torch.testing.assert_close(of_case.logits, after.logits)
        with pytest.raises(ThinsectionError, match="covariates must be 2 numbers"):
            head(tiles, coords)


def test_predict_needs_the_columns_and_gives_the_scores_of_the_folds(
    root: Path, experiment: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, _ = experiment
    model = out / "model.safetensors"
    with pytest.raises(DatasetError, match="covariate must be a column of a table"):
        predict(model, root, out=tmp_path / "none")
    done = predict(
        model,
        root,
        out=tmp_path / "p",
        covariate_table=root / "labels.csv",
        device="cpu",
    )
    tested = {
        (row["level"], row["case_id"], row["slide_id"]): float(row["p_high"])
        for row in read_table(out / "predictions.csv")
    }
    rows = [row for row in read_table(done.table) if row["slide_id"] or row["case_id"]]
    # the table of cases names the case of each slide only in the label table
    by_slide = {slide: value for (_, _, slide), value in tested.items() if slide}
    compared = 0
    for row in rows:
        if row["level"] == "slide":
            assert float(row["p_high"]) == pytest.approx(
                by_slide[row["slide_id"]], abs=1e-5
            )
            is_missing = int(row["slide_id"][1:4]) % 5 == 4
            assert ("without age" in row["warnings"]) == is_missing
            compared += 1
    assert compared == len(by_slide) > 48


@pytest.mark.parametrize(
    ("covariates", "error", "words"),
    [
        (("aeg",), DatasetError, "got 'aeg'; did you mean 'age'"),
        (("case_id",), DatasetError, "must have numbers, got 'c000' for 's000a'"),
        (("label",), ConfigError, "another column than the target, got 'label'"),
        (("age", "grade", "age"), ConfigError, "named once, got 'age' twice"),
    ],
)
def test_columns_that_cannot_be_covariates_are_refused(
    root: Path, covariates: tuple[str, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        read_labelled(root, config_for(root, covariates).labels)


def test_columns_of_cells_come_from_the_summary(tmp_path: Path) -> None:
    """Two slides and two classes; a case of both has the mean."""
    sizes = {"a": (1700, 1300), "b": (1500, 1900)}
    for seed, (slide, size) in enumerate(sizes.items()):
        write_he_slide(tmp_path / f"{slide}.svs", size, seed=3 + seed, downsamples=(1,))
        path = tmp_path / "nuclei" / f"{slide}.geojson"
        write_cells(path, number=200 + 100 * seed, seed=seed, size=size)
    out = run_with_cells(tmp_path, ("nuclei",), slides=("a", "b"), tile_px=256)
    rows = {row["slide_id"]: row for row in read_table(out / "summary.csv")}
    table = tmp_path / "table.csv"
    table.write_text("slide_id,age\na,50\nb,70\n")
    source = CovariateSource(
        table=table, data=out, grid=rows["a"]["grid"], patient_by_slide={}
    )
    columns = ("cells_nuclei:count_Tumour", "age", "cells_nuclei:per_mm2")
    values, places = case_covariates(columns, [("a",), ("b",), ("a", "b")], source)
    assert places == ("summary.csv", "table.csv", "summary.csv")
    expected = [
        [float(rows[slide][columns[0]]), age, float(rows[slide][columns[2]])]
        for slide, age in (("a", 50), ("b", 70))
    ]
    expected.append(np.mean(expected, axis=0).tolist())
    np.testing.assert_allclose(np.array(values, dtype=float), expected, rtol=1e-6)
    assert values[0] != values[1]


def test_a_column_with_one_value_in_training_does_not_blow_up_another_value() -> None:
    """The mean of equal values in float32 is rounded, for some numbers of cases."""
    target = Target(kind="binary", columns=("label",), names=("low", "high"))
    for number in range(2, 40):
        head = head_for(LINEAR, DIM, target, 2)
        values = torch.tensor([[0.1, float(case)] for case in range(number)])
        fit_covariates(head, values)
        assert head.covariates is not None
        assert head.covariates.spread[0] == 1.0
        assert head.covariates.spread[1] == pytest.approx(
            np.std(range(number)), rel=1e-5
        )


def test_a_fold_without_a_value_is_refused_before_training(root: Path) -> None:
    cohort, _, _ = read_labelled(root, config_for(root).labels)
    parts = [
        FoldCases(train=(0, 1, 2), stop=(3,), test=(5,)),
        FoldCases(train=(4, 9), stop=(0,), test=(1,)),  # each fifth case has no age
    ]
    check_values_of_folds(cohort, parts[:1])
    with pytest.raises(DatasetError, match=r"covariate 'age' .* none in fold 1; add"):
        check_values_of_folds(cohort, parts)


def test_a_column_that_no_file_will_have_is_refused_before_slides_are_embedded(
    root: Path, tmp_path: Path
) -> None:
    table = root / "labels.csv"
    check_before_embedding(("age", "tissue_fraction"), table, tmp_path, has_qc=False)
    check_before_embedding(("focus_removed_percent",), None, tmp_path, has_qc=True)
    for columns, given, has_qc in (
        (("age",), None, False),
        (("age", "aeg"), table, False),
        (("cells_nuclei:count",), table, True),
    ):
        with pytest.raises(DatasetError, match=f"got {columns[-1]!r}"):
            check_before_embedding(columns, given, tmp_path, has_qc=has_qc)


@pytest.mark.check
def test_slides_are_predicted_and_drawn_with_covariates(
    trained: Trained, tmp_path: Path
) -> None:
    """Two slides in two calls, each with its own table: the first keeps its covariate."""
    ages = {path.stem: 40 + 3 * i for i, path in enumerate(trained.slides)}
    labels = tmp_path / "labels.csv"
    lines = [f"{name},p{i},{name[6:]},{ages[name]}" for i, name in enumerate(ages)]
    labels.write_text("\n".join(["slide_id,patient_id,grade,age", *lines]) + "\n")
    config = TrainConfig(
        labels=LabelsConfig(labels=labels, target=("grade",), covariate=("age",)),
        head=LINEAR,
        fit=replace(FIT, epochs=3),
        cross=FoldsConfig(folds=2, inner_folds=2, allow_leakage=True),
    )
    train(trained.results, out=tmp_path / "experiment", config=config)
    model = tmp_path / "experiment" / "model.safetensors"
    out = tmp_path / "out"
    first, second = trained.slides[:2]
    with pytest.raises(DatasetError, match="covariate must be a column of"):
        predict(model, first, out=out, device="cpu")
    with pytest.raises(ConfigError, match="covariate_table must be an existing file"):
        predict(model, first, out=out, covariate_table=tmp_path / "none.csv")
    assert not out.exists()
    answers = {}
    for slide, text in ((first, "61"), (second, "47")):
        table = tmp_path / f"{slide.stem}.csv"
        table.write_text(f"slide_id,age\n{slide.stem},{text}\n")
        found = predict(model, slide, out=out, covariate_table=table, device="cpu")
        (row,) = found.rows
        assert row.covariates == (float(text),)
        assert not any("without age" in warning for warning in row.warnings)
        answers[row.name] = row.answers[1]
    rows = {row["slide_id"]: row for row in read_table(found.table)}
    assert rows.keys() == answers.keys()
    for name, row in rows.items():
        assert float(row["p_high"]) == pytest.approx(answers[name], abs=1e-5)
        assert "without age" not in row["warnings"]
    # the table of the second slide
    drawn = heatmap(model, second, out=out, covariate_table=table, device="cpu")
    assert {path.name.partition(".")[0] for path in drawn} == {second.stem}
    with pytest.raises(ConfigError, match="left out for a model without covariates"):
        predict(trained.model, first, out=out, covariate_table=labels)
