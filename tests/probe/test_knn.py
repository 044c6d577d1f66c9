"""kNN against scikit-learn, its tie rules, and the memory of its blocks."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from sklearn.neighbors import KNeighborsClassifier
from tests.probe.make import blobs

from thinsection.errors import BudgetError, DatasetError, InvalidInputError
from thinsection.probe.compute import nearest_rows
from thinsection.probe.data.sets import TileSet, make_split
from thinsection.probe.probes.tiles import count_votes, knn_probe
from thinsection.testing import run_and_measure
from thinsection.types import MIB


def test_predictions_and_scores_are_those_of_scikit_learn_in_float64() -> None:
    data = blobs(classes=4)
    result = knn_probe(data)
    x, v = (s.embeddings.astype(np.float64) for s in (data.train, data.val))
    for k, score in result.details["score_by_k"].items():
        model = KNeighborsClassifier(int(k), metric="cosine", algorithm="brute")
        predicted = model.fit(x, data.train.labels).predict(v)
        assert score == pytest.approx(
            f1_score(data.val.labels, predicted, average="macro")
        )
        if int(k) == result.details["best_k"]:
            assert result.predictions is not None
            np.testing.assert_array_equal(result.predictions.prediction, predicted)
    assert 0.5 < result.score < 1.0
    assert result.score == max(result.details["score_by_k"].values())


def test_votes_tie_to_the_lowest_label() -> None:
    votes = count_votes(np.array([[2, 1, 1, 2], [3, 0, 3, 0]]), 4)
    np.testing.assert_array_equal(votes, [[0, 2, 2, 0], [2, 0, 0, 2]])
    np.testing.assert_array_equal(votes.argmax(axis=1), [1, 0])


def test_equal_scores_take_the_smallest_k() -> None:
    x = np.repeat(np.eye(2), 60, axis=0)
    labels = np.repeat([0, 1], 60)
    train, val = make_split(x, labels), make_split(2 * x, labels)
    result = knn_probe(
        TileSet(name="easy", class_names=("a", "b"), train=train, val=val)
    )
    assert set(result.details["score_by_k"].values()) == {1.0}
    assert result.details["best_k"] == 1


def test_equal_similarities_take_the_lowest_index_across_blocks() -> None:
    bank = np.tile(np.array([[1.0, 0.0], [0.0, 1.0]], np.float32), (5000, 1))
    found = nearest_rows(np.array([[2.0, 0.0]], np.float32), bank, 4)
    np.testing.assert_array_equal(found, [[0, 2, 4, 6]])


def test_neighbours_are_those_of_a_full_float64_sort_with_negative_similarities_too() -> (
    None
):
    rng = np.random.default_rng(1)
    queries = rng.normal(size=(37, 9)).astype(np.float32)
    bank = rng.normal(size=(53, 9)).astype(np.float32)
    found = nearest_rows(queries, bank, 53)
    a, b = (
        m / np.linalg.norm(m, axis=1, keepdims=True)
        for m in map(np.float64, (queries, bank))
    )
    np.testing.assert_array_equal(found, np.argsort(-(a @ b.T), axis=1, kind="stable"))


def test_rows_of_the_own_group_are_left_out_and_missing_ones_are_minus_one() -> None:
    x = np.array([[1, 0], [1, 0.1], [0.5, 1], [0, 1]], np.float32)
    groups = np.array([0, 0, 0, 1])
    found = nearest_rows(x, x, 2, groups=groups)
    np.testing.assert_array_equal(found, [[3, -1], [3, -1], [3, -1], [2, 1]])


def test_blocks_do_not_change_the_result() -> None:
    rng = np.random.default_rng(2)
    queries = rng.normal(size=(700, 8)).astype(np.float32)
    bank = rng.normal(size=(9000, 8)).astype(np.float32)
    small = nearest_rows(queries, bank, 7, budget_bytes=2 * MIB)
    np.testing.assert_array_equal(small, nearest_rows(queries, bank, 7))


def test_a_budget_below_one_query_is_refused() -> None:
    data = blobs()
    with pytest.raises(
        BudgetError, match=r"budget_bytes must be >= .* for one query .* got 1.0 KiB"
    ):
        knn_probe(data, budget_bytes=1024)


def test_k_beyond_the_training_rows_is_named() -> None:
    result = knn_probe(blobs(n_train=12))
    assert result.details["left_out_ks"] == [20, 30, 40, 50]


def test_embeddings_with_nan_are_refused_by_row() -> None:
    x = np.ones((4, 3), np.float32)
    x[2, 1] = np.nan
    with pytest.raises(InvalidInputError, match=r"NaN or inf in 1 of 4 rows \('c'\)"):
        make_split(x, [0, 1, 0, 1], ["a", "b", "c", "d"])


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="must have the same length, got 4 and 3"
    ):
        make_split(np.ones((4, 3)), [0, 1, 0])


def test_widths_that_differ_are_refused() -> None:
    a, b = make_split(np.ones((2, 3)), [0, 1]), make_split(np.ones((2, 4)), [0, 1])
    with pytest.raises(DatasetError, match="same number of channels, got 3 and 4"):
        knn_probe(TileSet(name="x", class_names=("a", "b"), train=a, val=b))


def test_a_class_without_training_rows_is_refused() -> None:
    split = make_split(np.eye(2, 3), [0, 0])
    with pytest.raises(DatasetError, match=r"none of tumour"):
        knn_probe(
            TileSet(name="x", class_names=("a", "tumour"), train=split, val=split)
        )


def embedded(n: int, budget_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Input of the measured call; also warms up torch's own allocations."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 64), dtype=np.float32)
    nearest_rows(x[:64], x[:64], 5, budget_bytes=budget_bytes)
    return x, x[:2000].copy()


def find(state: tuple[np.ndarray, np.ndarray], n: int, budget_bytes: int) -> int:
    """The measured call."""
    bank, queries = state
    return int(nearest_rows(queries, bank, 50, budget_bytes=budget_bytes).sum() % 1000)


@pytest.mark.check
def test_peak_memory_stays_within_the_budget_at_n_and_at_4n() -> None:
    budget = 48 * MIB
    growth = []
    for n in (15_000, 60_000):
        measured = run_and_measure(
            "tests.probe.test_knn",
            "find",
            setup="embedded",
            n=n,
            budget_bytes=budget,
            timeout_s=120,
        )
        growth.append(measured.growth_bytes)
    all_pairs = 2000 * 60_000 * 4
    assert max(growth) < 1.3 * budget < all_pairs / 6, (
        growth
    )  # allocator and library included
    # four times the rows add no more than the allocator may keep, not 360 MB of similarities
    assert growth[1] < growth[0] + 0.5 * budget, growth


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_finds_the_neighbours_that_the_cpu_finds() -> None:
    rng = np.random.default_rng(5)
    queries = rng.normal(size=(300, 32)).astype(np.float32)
    bank = rng.normal(size=(9000, 32)).astype(np.float32)
    cpu, gpu = (nearest_rows(queries, bank, 20, device=d) for d in ("cpu", "cuda"))
    assert (cpu == gpu).mean() > 0.999  # sums are rounded in another order
