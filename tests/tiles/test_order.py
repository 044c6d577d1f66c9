"""The order of training: a partition of all tiles, one number a position, the same every time."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.tiles.order import CHUNK_TILES, Run, ShardOrder, split_run

COUNTS = (300, 1, 64, 65, 700, 128)
ORDER = ShardOrder(
    counts=COUNTS,
    seed=3,
    epoch=1,
    shard=0,
    num_shards=3,
    buffer_tiles=100,
    mixed_slides=2,
)
Tile = tuple[int, int]


def tiles_of(runs: list[Run]) -> list[Tile]:
    return [(run.slide, row) for run in runs for row in range(run.start, run.stop)]


def sequence(order: ShardOrder, first: int = 0) -> list[Tile]:
    """Tiles in the order in which they are yielded."""
    tiles = []
    for number, runs in enumerate(order.buffers(first), first):
        buffer = tiles_of(runs)
        places = order.permutation(number, len(buffer))
        tiles += [buffer[place] for place in places.tolist()]
    return tiles


def shards(order: ShardOrder) -> list[list[Tile]]:
    return [sequence(replace(order, shard=shard)) for shard in range(order.num_shards)]


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=9),
    num_shards=st.integers(1, 5),
    buffer_tiles=st.integers(1, 200),
    mixed_slides=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_tile_is_in_one_shard_once_and_shards_are_equal(
    *,
    counts: list[int],
    num_shards: int,
    buffer_tiles: int,
    mixed_slides: int,
    shuffle: bool,
    seed: int,
) -> None:
    order = ShardOrder(
        counts=counts,
        seed=seed,
        epoch=0,
        shard=0,
        num_shards=num_shards,
        buffer_tiles=buffer_tiles,
        mixed_slides=mixed_slides,
        shuffle=shuffle,
    )
    parts = shards(order)
    every_tile = [(s, row) for s, count in enumerate(counts) for row in range(count)]
    assert Counter(tile for part in parts for tile in part) == Counter(every_tile)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [len(replace(order, shard=s)) for s in range(num_shards)]


def test_even_shards_have_the_same_size_and_no_tile_twice() -> None:
    parts = shards(replace(ORDER, num_shards=5, even=True))
    assert {len(part) for part in parts} == {sum(COUNTS) // 5}
    tiles = [tile for part in parts for tile in part]
    assert len(set(tiles)) == len(tiles)


@pytest.mark.parametrize("first", [1, 2, 4])
def test_buffers_from_a_number_on_are_those_of_the_whole_order(first: int) -> None:
    assert sequence(ORDER, first) == sequence(ORDER)[first * ORDER.buffer_tiles :]


def test_all_buffers_but_the_last_are_full() -> None:
    sizes = [len(tiles_of(runs)) for runs in ORDER.buffers()]
    assert sizes[:-1] == [100] * (len(ORDER) // 100)
    assert sum(sizes) == len(ORDER)


def test_seed_epoch_and_shard_decide_the_order_and_nothing_else_does() -> None:
    assert sequence(ORDER) == sequence(replace(ORDER))
    for other in (replace(ORDER, seed=4), replace(ORDER, epoch=2)):
        assert sequence(other) != sequence(ORDER)


def test_without_shuffle_tiles_come_in_the_order_of_slides_and_tables() -> None:
    parts = shards(replace(ORDER, shuffle=False))
    tiles = [tile for part in parts for tile in part]
    assert tiles == sorted(tiles)


def test_at_most_two_groups_of_slides_are_in_a_buffer_that_chunks_fill() -> None:
    order = replace(ORDER, counts=(500,) * 12, num_shards=1, mixed_slides=3)
    for runs in order.buffers():
        assert len({run.slide for run in runs}) <= 6


def test_slides_of_a_group_are_mixed_within_a_buffer() -> None:
    order = replace(
        ORDER, counts=(640,) * 4, num_shards=1, mixed_slides=4, buffer_tiles=640
    )
    for runs in order.buffers():
        assert len({run.slide for run in runs}) >= 3


def test_the_first_tile_of_an_epoch_is_each_tile_equally_often() -> None:
    """Of 400 tiles over 4,000 epochs: chi-square per degree of freedom is near 1."""
    order = replace(
        ORDER, counts=(200, 200), num_shards=1, mixed_slides=2, buffer_tiles=400
    )
    counts: Counter[Tile] = Counter()
    for epoch in range(4000):
        one = replace(order, epoch=epoch)
        buffer = tiles_of(next(one.buffers()))
        counts[buffer[int(one.permutation(0, 400)[0])]] += 1
    expected = 4000 / 400
    chi_square = sum((count - expected) ** 2 for count in counts.values()) / expected
    chi_square += expected * (400 - len(counts))
    assert 0.8 < chi_square / 399 < 1.2


def test_chunks_end_where_blocks_of_the_table_end() -> None:
    run = Run(2, 10, 200)
    parts = split_run(run)
    assert [part.stop for part in parts] == [64, 128, 192, 200]
    assert parts[0].start == 10 and all(len(part) <= CHUNK_TILES for part in parts)
    np.testing.assert_array_equal(
        [part.start for part in parts[1:]], [part.stop for part in parts[:-1]]
    )
