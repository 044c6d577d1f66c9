"""Fewer rows per class: how many, which, and that the set says so."""

import numpy as np
import pytest
from tests.probe.make import blobs, split_tiles

from thinsection.errors import InvalidInputError
from thinsection.evaluation.splits import draw_rows
from thinsection.probe.data.sets import LabelledRows


def labelled_rows() -> LabelledRows:
    """The 150 training and the 90 validation rows of `blobs`, named by their place."""
    data = blobs(n_train=150, n_val=90)
    labels = np.concatenate([data.train.labels, data.val.labels])
    vectors = np.concatenate([data.train.embeddings, data.val.embeddings])
    fold = np.arange(150), np.arange(150, 240)
    ids = [str(i) for i in range(240)]
    return LabelledRows("blobs", data.class_names, labels, fold, {}, vectors, ids)


def test_at_most_so_many_of_each_class_stay_in_their_order() -> None:
    rows = labelled_rows()
    data, thin = split_tiles(rows), split_tiles(rows.at_most_per_class(20, seed=1))
    counts = np.bincount(data.train.labels)
    np.testing.assert_array_equal(
        np.bincount(thin.train.labels), np.minimum(counts, 20)
    )
    kept = [int(name) for name in thin.train.ids]
    assert kept == sorted(kept)
    np.testing.assert_array_equal(thin.train.embeddings, data.train.embeddings[kept])
    assert thin.facts["max_per_class"] == 20
    assert "max_per_class" not in data.facts


def test_the_draw_follows_the_seed() -> None:
    labels = np.repeat([0, 1], 50)
    draws = [draw_rows(labels, 10, seed=s).tolist() for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_none_of_a_class_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_per_class must be >= 1, got 0"):
        labelled_rows().at_most_per_class(0, seed=1)
