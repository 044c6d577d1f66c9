"""Regression, retrieval, calibration, invariance, clustering and APD against plain loops."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.linear_model import Ridge
from sklearn.metrics import adjusted_rand_score
from sklearn.preprocessing import StandardScaler
from tests.probe.make import blobs

from thinsection.config import replace_flat
from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation.rows import Ratios
from thinsection.probe import NANOPATH, ProbeConfig
from thinsection.probe.data.load import load_values
from thinsection.probe.data.sets import RobustnessSet
from thinsection.probe.probes import invariance, pathorob
from thinsection.probe.probes.cases import regression_probe
from thinsection.probe.probes.pathorob import (
    apd_probe,
    clustering_probe,
    robustness_probe,
)
from thinsection.probe.probes.tiles import (
    calibration_probe,
    linear_probe,
    retrieval_probe,
)
from thinsection.probe.protocol import PathorobSettings

QUICK = dataclasses.replace(
    NANOPATH, pathorob=PathorobSettings(max_clusters=4, trials=3, iterations=2)
)


def genes(root: Path, n: int = 90) -> Path:
    """Spots of three patients with two genes; the second is constant in the third patient."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 20)).astype(np.float32)
    y = x[:, :2] * 2 + rng.normal(size=(n, 2))
    y[60:, 1] = 1.5
    np.save(root / "spots.npy", x)
    folds = [["val" if i // 30 == f else "train" for f in range(3)] for i in range(n)]
    rows = [f"{y[i, 0]},{y[i, 1]},s{i // 30},{','.join(folds[i])}" for i in range(n)]
    path = root / "genes.csv"
    path.write_text("\n".join(["A,B,slide_id,fold_0,fold_1,fold_2", *rows]))
    return path


def test_regression_is_hests_pipeline_fold_by_fold(tmp_path: Path) -> None:
    config = replace_flat(ProbeConfig(), {"embeddings": tmp_path / "spots.npy"})
    data = load_values(genes(tmp_path), config)
    assert data.target_names == ("A", "B")
    result = regression_probe(data)
    expected = []
    for train, val in data.folds:
        scaler = StandardScaler().fit(data.embeddings[train])
        pca = PCA(20, random_state=1).fit(scaler.transform(data.embeddings[train]))
        x = [pca.transform(scaler.transform(data.embeddings[r])) for r in (train, val)]
        ridge = Ridge(solver="lsqr", alpha=100 / 40, fit_intercept=False, max_iter=1000)
        guess = ridge.fit(x[0], data.targets[train]).predict(x[1])
        varies = np.ptp(data.targets[val], axis=0) > 0
        found = [
            np.corrcoef(data.targets[val][:, t], guess[:, t])[0, 1]
            for t in (0, 1)
            if varies[t]
        ]
        expected.append(np.mean(found))
    assert result.details["fold_scores"] == pytest.approx(expected, abs=1e-4)
    assert result.score == pytest.approx(np.mean(expected), abs=1e-4)
    assert result.interval is not None
    assert result.interval.missing == "at least 5 slides are needed, got 3"


def test_targets_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("row,A\n0,high\n")
    with pytest.raises(DatasetError, match="targets must be numbers"):
        load_values(
            tmp_path / "t.csv", replace_flat(ProbeConfig(), {"embeddings": tmp_path})
        )


def test_retrieval_is_a_plain_loop() -> None:
    data = blobs(seed=2)
    result = retrieval_probe(data)
    bank, queries = (
        p.embeddings / np.linalg.norm(p.embeddings, axis=1)[:, None]
        for p in (data.train, data.val)
    )
    precisions, hits = [], []
    for query, label in zip(queries, data.val.labels, strict=True):
        near = (
            data.train.labels[np.argsort(-(bank @ query), kind="stable")[:10]] == label
        )
        precisions.append(sum(near[: j + 1].mean() for j in range(10) if near[j]) / 10)
        hits.append(near[:3].any())
    assert result.score == pytest.approx(np.mean(precisions))
    assert result.details["recall_at_3"] == pytest.approx(np.mean(hits))
    assert isinstance(result.rows, Ratios)
    np.testing.assert_allclose(result.rows.top, precisions)


def test_calibration_is_of_the_linear_probe_and_sees_overconfidence() -> None:
    data = blobs(seed=3)
    result, linear = calibration_probe(data), linear_probe(data)
    assert result.details["linear_score"] == linear.score
    shown = result.details["reliability"]
    rows = np.array(shown["rows"])
    gap = np.abs(np.array(shown["confidence"]) - np.array(shown["right"]))
    assert result.score == pytest.approx(gap @ rows / len(data.val))
    assert 0 < result.score < result.details["largest_gap"] < 1


def pictures(root: Path) -> Path:
    """Two classes of coloured noise in a folder each."""
    rng = np.random.default_rng(0)
    for name, colour in (("pink", (220, 130, 180)), ("blue", (110, 90, 190))):
        (root / name).mkdir(parents=True)
        for i in range(9):
            noise = rng.integers(-40, 40, (40, 48, 3)) + np.array(colour)
            Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8)).save(
                root / name / f"{i}.png"
            )
    return root


