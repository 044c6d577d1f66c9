"""The protocol honest: nothing is selected on scored rows, and noise is at chance."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest
from tests.probe.make import blobs

from thinsection.config import as_mapping
from thinsection.evaluation.cases import Groups, group_rows
from thinsection.probe import CaseSet, SurvivalSet, TileSet, make_split
from thinsection.probe.honest import permutation_of_labels
from thinsection.probe.probes import cases as case_probes
from thinsection.probe.probes.cases import slide_probe, survival_probe
from thinsection.probe.probes.tiles import (
    calibration_probe,
    fewshot_probe,
    knn_probe,
    linear_probe,
)
from thinsection.probe.protocol import HONEST, NANOPATH
from thinsection.probe.result import choices, selection_words, tileset_result

assert HONEST.linear is not None
LINEAR = dataclasses.replace(HONEST.linear, epochs=12, lrs=(1e-1, 1e-2))
QUICK = dataclasses.replace(
    HONEST, linear=LINEAR, null_draws=2, shots=(4, 16), repeats=2
)


def noise(seed: int, n_train: int = 120, n_val: int = 100) -> TileSet:
    rng = np.random.default_rng(seed)
    train, val = (
        make_split(rng.normal(size=(n, 16)), rng.permutation(np.arange(n) % 2))
        for n in (n_train, n_val)
    )
    return TileSet(name="noise", class_names=("a", "b"), train=train, val=val)


@pytest.mark.parametrize("probe", [linear_probe, knn_probe, fewshot_probe])
def test_no_scored_row_has_a_say_in_the_settings(probe: Any) -> None:
    data = blobs(n_train=90, n_val=60)
    result = probe(data, protocol=QUICK)
    rng = np.random.default_rng(0)
    other = dataclasses.replace(data.val, labels=rng.permutation(data.val.labels))
    again = probe(dataclasses.replace(data, val=other), protocol=QUICK)
    assert result.details["selected"] == again.details["selected"]
    assert result.predictions is not None
    assert again.predictions is not None
    np.testing.assert_array_equal(result.predictions.repeats, again.predictions.repeats)
    assert result.score == pytest.approx(np.mean(result.details["seed_scores"]))
    assert len(result.details["seed_scores"]) == 2
    assert result.score > 0.7 > result.details["null_score"]
    assert [*result.details["score_by_shots"]] == ["4", "16", "all"]
    assert as_mapping(result.protocol)["name"] == "honest"


@pytest.mark.check
def test_the_best_of_many_on_scored_noise_is_above_chance_and_honest_is_at_it() -> None:
    honest = [linear_probe(noise(seed), protocol=QUICK) for seed in range(6)]
    assert NANOPATH.linear is not None
    settings = dataclasses.replace(NANOPATH.linear, epochs=60)
    nanopath = dataclasses.replace(NANOPATH, linear=settings)
    best = [linear_probe(noise(seed), protocol=nanopath) for seed in range(6)]
    assert np.mean([r.score for r in best]) > 0.55
    assert abs(np.mean([r.score for r in honest]) - 0.5) < 0.04
    covered = [r.interval.low < 0.5 < r.interval.high for r in honest if r.interval]
    assert np.mean(covered) >= 0.85
    assert selection_words(best[0]).startswith(
        "the best of 180 settings on the scored rows"
    )
    assert selection_words(honest[0]) == "chosen on 3 inner folds of the training rows"


def test_inner_folds_keep_patients_together() -> None:
    data = blobs(n_train=90)
    owners = group_rows([f"s{i // 10}" for i in range(90)], where="here")
    train = dataclasses.replace(data.train, groups=owners)
    result = knn_probe(dataclasses.replace(data, train=train), protocol=QUICK)
    assert (
        selection_words(result)
        == "chosen on 3 inner folds of the training rows over slides"
    )


def cases(seed: int, *, effect: float = 0.0, n: int = 60) -> CaseSet:
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    x = rng.normal(size=(n, 8))
    x[:, 0] += effect * labels
    ids = tuple(f"c{i}" for i in range(n))
    return CaseSet(
        name="c",
        class_names=("a", "b"),
        ids=ids,
        labels=labels,
        vectors=x.astype(np.float32),
    )


def test_slides_are_scored_in_nested_folds_of_each_seed() -> None:
    result = slide_probe(cases(0, effect=2.0), protocol=QUICK)
    assert result.score > 0.8 > result.details["null_score"]
    assert len(result.facts["fold_sizes"]) == 2 * 5
    assert sum(result.details["selected"].values()) == 10
    assert result.predictions is not None
    assert len(result.predictions.ids) == 2 * 60
    assert result.interval is not None
    assert result.interval.units == 60
    assert [*result.details["score_by_shots"]] == ["4", "16", "all"]


def test_survival_selects_its_penalty_inside_and_rotation_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    n, dim = 60, 90
    x = rng.normal(size=(n, dim))
    time = np.exp(-x[:, 0] + 0.3 * rng.normal(size=n))
    data = SurvivalSet(
        name="s",
        ids=tuple(map(str, range(n))),
        vectors=x.astype(np.float32),
        event=rng.random(n) < 0.7,
        time=time,
    )
    result = survival_probe(data, protocol=dataclasses.replace(QUICK, repeats=1))
    assert set(result.details["selected"]) <= {"1.0", "10.0", "100.0"}
    assert HONEST.survival is not None
    once = [
        survival_probe(
            data,
            protocol=dataclasses.replace(
                HONEST,
                inner_folds=0,
                survival=dataclasses.replace(HONEST.survival, rotate=rotate),
            ),
        )
        for rotate in (True, False)
    ]
    assert choices(once[0]) == pytest.approx(choices(once[1]))


def test_labels_are_permuted_by_group_where_a_group_has_one() -> None:
    labels, of_row = np.repeat([0, 1, 1, 0], 5), tuple(np.repeat(list("abcd"), 5))
    mixed = permutation_of_labels(labels, Groups("patients", of_row), seed=3)
    assert all(len(set(labels[mixed][i : i + 5])) == 1 for i in range(0, 20, 5))
    assert sorted(labels[mixed]) == sorted(labels)
    assert len(set(labels[permutation_of_labels(labels, None, seed=3)][:5])) == 2


def test_patients_of_unequal_size_may_leave_a_permuted_class_few_rows() -> None:
    rng = np.random.default_rng(0)
    sizes = (30, 30, 3, 3, 3, 3)  # of patients: a class of two small ones has 6 rows
    owner = np.repeat(np.arange(6), sizes)
    labels = np.array([0, 1, 0, 1, 0, 0])[owner]
    owners = group_rows([f"p{i}" for i in owner], where="here")
    train = make_split(
        rng.normal(size=(72, 4)) + 3 * labels[:, None], labels, groups=owners
    )
    val = make_split(
        rng.normal(size=(40, 4)) + 3 * (np.arange(40) % 2)[:, None], np.arange(40) % 2
    )
    data = TileSet(name="few", class_names=("a", "b"), train=train, val=val)
    protocol = dataclasses.replace(QUICK, null_draws=8, repeats=1)
    fewest = min(
        np.bincount(
            labels[permutation_of_labels(labels, owners, seed)], minlength=2
        ).min()
        for seed in range(1, 9)
    )
    assert fewest < 16  # fewer than the shots
    result = fewshot_probe(data, protocol=protocol)
    assert len(result.details["null_scores"]) == 8
    assert result.score > 0.9


def test_scores_that_rest_on_others_say_how_these_were_chosen() -> None:
    data = blobs(n_train=90, n_val=60)
    assert NANOPATH.linear is not None
    linear = dataclasses.replace(NANOPATH.linear, epochs=4)
    nanopath = dataclasses.replace(NANOPATH, linear=linear)
    for protocol, words in (
        (nanopath, "on the scored rows"),
        (QUICK, "chosen on 3 inner folds"),
    ):
        assert words in selection_words(calibration_probe(data, protocol=protocol))
        both = [probe(data, protocol=protocol) for probe in (linear_probe, knn_probe)]
        said = selection_words(tileset_result(both))
        assert said.count(words) == 2
        assert said.startswith("linear: ")


@pytest.mark.check
def test_p_of_cross_validated_noise_is_uniform() -> None:
    """Slides of 20 patients: answers that are not fitted anew give p <= .1 far too often."""
    found = []
    for seed in range(80):
        rng = np.random.default_rng(seed)
        owner = np.repeat(np.arange(20), 4)
        vectors = rng.normal(size=(20, 32))[owner] + 0.5 * rng.normal(size=(80, 32))
        ids = tuple(f"s{i:03}" for i in range(80))
        cohort = CaseSet(
            name="noise",
            ids=ids,
            vectors=vectors.astype(np.float32),
            groups=group_rows(ids, [f"p{i:03}" for i in owner], where="noise"),
            class_names=("a", "b"),
            labels=rng.permutation(np.arange(20) % 2)[owner],
        )
        folds = case_probes._folds(cohort, HONEST)
        found.append(case_probes._null_p(cohort, folds, seed=0))
    assert kstest(found, "uniform").pvalue > 0.01
    assert np.mean(np.array(found) <= 0.1) < 0.2
