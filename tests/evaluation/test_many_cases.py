"""Figures of many cases take no array of all pairs; in blocks they are what all pairs give."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import norm
from tests.support.units import units

from thinsection.evaluation import comparison, copies, survival
from thinsection.evaluation.comparison import permuted_labels
from thinsection.evaluation.copies import copied_slides, samples_per_slide
from thinsection.evaluation.splits import stratified_folds
from thinsection.evaluation.survival import (
    comparable_pairs,
    concordance,
    survival_curve,
)
from thinsection.types import MIB

Floats = npt.NDArray[np.float64]


def peak_of(function: Callable[[], object]) -> int:
    """Largest number of bytes that a call allocates."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def follow_up(n: int, seed: int = 0) -> tuple[npt.NDArray[np.bool_], Floats, Floats]:
    """Events, times with ties, and risks with ties of n cases."""
    rng = np.random.default_rng(seed)
    time = np.ceil(rng.exponential(20, n))
    risk = np.round(-time / 20 + rng.normal(size=n), 1)
    return rng.random(n) < 0.5, time, risk


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("pairs_at_a_time", [1, 40 * 7 + 3, 2**20])
def test_a_c_index_in_blocks_counts_every_pair_once(
    monkeypatch: pytest.MonkeyPatch, pairs_at_a_time: int, *, folds: bool
) -> None:
    monkeypatch.setattr(survival, "PAIRS", pairs_at_a_time)
    event, time, risk = follow_up(40)
    fold = np.arange(40) % 3 if folds else None
    weights = np.random.default_rng(1).integers(0, 3, size=(5, 40)).astype(np.float64)
    expected = []
    for w in weights:
        top = bottom = 0.0
        for i in range(40):
            for j in range(40):
                is_earlier = time[i] < time[j] or (time[i] == time[j] and not event[j])
                is_of_one_model = fold is None or fold[i] == fold[j]
                if event[i] and is_earlier and is_of_one_model:
                    right = 1.0 if risk[i] > risk[j] else 0.5 * (risk[i] == risk[j])
                    top += w[i] * w[j] * right
                    bottom += w[i] * w[j]
        expected.append(top / bottom)
    found = concordance(event, time, risk, fold)(weights)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    num_pairs = sum(int(p.sum()) for _, p in comparable_pairs(event, time, fold))
    ones = np.ones((40, 40), dtype=bool) if fold is None else fold[:, None] == fold
    earlier = (time[:, None] < time) | ((time[:, None] == time) & ~event)
    assert num_pairs == (event[:, None] & earlier & ones).sum() > 50


def plain_band(
    event: npt.NDArray[np.bool_], time: Floats, patients: npt.NDArray[np.int64]
) -> tuple[list[float], list[float]]:
    """Log-log intervals of Kaplan and Meier's estimate, patient by patient and time by time."""
    low, high = [], []
    survival = 1.0
    influence = dict.fromkeys(patients.tolist(), 0.0)  # of each patient on log survival
    for t in sorted(set(time.tolist())):
        at_risk = int((time >= t).sum())
        died = int(((time == t) & event).sum())
        survival *= 1 - died / at_risk
        if survival == 0:
            low.append(0.0)
            high.append(0.0)
            continue
        for patient, died_now, follow_up_end in zip(
            patients.tolist(),
            ((time == t) & event).tolist(),
            time.tolist(),
            strict=True,
        ):
            if follow_up_end >= t:
                surplus = died_now - died / at_risk
                influence[patient] += surplus / (at_risk - died)
        if survival == 1:
            low.append(1.0)
            high.append(1.0)
            continue
        error = sum(part**2 for part in influence.values()) ** 0.5
        reach = norm.ppf(0.975) * error / abs(np.log(survival))
        low.append(survival ** np.exp(reach))
        high.append(survival ** np.exp(-reach))
    return low, high


@pytest.mark.parametrize("pairs_at_a_time", [1, 90])
def test_a_band_in_blocks_of_patients_is_that_of_all(
    monkeypatch: pytest.MonkeyPatch, pairs_at_a_time: int
) -> None:
    """One to three cases a patient, whose rows are not beside each other."""
    event, time, _ = follow_up(60)
    patients = np.random.default_rng(2).integers(0, 30, size=60)
    groups = units(patients.tolist())
    whole = survival_curve(event, time, groups)
    monkeypatch.setattr(survival, "PAIRS", pairs_at_a_time)
    found = survival_curve(event, time, groups)
    assert len(np.unique(patients)) < 30
    np.testing.assert_allclose(found.low, whole.low, rtol=1e-12)
    np.testing.assert_allclose(found.high, whole.high, rtol=1e-12)
    low, high = plain_band(event, time, patients)
    np.testing.assert_allclose(found.low, low, rtol=1e-9)
    np.testing.assert_allclose(found.high, high, rtol=1e-9)


