"""Filters refuse tiles; still an encoder gets full batches, in order, in the same buffers."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from tests.support.watched_slide import WatchedSlide

from thinsection.testing.synthetic import position_pixels
from thinsection.tiles import (
    TileBatch,
    TileFilter,
    TilesConfig,
    TileStream,
    TileTable,
    iter_tiles,
    tile_grid,
)
from thinsection.tiles.budget import StreamBudget
from thinsection.tiles.stream import (
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
)

PX = 32
PIXELS = position_pixels((700, 430))


@dataclass(kw_only=True, eq=False)
class Numbered(SlideTiles):
    """Tiles that say of which slide they are."""

    number: int


def keep_share(modulus: int, least: int) -> TileFilter:
    """Keeps tiles by a px value that is as good as random over the grid."""
    return lambda tiles: np.asarray(
        tiles[:, 0, 0].astype(int).sum(axis=1) % modulus >= least
    )


FILTERS = {
    "few": keep_share(7, 6),
    "half": keep_share(2, 1),
    "most": keep_share(11, 1),
    "all": lambda tiles: np.ones(len(tiles), bool),
    "none": lambda tiles: np.zeros(len(tiles), bool),
}


def grid() -> tuple[WatchedSlide, TileTable]:
    slide = WatchedSlide([PIXELS])
    return slide, tile_grid(slide, TilesConfig(tile_px=PX))


def kept_by(tile_filter: TileFilter, table: TileTable) -> np.ndarray:
    tiles = np.stack(
        [PIXELS[y : y + PX, x : x + PX] for x, y in table.coords_l0.tolist()]
    )
    return np.flatnonzero(tile_filter(tiles))


def copied(
    batches: Iterable[TileBatch],
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    return [(b.indices.copy(), b.coords_l0.copy(), b.tiles.copy()) for b in batches]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("batch_size", [1, 5, 16])
def test_batches_are_those_of_the_kept_tiles_alone(name: str, batch_size: int) -> None:
    slide, table = grid()
    tile_filter = FILTERS[name]
    kept = kept_by(tile_filter, table)
    assert name in ("all", "none") or 0 < len(kept) < len(table)
    sifted = copied(
        iter_tiles(slide, table, batch_size=batch_size, filters=[tile_filter])
    )
    plain = copied(iter_tiles(slide, table.select(kept), batch_size=batch_size))
    assert len(sifted) == len(plain) == -(-len(kept) // batch_size)
    for (indices, coords_l0, tiles), (places, plain_l0, plain_tiles) in zip(
        sifted, plain
    ):
        np.testing.assert_array_equal(indices, kept[places])
        np.testing.assert_array_equal(coords_l0, plain_l0)
        np.testing.assert_array_equal(tiles, plain_tiles)


def test_an_encoder_sees_full_batches_but_the_last_of_each_slide() -> None:
    tile_filter = FILTERS["half"]
    sizes: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with stream_of([WatchedSlide([PIXELS]) for _ in sizes], tile_filter) as stream:
        for event in stream:
            if isinstance(event, TileBatch):
                sizes[event.source.number].append(len(event))
                event.release()
    kept = len(kept_by(tile_filter, grid()[1]))
    for found in sizes.values():
        assert found == [8] * (kept // 8) + [kept % 8] * (kept % 8 > 0)


def test_a_consumer_may_hold_a_batch_while_it_asks_for_the_next_in_no_more_buffers() -> (
    None
):
    made: list[tuple[int, ...]] = []

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        made.append(shape)
        return np.empty(shape, np.uint8)

    held: TileBatch | None = None
    seen = 0
    slides = [WatchedSlide([PIXELS]), WatchedSlide([PIXELS])]
    with stream_of(slides, FILTERS["most"], allocate=allocate) as stream:
        for event in stream:
            if isinstance(event, TileBatch):
                if held is not None:
                    held.release()
                held = event
                seen += len(event)
    assert seen == 2 * len(kept_by(FILTERS["most"], grid()[1]))
    assert made == [(8, PX, PX, 3)] * 3


def test_slides_that_break_while_a_batch_is_filled_give_its_buffer_back() -> None:
    broken = [WatchedSlide([PIXELS], broken_below_lv=100) for _ in range(8)]
    with stream_of([*broken, WatchedSlide([PIXELS])], FILTERS["most"]) as stream:
        ends = []
        for event in stream:
            if isinstance(event, TileBatch):
                event.release()
            elif not isinstance(event, SlideStarted):
                ends.append(type(event))
    assert ends == [SlideFailed] * 8 + [SlideFinished]
    assert all(slide.closed for slide in broken)


def test_leaving_early_closes_the_slide_that_is_read() -> None:
    slides = [WatchedSlide([PIXELS]) for _ in range(4)]
    with stream_of(slides, FILTERS["half"]) as stream:
        next(event for event in stream if isinstance(event, TileBatch))
    assert slides[0].closed


def stream_of(
    slides: list[WatchedSlide], tile_filter: TileFilter, **options: object
) -> TileStream:
    """A stream with the fewest buffers, batches of 8 tiles."""

    def prepare(entry: tuple[int, WatchedSlide]) -> list[Numbered]:
        number, slide = entry
        table = tile_grid(slide, TilesConfig(tile_px=PX))
        return [Numbered(number=number, slide=slide, table=table)]

    budget = StreamBudget(
        slots=3, batch_bytes=8 * PX * PX * 3, scratch_bytes=1 << 20, workers=2
    )
    return TileStream(
        enumerate(slides),
        prepare,
        budget=budget,
        batch_size=8,
        filters=[tile_filter],
        **options,
    )
