"""`thinsection probe compare`: encoders beside each other, from the files of their results."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score
from tests.probe.make import write_tiles_h5
from tests.probe.test_cli import invoke, strict_json

from thinsection.config import replace_flat
from thinsection.errors import DatasetError
from thinsection.evaluation import metrics
from thinsection.files.atomic import write_table
from thinsection.probe import Predictions, ProbeConfig
from thinsection.probe import compare as comparing
from thinsection.probe.data.load import load_tiles
from thinsection.probe.page import write_probe_report
from thinsection.probe.registry import fewshot, knn


def report(root: Path, name: str, table: Path, file: Path) -> None:
    """kNN and few-shot as the shell runs them, without the map of embeddings, which is slow."""
    config = replace_flat(ProbeConfig(), {"embeddings": file})
    data = load_tiles(table, config)
    for probe in (knn, fewshot):
        write_probe_report(probe(data, config), root / name)


def encoders(root: Path, *, n: int = 240) -> dict[str, Path]:
    """Embeddings of one set by three encoders: good, as good, and poor."""
    rng = np.random.default_rng(3)
    labels, slide = rng.integers(0, 2, n), np.arange(n) // 8
    split = np.where(slide % 2, "val", "train")
    rows = [
        f"{y},{i},s{s},{split[i]}"
        for i, (y, s) in enumerate(zip(labels, slide, strict=True))
    ]
    (root / "set.csv").write_text("\n".join(["label,row,slide_id,split", *rows]))
    side = (2 * labels[:, None] - 1) * (np.arange(12) < 3)
    good = rng.normal(size=(n, 12)) + 0.9 * side
    turned = good @ np.linalg.qr(rng.normal(size=(12, 12)))[0] + 0.3 * rng.normal(
        size=(n, 12)
    )
    poor = rng.normal(size=(n, 12)) + 0.15 * side
    for name, x in {"good": good, "alike": turned, "poor": poor}.items():
        np.save(root / f"{name}.npy", x.astype(np.float32))
    return {name: root / f"{name}.npy" for name in ("good", "alike", "poor")}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compare")
    for name, file in encoders(root).items():
        report(root, name, root / "set.csv", file)
    invoke(
        "compare",
        *(root / name for name in ("good", "alike", "poor")),
        "--out",
        root / "c",
    )
    return root


def test_the_better_encoder_is_told_apart_and_equal_ones_are_not(
    compared: Path,
) -> None:
    found = strict_json(compared / "c" / "comparison.json")
    assert [t["task"] for t in found["tasks"]] == ["set, fewshot", "set, knn"]
    for task in found["tasks"]:
        called = {(p["a"], p["b"]): p["different"] for p in task["pairs"]}
        assert called == {
            ("good", "alike"): False,
            ("good", "poor"): True,
            ("alike", "poor"): True,
        }
        assert [m["rank"] for m in task["models"]] == [1, 1, 3]
        for p in task["pairs"]:
            assert p["p_value"] <= p["p_bh"] <= p["p_holm"]
            assert p["low"] < p["difference"] < p["high"]
    assert found["models"][-1]["model"] == "poor"
    assert found["models"][-1]["mean_rank"] == 3
    page = (compared / "c" / "comparison.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    with (compared / "c" / "comparison.csv").open() as file:
        assert len([*csv.DictReader(file)]) == 6


def test_rows_read_back_give_the_scores_and_metrics_of_the_result(
    compared: Path,
) -> None:
    for scored in comparing.find_results([compared / "good"]):
        scores = metrics.all_scores(scored.rows.scorers, len(scored.rows.ids))
        assert scores == pytest.approx(scored.document["metrics"], abs=1e-8)
        assert scores["macro_f1"] == pytest.approx(scored.document["score"])
        assert {"auroc", "auprc", "brier", "ece", "weighted_kappa"} <= scores.keys()
        assert len(scored.document["data"]["rows_sha256"]) == 64


def test_another_metric_is_compared_when_asked_for(
    compared: Path, tmp_path: Path
) -> None:
    both = (compared / "good", compared / "poor")
    invoke("compare", *both, "--metric", "auroc", "--out", tmp_path)
    tasks = strict_json(tmp_path / "comparison.json")["tasks"]
    assert {t["metric"] for t in tasks} == {"auroc"}


def test_results_of_other_rows_are_not_compared(compared: Path, tmp_path: Path) -> None:
    text = (compared / "set.csv").read_text().splitlines()
    (tmp_path / "set.csv").write_text(
        "\n".join([text[0], *text[9:]])
    )  # one training slide less
    report(tmp_path, "b", tmp_path / "set.csv", compared / "poor.npy")
    with pytest.raises(
        DatasetError, match="same rows, folds and protocol, got 'good' and 'b' with"
    ):
        invoke("compare", compared / "good", tmp_path / "b", "--out", tmp_path / "c")


def test_survival_and_slide_probes_are_compared_by_case(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(0), 45
    for name, signal in (("strong", 2.0), ("weak", 0.1)):
        for i in range(n):
            tiles = rng.normal(size=(4, 5)) + signal * (i % 2)
            write_tiles_h5(
                tmp_path / name / f"s{i}.h5", np.zeros((4, 2)), tiles.astype("f4")
            )
    rows = [
        f"s{i},{'ab'[i % 2]},{int(i % 3 > 0)},{300 - 90 * (i % 2) - i}"
        for i in range(n)
    ]
    (tmp_path / "cases.csv").write_text("\n".join(["slide_id,label,event,time", *rows]))
    for name in ("strong", "weak"):
        for probe in ("slide", "survival"):
            given = ("--embeddings", tmp_path / name, "--out", tmp_path / "r" / name)
            invoke(probe, tmp_path / "cases.csv", *given)
    invoke(
        "compare",
        tmp_path / "r" / "strong",
        tmp_path / "r" / "weak",
        "--out",
        tmp_path / "c",
    )
    found = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert {t["metric"] for t in found["tasks"]} == {"auroc", "c_index"}
    assert all(t["pairs"][0]["difference"] > 0 for t in found["tasks"])
    for task in found["tasks"]:  # a case that each seed holds out is one
        assert (task["rows"], task["groups"]) == (3 * n, n)
        for model in task["models"]:
            low, high = (model["interval"][end] for end in ("low", "high"))
            assert low <= model["score"] <= high


def test_predictions_of_several_seeds_are_scored_by_their_mean_and_read_back(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    truth, repeats = rng.integers(0, 3, 60), rng.integers(0, 3, (4, 60))
    ids, names = tuple(map(str, range(60))), ("a", "b", "c")
    rows = Predictions(
        class_names=names,
        ids=ids,
        groups=None,
        truth=truth,
        prediction=repeats[0],
        repeats=repeats,
    )
    expected = np.mean([f1_score(truth, guess, average="macro") for guess in repeats])
    assert metrics.all_scores(rows.scorers, 60)["macro_f1"] == pytest.approx(expected)
    table = {"id": ids, **rows.columns}
    write_table(tmp_path / "x.csv", zip(*table.values(), strict=True), list(table))
    document = {"classes": [{"name": name} for name in names], "interval": None}
    back = comparing.read_rows(tmp_path / "x.json", document)
    np.testing.assert_array_equal(back.repeats, repeats)  # type: ignore[union-attr]