def test_invariance_of_the_default_encoder_is_told_by_change(tmp_path: Path) -> None:
    config = replace_flat(ProbeConfig(), {"device": "cpu", "batch_size": 4})
    result = invariance.invariance_probe(pictures(tmp_path / "set"), config)
    assert result.details["cosine"].keys() == {"stain", "blur", "jpeg", "rotation"}
    assert all(0 < value < 1 for value in result.details["cosine"].values())
    assert result.score == pytest.approx(np.mean([*result.details["cosine"].values()]))
    assert result.details["score_drop"]["rotation"] <= result.details["knn_score"]


def test_the_changes_change_what_they_say() -> None:
    tile = np.full((16, 12, 3), (200, 140, 180), dtype=np.uint8)
    tile[4:8, 3:6] = (90, 60, 140)
    assert invariance.CHANGES["rotation"](tile).shape == (12, 16, 3)
    assert invariance.CHANGES["blur"](tile)[4, 3, 0] > 90
    assert np.abs(invariance.CHANGES["blur"](tile).astype(int) - tile).max() > 20
    darker = invariance.stained(tile)[5, 4].astype(int) - tile[5, 4]
    assert darker[0] < 0  # haematoxylin takes red away
    assert not np.array_equal(invariance.compressed(tile), tile)


def tissue(biology: float, centre: float, *, seed: int = 0) -> RobustnessSet:
    """9 slides of 4 tiles of each of two classes at two centres, and 2 at a third."""
    rng = np.random.default_rng(seed)
    rows = [
        (b, c, f"{b}{c}{s}")
        for c, slides in (("x", 9), ("y", 9), ("z", 2))
        for b in ("benign", "tumour")
        for s in range(slides)
        for _ in range(4)
    ]
    columns = [tuple(column) for column in zip(*rows, strict=True)]
    x = rng.normal(size=(len(rows), 8)) * 0.4 + 1
    x[:, 0] += biology * (np.array(columns[0]) == "tumour")
    x[:, 1] += centre * (np.array(columns[1]) == "y")
    names = ("biological_class", "medical_center", "slide_id")
    return RobustnessSet(
        name="own",
        embeddings=x.astype(np.float32),
        **dict(zip(names, columns, strict=True)),
    )


def test_clusters_follow_what_separates_the_tiles() -> None:
    assert clustering_probe(tissue(4, 0), protocol=QUICK).score > 0.6
    centres = clustering_probe(tissue(0, 4), protocol=QUICK)
    assert centres.score < 0
    assert len(centres.details["score_by_combination"]) == 3  # pairs of three centres


