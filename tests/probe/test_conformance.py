"""What the suites' names mean: their arithmetic, judged by other packages and by identities."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from thinsection.errors import InvalidInputError
from thinsection.evaluation.splits import stratified_folds
from thinsection.probe import slide_probe
from thinsection.probe.compute import nearest_rows
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data.load import load_robustness
from thinsection.probe.data.sets import CaseSet, RobustnessSet
from thinsection.probe.probes.pathorob import robustness_probe
from thinsection.probe.probes.tiles import thunder_calibration
from thinsection.probe.protocol import PATHOBENCH


def test_l2_neighbours_are_scikit_learns_far_from_the_origin() -> None:
    rng = np.random.default_rng(3)
    bank = (rng.normal(size=(700, 20)) + 50).astype(
        np.float32
    )  # cancellation hurts here
    queries = (rng.normal(size=(90, 20)) + 50).astype(np.float32)
    ours = nearest_rows(queries, bank, 7, similarity="l2", budget_bytes=1 << 22)
    model = NearestNeighbors(n_neighbors=7).fit(bank.astype(np.float64))
    theirs = model.kneighbors(queries.astype(np.float64), return_distance=False)
    np.testing.assert_array_equal(ours, theirs)


def test_thunder_calibration_of_rows_that_can_be_counted_by_hand() -> None:
    """Ten rows: .9 nine times right of ten would be calibrated; here five are right."""
    confidence = np.array([0.9] * 5 + [0.7] * 5)
    probability = np.stack([confidence, 1 - confidence], axis=1)
    truth = np.array([0, 0, 0, 0, 1, 0, 1, 1, 1, 1])
    errors = thunder_calibration(probability, truth)
    # bins of width .2: .9 lies in (.8, 1] with .8 right, .7 in (.6, .8] with .2 right
    assert errors["ece"] == pytest.approx((0.1 + 0.5) / 2)
    assert errors["mce"] == pytest.approx(0.5)
    assert errors["sce"] == pytest.approx((0.1 + 0.5) / 5)
    # five bins of two rows in order of confidence: equal confidences tie, so only sums are fixed
    assert 0 < errors["ace"] <= 0.9
    assert errors["tace"] == errors["ace"]  # every bin is above a confidence of .01


def test_equal_size_bins_take_the_remainder_last() -> None:
    """Seven rows make bins of 1, 1, 1, 1 and 3."""
    confidence = np.array([0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85])
    probability = np.stack([confidence, 1 - confidence], axis=1)
    truth = np.zeros(7, dtype=np.int64)  # all right
    gaps = [0.45, 0.4, 0.35, 0.3, 1 - 0.8]
    assert thunder_calibration(probability, truth)["ace"] == pytest.approx(
        np.mean(gaps)
    )


def test_pathobench_fits_what_scikit_learn_makes_of_torch_tensors() -> None:
    """Patho-Bench hands scikit-learn float32 tensors, which it converts to float64."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, 80)
    vectors = (rng.normal(size=(80, 200)) + 0.15 * labels[:, None]).astype(np.float32)
    folds = stratified_folds(labels, folds=4, seed=2)
    cases = CaseSet(
        name="task",
        ids=tuple(f"case{i}" for i in range(80)),
        vectors=vectors,
        class_names=("a", "b"),
        labels=labels,
        folds=tuple(folds),
    )
    ours = slide_probe(cases, protocol=PATHOBENCH).details["fold_scores"]
    theirs = []
    for train, test in folds:
        model = LogisticRegression(
            C=0.5, max_iter=10_000, class_weight="balanced", random_state=0
        )
        model.fit(torch.from_numpy(vectors[train]), labels[train])
        probability = model.predict_proba(torch.from_numpy(vectors[test]))
        theirs.append(roc_auc_score(labels[test], probability[:, 1]))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def paired_tiles(name: str) -> RobustnessSet:
    """Two pairs of two classes and two centres; one pair follows the centre, one the class."""
    rng = np.random.default_rng(7)
    rows: list[tuple[str, str, str, str]] = []
    vectors = []
    for pair in range(2):
        for biology in range(2):
            for centre in range(2):
                for slide in range(6):
                    for _ in range(8):
                        vector = rng.normal(size=12)
                        vector[0] += 3 * (biology if pair else centre)
                        vectors.append(vector)
                        slide_id = f"{pair}{biology}{centre}{slide}"
                        rows.append((f"b{biology}", f"c{centre}", slide_id, f"p{pair}"))
    biology, centre, slides, pairs = zip(*rows, strict=True)
    return RobustnessSet(
        name=name,
        embeddings=np.array(vectors, dtype=np.float32),
        biological_class=biology,
        medical_center=centre,
        slide_id=slides,
        pair=pairs,
    )


def test_the_index_in_pairs_is_that_of_all_neighbours_of_each_pair_alone() -> None:
    data = paired_tiles("tcga")
    paired = robustness_probe(data, k=9)
    so, os_ = 0, 0
    for name in ("p0", "p1"):
        rows = np.flatnonzero(np.array(data.pair) == name)
        alone = RobustnessSet(
            name="own",
            embeddings=data.embeddings[rows],
            biological_class=tuple(data.biological_class[i] for i in rows),
            medical_center=tuple(data.medical_center[i] for i in rows),
            slide_id=tuple(data.slide_id[i] for i in rows),
        )
        details = robustness_probe(alone, k=9).details
        so += details["so"]
        os_ += details["os"]
    assert paired.details["pairs"] == 2
    assert paired.score == so / (so + os_)
    whole = robustness_probe(replace(data, name="own", pair=()), k=9)
    assert abs(whole.score - paired.score) > 0.01  # the pairs matter here


def test_tcga_takes_k_61_and_refuses_a_table_without_pairs() -> None:
    data = paired_tiles("tcga")
    assert robustness_probe(data).details["k"] == 61
    with pytest.raises(
        InvalidInputError, match="'tcga' must have the column subset, got none"
    ):
        robustness_probe(replace(data, pair=()))


def test_a_table_named_tcga_brings_its_pairs(tmp_path: Path) -> None:
    data = paired_tiles("tcga")
    columns = (data.slide_id, data.biological_class, data.medical_center, data.pair)
    lines = ["slide_id,biological_class,medical_center,subset"]
    lines += [",".join(row) for row in zip(*columns, strict=True)]
    table = tmp_path / "tcga.csv"
    table.write_text("\n".join(lines) + "\n")
    np.save(tmp_path / "tiles.npy", data.embeddings)
    section = replace(ProbeConfig().data, embeddings=tmp_path / "tiles.npy")
    read = load_robustness(table, replace(ProbeConfig(), data=section))
    assert read.pair == data.pair
    table.rename(tmp_path / "own.csv")
    assert (
        load_robustness(tmp_path / "own.csv", replace(ProbeConfig(), data=section)).pair
        == ()
    )