def test_survival_of_many_cases_takes_a_few_mib() -> None:
    event, time, risk = follow_up(6000)
    time = time + np.arange(6000) / 6000  # no two are equal
    groups = units((np.arange(6000) // 2).tolist())
    score = concordance(event, time, risk)
    assert peak_of(lambda: score(np.ones((1, 6000)))) < 64 * MIB
    assert peak_of(lambda: survival_curve(event, time, groups)) < 64 * MIB


@pytest.mark.parametrize("cases", [30, 50])
def test_a_ridge_has_one_answer_in_both_forms(cases: int) -> None:
    """40 channels: fewer training cases than channels, and more."""
    rng = np.random.default_rng(3)
    means = rng.normal(size=(60, 40)) * rng.uniform(0.1, 9, 40)
    means[:, 7] = 4.0
    targets = rng.normal(size=(60, 3))
    train, test = np.arange(cases), np.arange(cases, 60)
    found = comparison._ridge(means, targets, train, test)
    center, spread = means[train].mean(axis=0), means[train].std(axis=0)
    spread[spread == 0] = 1
    x, x_test = ((means[rows] - center) / spread / 40**0.5 for rows in (train, test))
    middle = targets[train].mean(axis=0)
    dual = np.linalg.inv(x @ x.T + comparison.RIDGE * np.eye(cases))
    expected = x_test @ x.T @ dual @ (targets[train] - middle) + middle
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def test_a_ridge_of_many_cases_has_no_matrix_of_cases() -> None:
    rng = np.random.default_rng(4)
    means, targets = rng.normal(size=(8000, 16)), rng.normal(size=(8000, 2))
    rows = np.arange(8000)
    peak = peak_of(lambda: comparison._ridge(means, targets, rows[500:], rows[:500]))
    assert peak < 16 * MIB  # a matrix of the cases has 430


def test_a_ridge_of_many_channels_has_no_matrix_of_channels_by_labels() -> None:
    rng = np.random.default_rng(4)
    means, targets = rng.normal(size=(60, 4000)), rng.normal(size=(60, 2000))
    rows = np.arange(60)
    peak = peak_of(lambda: comparison._ridge(means, targets, rows[20:], rows[:20]))
    assert peak < 16 * MIB  # that matrix has 61


@pytest.mark.parametrize(("n", "dim"), [(100, 4000), (400, 50)])
def test_permuted_labels_take_the_memory_of_the_formula(n: int, dim: int) -> None:
    """More channels than cases, and fewer."""
    means = np.random.default_rng(9).normal(size=(n, dim))
    labels = np.arange(n) % 4
    folds = stratified_folds(labels, folds=5, seed=0)
    columns = 4 * 100

    def score() -> None:
        permuted_labels(
            means,
            labels.astype(np.float64),
            4,
            folds,
            np.arange(n),
            seed=0,
            permutations=99,
        )

    score()  # loads what is loaded once
    floats = 3 * n * dim + 6 * n * columns + 2 * min(n, dim) ** 2
    floats += 3 * dim * columns if dim < n else 0
    assert peak_of(score) < 8 * floats + MIB / 2


def looked_for(
    means: Floats, cases: npt.NDArray[np.int64]
) -> tuple[list[copies.CopyPair], list[tuple[int, ...]]]:
    """Copies, and which slides were read, of slides whose tiles are noise."""
    rng = np.random.default_rng(5)
    n = len(means)
    samples = copies.directions(rng.normal(size=(4 * n, means.shape[1])))
    read: list[int] = []

    def tiles(slide: int, rows: npt.NDArray[np.int64]) -> Floats:
        read.append(slide)
        own = np.random.default_rng(100 + slide)
        return np.asarray(own.normal(size=(len(rows), means.shape[1])))

    found = copied_slides(
        means,
        samples.reshape(n, 4, -1),  # type: ignore[arg-type]
        cases,
        tiles,
        digests=[str(i) for i in range(n)],
        num_tiles=np.full(n, 40),
    )
    return found, [tuple(sorted(p)) for p in zip(read[::2], read[1::2], strict=True)]


@pytest.mark.parametrize("block", [1, 7, 512])
def test_the_nearest_slides_are_found_in_blocks(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Those of all pairs of slides of different cases, and the two planted copies."""
    monkeypatch.setattr(copies, "_BLOCK", block)
    monkeypatch.setattr(copies, "MAX_PAIRS", 20)
    rng = np.random.default_rng(6)
    means = rng.normal(size=(60, 16))
    means[41] = means[3] + 0.01 * rng.normal(size=16)
    means[50] = means[20] + 0.01 * rng.normal(size=16)
    cases = np.arange(60) // 2
    found, compared = looked_for(means, cases)
    assert [(pair.first, pair.second) for pair in found] == [(3, 41), (20, 50)]
    z = copies._standardised(means, *copies._scale(means))
    distance = np.linalg.norm(z[:, None] - z, axis=2)
    distance[cases[:, None] == cases] = np.inf
    near = {
        tuple(sorted((i, int(j)))): distance[i, j]
        for i in range(60)
        for j in np.argsort(distance[i])[: copies.NEIGHBOURS]
    }
    assert compared == sorted(near, key=lambda pair: near[pair])[:20]


def test_the_search_for_copies_takes_no_memory_for_pairs_of_slides() -> None:
    means = np.random.default_rng(7).normal(size=(4000, 16))
    peak = peak_of(lambda: looked_for(means, np.arange(4000)))
    assert peak < 100 * MIB  # the distances of all pairs have 122, beside their cosines


def test_slides_of_two_patients_alone_are_not_compared() -> None:
    """No third patient says how near slides usually are."""
    means = np.random.default_rng(8).normal(size=(8, 16))
    means[7] = means[0]
    assert looked_for(means, np.arange(8) // 4) == ([], [])


def test_many_slides_have_fewer_samples_each() -> None:
    assert samples_per_slide(1) == samples_per_slide(1000) == copies.SAMPLED_TILES
    assert samples_per_slide(10_000) == 3
    assert samples_per_slide(10**6) == 1


def test_a_single_sample_is_not_at_the_border() -> None:
    assert [copies.spread_rows(n, 1).tolist() for n in (1, 2, 9)] == [[0], [1], [4]]
    assert copies.spread_rows(9, 3).tolist() == [0, 4, 8]
