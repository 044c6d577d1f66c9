"""SimpleShot against its plain float64 form, one support set and one query at a time."""

import numpy as np
import pytest
import torch
from tests.probe.make import blobs

from thinsection.errors import BudgetError, DatasetError
from thinsection.probe.data.sets import TileSet, make_split
from thinsection.probe.probes.tiles import (
    draw_support_sets,
    fewshot_probe,
    simpleshot_votes,
)
from thinsection.types import MIB


def plain_votes(
    train: np.ndarray, queries: np.ndarray, support: np.ndarray
) -> np.ndarray:
    train, queries = train.astype(np.float64), queries.astype(np.float64)
    votes = np.zeros((len(queries), support.shape[1]), int)
    for chosen in support:
        rows = train[chosen]
        mean = rows.reshape(-1, rows.shape[-1]).mean(axis=0)
        prototypes = (rows - mean).mean(axis=1)
        prototypes /= np.linalg.norm(prototypes, axis=1, keepdims=True)
        for i, q in enumerate(queries - mean):
            votes[i, (prototypes @ (q / np.linalg.norm(q))).argmax()] += 1
    return votes


def test_votes_are_those_of_the_plain_float64_form() -> None:
    data = blobs(n_train=400)
    support = draw_support_sets(
        data.train.labels, data.class_names, shots=16, num_sets=70, seed=3
    )
    ours = simpleshot_votes(data.train.embeddings, data.val.embeddings, support)
    np.testing.assert_array_equal(
        ours, plain_votes(data.train.embeddings, data.val.embeddings, support)
    )
    assert len(set(map(tuple, ours.tolist()))) > 10  # the sets disagree: a real vote


def test_blocks_do_not_change_the_votes() -> None:
    data = blobs(n_train=400)
    support = draw_support_sets(
        data.train.labels, data.class_names, shots=16, num_sets=70, seed=3
    )
    args = (data.train.embeddings, data.val.embeddings, support)
    np.testing.assert_array_equal(
        simpleshot_votes(*args, budget_bytes=MIB // 8), simpleshot_votes(*args)
    )


def test_support_is_drawn_without_replacement_from_the_right_class_and_reproduces() -> (
    None
):
    labels = np.random.default_rng(0).integers(0, 2, 60)
    draw = [
        draw_support_sets(labels, ("a", "b"), shots=16, num_sets=50, seed=s)
        for s in (5, 5, 6)
    ]
    np.testing.assert_array_equal(draw[0], draw[1])
    assert (draw[0] != draw[2]).any()
    for chosen in draw[0]:
        for c in (0, 1):
            assert (labels[chosen[c]] == c).all()
            assert len(set(chosen[c].tolist())) == 16


def test_the_probe_votes_over_1000_sets_and_reproduces_to_the_bit() -> None:
    data = blobs(n_train=300)
    first, second = fewshot_probe(data), fewshot_probe(data)
    assert first.details["support_sets"] == 1000
    assert first.score == second.score > 0.6
    assert first.predictions is not None
    assert second.predictions is not None
    assert first.predictions.probability is not None
    assert second.predictions.probability is not None
    assert (
        first.predictions.probability.tobytes()
        == second.predictions.probability.tobytes()
    )
    np.testing.assert_allclose(first.predictions.probability.sum(axis=1), 1.0)


def test_a_vote_that_ties_takes_the_lowest_label() -> None:
    # both classes have the same rows: every prototype is zero, every cosine equal
    x = np.tile(np.eye(2, dtype=np.float32), (16, 1))
    split = make_split(np.r_[x, x], np.repeat([0, 1], 32))
    support = np.stack([np.arange(16), 32 + np.arange(16)])[None]
    votes = simpleshot_votes(split.embeddings, split.embeddings, support)
    np.testing.assert_array_equal(votes.argmax(axis=1), 0)


def test_a_class_with_fewer_than_16_rows_is_refused_by_name() -> None:
    x, labels = np.arange(1, 63).reshape(31, 2), np.repeat([0, 1], [16, 15])
    train, val = make_split(x, labels), make_split(x + 0.5, labels)
    data = TileSet(name="x", class_names=("stroma", "necrosis"), train=train, val=val)
    with pytest.raises(
        DatasetError,
        match=r"must have >= 16 training rows for 16 shots, got 15 of class 'nec",
    ):
        fewshot_probe(data)


def test_a_budget_below_one_support_set_is_refused() -> None:
    with pytest.raises(
        BudgetError, match=r"budget_bytes must be >= .* for one support set"
    ):
        fewshot_probe(blobs(n_train=300), budget_bytes=2048)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_votes_as_the_cpu_does() -> None:
    data = blobs(n_train=400)
    cpu, gpu = (fewshot_probe(data, device=d) for d in ("cpu", "cuda"))
    assert cpu.predictions is not None
    assert gpu.predictions is not None
    np.testing.assert_array_equal(
        cpu.predictions.prediction, gpu.predictions.prediction
    )