def test_two_clusters_by_hand_give_the_index_of_biology_minus_the_centres() -> None:
    data = tissue(6, 0)
    result = clustering_probe(data, protocol=QUICK)
    of = np.array([c != "z" for c in data.medical_center])
    labels = (
        data.embeddings[of] / np.linalg.norm(data.embeddings[of], axis=1)[:, None]
    )[:, 0] > 0.7
    bio, centre = (
        np.array(c)[of] for c in (data.biological_class, data.medical_center)
    )
    expected = adjusted_rand_score(bio, labels) - adjusted_rand_score(centre, labels)
    found = result.details["score_by_combination"]["benign-tumour at x-y"]
    assert found == pytest.approx(expected, abs=0.1)


def test_apd_is_a_loss_where_the_centre_shows_and_none_where_it_does_not() -> None:
    alone, mixed = (apd_probe(tissue(2.5, c), protocol=QUICK) for c in (0.0, 6.0))
    assert mixed.score < -0.1 < alone.score + 0.05
    assert (
        len(mixed.details["accuracy_by_split"]) == 4
    )  # base (9 - 3) / 2, so 0 to 3 slides moved
    assert mixed.details["centres"] == ["x", "y"]


def test_a_split_of_apd_moves_slides_between_centres_and_keeps_the_test_apart() -> None:
    data = tissue(1, 1)
    centre, bio = np.array(data.medical_center), np.array(data.biological_class)
    chunks = [
        [
            pathorob._slides(data, (centre == c) & (bio == b))
            for b in ("benign", "tumour")
        ]
        for c in ("x", "y")
    ]
    for split in range(4):
        train, val, test = pathorob._split(chunks, 3, split)
        counts = [
            [
                ((centre == c) & (bio == b))[train].sum() / 4
                for b in ("benign", "tumour")
            ]
            for c in "xy"
        ]
        assert counts == [[3 - split, 3 + split], [3 + split, 3 - split]]
        assert not set(train) & set(test)
        assert len(val) == sum(int(c * 4 / 6) for row in counts for c in row)
        assert len(test) == 4 * 2 * 4


def test_too_few_slides_for_apd_are_refused() -> None:
    data = tissue(1, 1)
    few = dataclasses.replace(
        data,
        slide_id=tuple(
            f"{b}{c}"
            for b, c in zip(data.biological_class, data.medical_center, strict=True)
        ),
    )
    with pytest.raises(
        InvalidInputError,
        match="must have >= 5 slides at each of the two centres, got 1",
    ):
        apd_probe(few, protocol=QUICK)


def test_slides_of_one_tile_leave_apd_no_validation_set_and_are_refused() -> None:
    """Five slides, with one tile of each class and centre."""
    rng = np.random.default_rng(0)
    of_all = [(b, c, s) for b in "bt" for c in "xy" for s in range(5)]
    classes, centres, slides = zip(*of_all, strict=True)
    data = RobustnessSet(
        name="few",
        embeddings=rng.normal(size=(len(of_all), 4)).astype(np.float32),
        biological_class=classes,
        medical_center=centres,
        slide_id=tuple(f"s{s}" for s in slides),
    )
    message = r">= 2 tiles a slide at .*validation set, got 1 in 'few'; add tiles"
    with pytest.raises(InvalidInputError, match=message):
        apd_probe(data, protocol=QUICK)


def test_k_can_be_the_one_whose_vote_names_biology_best() -> None:
    data = tissue(2, 2)
    result = robustness_probe(data, choose_k=True)
    by_k = result.details["biology_by_k"]
    assert result.details["k"] == int(max(by_k, key=by_k.get))
    assert result.score == robustness_probe(data, k=result.details["k"]).score


def test_a_test_row_of_a_table_moves_no_other_rows_embedding(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(8, dtype=np.float32)[:, None])
    splits = ["test", "train", "train", "val", "train", "val", "train", "val"]
    rows = [f"{i},{split}" for i, split in enumerate(splits)]
    (tmp_path / "t.csv").write_text("\n".join(["A,split", *rows]))
    config = replace_flat(ProbeConfig(), {"embeddings": tmp_path / "x.npy"})
    data = load_values(tmp_path / "t.csv", config)
    np.testing.assert_array_equal(data.embeddings[:, 0], data.targets[:, 0])
    assert data.targets[:, 0].min() == 1
