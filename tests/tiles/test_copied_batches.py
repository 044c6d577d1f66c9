"""A batch that is copied or pickled keeps its pixels; a live one never lends those of another."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import numpy as np
import pytest

import thinsection as ts
from thinsection.errors import CopyError
from thinsection.testing.synthetic import ArraySlide, position_pixels
from thinsection.tiles import TilesConfig, TileTable
from thinsection.tiles.stream import TileBatch

PICTURES = [position_pixels((700, 500)), 255 - position_pixels((700, 500))]
CONFIG = TilesConfig(tile_px=64, tile_mpp="native", min_tissue_fraction=0)
WAYS: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda batch: pickle.loads(pickle.dumps(batch)),  # noqa: S301
    lambda batch: pickle.loads(cloudpickle.dumps(batch)),  # noqa: S301
]


def two_slides() -> list[ArraySlide]:
    names = ("first slide.svs", "second:slide.svs")
    return [ArraySlide([p], name=n) for p, n in zip(PICTURES, names, strict=True)]


@pytest.mark.parametrize("way", WAYS)
def test_copies_outlive_the_batches_of_two_slides_that_are_read_in_turn(
    way: Callable[[Any], Any],
) -> None:
    slides = two_slides()
    tables = [ts.tile_grid(slide, CONFIG) for slide in slides]
    streams = [
        ts.iter_tiles(slide, table, batch_size=7)
        for slide, table in zip(slides, tables, strict=True)
    ]
    kept = []
    for pair in zip(*streams, strict=True):
        kept.append([way(batch) for batch in pair])
    assert len(kept) > 3
    for copies in kept:
        for batch, slide, table, pixels in zip(
            copies, slides, tables, PICTURES, strict=True
        ):
            assert isinstance(batch, TileBatch)
            assert batch.source.slide_path == slide.slide_path
            assert batch.source.plan == table.plan
            assert batch.source.slide is None
            np.testing.assert_array_equal(
                batch.coords_l0, table.coords_l0[batch.indices]
            )
            for (x, y), tile in zip(batch.coords_l0, batch.tiles, strict=True):
                np.testing.assert_array_equal(tile, pixels[y : y + 64, x : x + 64])
            batch.release()


@pytest.mark.parametrize("way", WAYS)
def test_a_released_batch_refuses(way: Callable[[Any], Any]) -> None:
    (slide, _) = two_slides()
    stream: Any = ts.iter_tiles(slide, ts.tile_grid(slide, CONFIG), batch_size=7)
    first = next(stream)
    _ = next(stream)
    with pytest.raises(CopyError, match="before the next one is asked for"):
        way(first)
    assert "released" in repr(first)
    stream.close()


def test_a_thread_that_pickles_later_is_refused_and_not_given_other_pixels() -> None:
    """`multiprocessing` pickles in a thread, after the caller went on to the next batch."""
    (slide, _) = two_slides()
    with ThreadPoolExecutor(1) as thread:
        stream: Any = ts.iter_tiles(slide, ts.tile_grid(slide, CONFIG), batch_size=7)
        batches = [next(stream), next(stream), next(stream)]
        answers = [thread.submit(pickle.dumps, batch) for batch in batches]
        assert [type(answer.exception()) for answer in answers] == [
            CopyError,
            CopyError,
            type(None),
        ]
        stream.close()


def test_a_copy_of_a_batch_has_as_many_bytes_as_its_tiles() -> None:
    (slide, _) = two_slides()
    stream: Any = ts.iter_tiles(slide, ts.tile_grid(slide, CONFIG), batch_size=7)
    batch = next(stream)
    assert 0 < len(pickle.dumps(batch)) - batch.tiles.nbytes < 4096
    stream.close()


def test_rows_of_a_table_are_tables() -> None:
    table = ts.tile_grid(two_slides()[0], CONFIG)
    table = table.with_columns(
        {"a b": np.arange(len(table)), "c:d": -np.arange(len(table))}
    )
    assert len(table) > 20
    assert len(list(table)) == len(table)
    third = table[2]
    assert isinstance(third, TileTable) and len(third) == 1
    np.testing.assert_array_equal(third.coords_l0[0], table.coords_l0[2])
    assert third.columns["c:d"].tolist() == [-2]
    np.testing.assert_array_equal(table[-1].coords_l0, table.coords_l0[-1:])
    np.testing.assert_array_equal(table[3:9].coords_l0, table.coords_l0[3:9])
    mask = table.columns["a b"] % 5 == 1
    assert (
        table[mask].columns["a b"].tolist()
        == table.select(mask).columns["a b"].tolist()
    )
    with pytest.raises(IndexError):
        table[len(table)]
    for way in WAYS:
        again = way(table)
        np.testing.assert_array_equal(again.coords_l0, table.coords_l0)
        assert again.plan == table.plan and list(again.columns) == list(table.columns)


def test_the_stream_itself_is_not_copied() -> None:
    (slide, _) = two_slides()
    stream: Any = ts.iter_tiles(slide, ts.tile_grid(slide, CONFIG))
    for way in WAYS:
        with pytest.raises(TypeError):
            way(stream)
