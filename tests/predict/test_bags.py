"""Bags: the same rows whether they are read by need, kept, or packed; in bounded memory."""

import importlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from tests.predict.planted import write_embeddings

from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation.embeddings import open_embeddings
from thinsection.predict.bags import Bags, StoredBag, mean_of_blocks
from thinsection.store.tile_tables import EmbeddingRows


@pytest.fixture
def slides(tmp_path: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(1)
    for name, count in (("a", 700), ("b", 33)):
        write_embeddings(tmp_path / f"{name}.h5", rng.normal(size=(count, 24)))
    return tmp_path / "a.h5", tmp_path / "b.h5"


def test_drawn_rows_are_those_of_the_whole_bag(slides: tuple[Path, Path]) -> None:
    whole = Bags([slides], budget_bytes=0).read(0).features
    drawn = (
        Bags([slides], budget_bytes=0)
        .read(0, most=50, rng=np.random.default_rng(3))
        .features
    )
    rows = np.sort(np.random.default_rng(3).choice(733, 50, replace=False))
    np.testing.assert_array_equal(drawn, whole[rows])


def test_a_bag_that_is_kept_gives_the_same_draws_as_one_that_is_not(
    slides: tuple[Path, Path],
) -> None:
    for budget in (0, 1 << 20):
        bags = Bags([slides], budget_bytes=budget, cells=True)
        got = [bag for _, bag in bags.stream([0, 0], most=90, seed=[7])]
        if budget == 0:
            expected = got
        for bag, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(bag.features, other.features)
            np.testing.assert_array_equal(bag.cells, other.cells)


def test_only_a_small_kept_bag_that_is_whole_is_read_without_the_thread(
    slides: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(*, most: int, budget_bytes: int = 1 << 20, cells: bool = False) -> int:
        """Reads in the thread for a second stream; the bags of both are the same."""
        with Bags([slides], budget_bytes=budget_bytes, cells=cells) as bags:
            (first,) = bags.stream([0], most=most, seed=[7])
            submit = bags._thread.submit
            calls = list[object]()

            def counted(*arguments: Any, **settings: Any) -> Any:
                calls.append(arguments)
                return submit(*arguments, **settings)

            monkeypatch.setattr(bags._thread, "submit", counted)
            (again,) = bags.stream([0], most=most, seed=[7])
            np.testing.assert_array_equal(again[1].features, first[1].features)
        return len(calls)

    assert reads(most=0) == 0
    assert reads(most=733) == 0
    assert reads(most=732) == 1
    assert reads(most=0, budget_bytes=0) == 1
    assert reads(most=0, cells=True) == 1
    # the module, since `thinsection.predict` may also be the function
    room = importlib.import_module("thinsection.predict.bags")
    monkeypatch.setattr(room, "SMALL_BYTES", 100)
    assert reads(most=0) == 1


def test_slides_of_a_case_lie_side_by_side(slides: tuple[Path, Path]) -> None:
    cells = Bags([slides], cells=True).read(0).cells
    assert cells is not None
    assert cells[:700, 0].max() == 9
    assert cells[700:, 0].min() == 10 + 1023
    assert len(np.unique(cells, axis=0)) == 733


def test_rows_of_packed_cut_and_foreign_files_are_the_same(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(101, 6)).astype(np.float32)
    how = {"packed": {"compression": "gzip"}, "cut": {"chunks": (7, 2)}, "plain": {}}
    for name, more in how.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("features", data=x, **more)
    with h5py.File(tmp_path / "batch.h5", "w") as file:  # TRIDENT's
        file.create_dataset("features", data=x[None], chunks=(1, 1, 6))
    with h5py.File(tmp_path / "stamp.h5", "w") as file:
        file["feats"] = x.astype(np.float16)
    rows = np.array([100, 0, 55])
    for name in (*how, "batch"):
        np.testing.assert_array_equal(
            EmbeddingRows(tmp_path / f"{name}.h5")[rows], x[rows]
        )
        np.testing.assert_array_equal(
            EmbeddingRows(tmp_path / f"{name}.h5")[3:9], x[3:9]
        )
    bag = Bags([[tmp_path / "stamp.h5"]]).read(0)
    np.testing.assert_array_equal(bag.features, x.astype(np.float16).astype(np.float32))


def test_a_bag_without_tiles_of_two_encoders_or_with_nan_is_refused(
    tmp_path: Path,
) -> None:
    write_embeddings(tmp_path / "none.h5", np.empty((0, 4)))
    write_embeddings(tmp_path / "four.h5", np.ones((3, 4)))
    write_embeddings(tmp_path / "five.h5", np.ones((3, 5)))
    with h5py.File(tmp_path / "nan.h5", "w") as file:
        file["features"] = np.array([[1.0, np.nan]], np.float32)
    with pytest.raises(DatasetError, match=r"must have tiles, got none in .*none\.h5"):
        Bags([[tmp_path / "none.h5"]]).read(0)
    with pytest.raises(DatasetError, match=r"one encoder, got \[4, 5\]"):
        Bags([[tmp_path / "four.h5", tmp_path / "five.h5"]]).read(0)
    with pytest.raises(InvalidInputError, match=r"1 of 1 rows \(0\) of .*nan\.h5"):
        Bags([[tmp_path / "nan.h5"]]).read(0)


def test_a_small_bag_in_memory_is_joined_once_within_the_budget(
    tmp_path: Path, slides: tuple[Path, Path]
) -> None:
    joined_bytes = 733 * 24 * 4
    for budget_bytes, is_kept in ((joined_bytes, False), (2 * joined_bytes, True)):
        with Bags([slides, slides[:1]], budget_bytes=budget_bytes) as bags:
            (read,) = bags.stream([0])
            first, second = bags.stream([0, 0])
            assert (first[1] is second[1]) == is_kept
            for _, bag in (first, second):
                np.testing.assert_array_equal(bag.features, read[1].features)
            # a bag of one slide takes no memory beside the slide
            assert bags._bytes_left == 0


def test_a_stored_bag_gives_the_rows_of_all_slides_in_blocks(
    slides: tuple[Path, Path], tmp_path: Path
) -> None:
    whole = Bags([slides], budget_bytes=0).read(0).features
    array = tmp_path / "b.npy"
    np.save(array, whole[700:])
    for paths in (slides, (slides[0], array)):
        bag = StoredBag([open_embeddings(path) for path in paths], paths)
        for num_rows in (1, 32, 700, 733, 734):
            blocks = [*bag.blocks(num_rows)]
            assert {len(block) for block in blocks[:-1]} <= {num_rows}
            np.testing.assert_array_equal(np.concatenate(blocks), whole)
        assert len(bag) == 733 and bag.num_bytes == whole.nbytes
        np.testing.assert_array_equal(bag.mean(), whole.mean(0, dtype=np.float64))
        np.testing.assert_array_equal(bag.read(cells=False).features, whole)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_mean_of_blocks_has_the_bits_of_numpys(dtype: type[np.floating]) -> None:
    rows = np.random.default_rng(2).normal(size=(3001, 5)).astype(dtype)
    blocks = (rows[start : start + 512] for start in range(0, len(rows), 512))
    np.testing.assert_array_equal(
        mean_of_blocks(blocks), rows.mean(0, dtype=np.float64)
    )


def test_a_stored_bag_refuses_values_that_are_not_finite(tmp_path: Path) -> None:
    rows = np.ones((9, 4), np.float32)
    rows[5, 1] = np.nan
    path = tmp_path / "a.npy"
    np.save(path, rows)
    with pytest.raises(InvalidInputError, match=r"row 5 of a\.npy"):
        StoredBag([open_embeddings(path)], [path])
