"""The stream: right pixels in the right order, bounded, and a bad slide stops no other."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.watched_slide import WatchedSlide

from thinsection.errors import BudgetError, SlideReadError
from thinsection.slide.geometry import origins_lv
from thinsection.slide.resize import resample
from thinsection.stream import (
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
    StreamConfig,
    TileBatch,
    TileStream,
    iter_tiles,
)
from thinsection.stream.plan import Read, plan_batch, plan_regions
from thinsection.testing.synthetic import position_pixels
from thinsection.tiles import TilesConfig, TileTable, tile_grid

PIXELS = position_pixels((700, 430))


def budget(batch_size: int, workers: int = 2):  # type: ignore[no-untyped-def]
    config = StreamConfig(memory="64MiB", decode_workers=workers)
    return config.budget(batch_size, tile_px=32, scratch_bytes=1 << 20)


def collect(slide: WatchedSlide, table: TileTable, batch_size: int) -> np.ndarray:
    seen = np.zeros((len(table), table.plan.tile_px, table.plan.tile_px, 3), np.uint8)
    for batch in iter_tiles(slide, table, batch_size=batch_size):
        seen[batch.indices] = batch.tiles
        np.testing.assert_array_equal(table.coords_l0[batch.indices], batch.coords_l0)
    return seen


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("segment", [None, (32, 32), (16, 16), (24, 40)])
def test_every_tile_has_its_own_pixels_whatever_the_batch(
    batch_size: int, segment: tuple[int, int] | None
) -> None:
    slide = WatchedSlide([PIXELS], segment=segment)
    table = tile_grid(slide, TilesConfig(tile_px=32))
    tiles = collect(slide, table, batch_size)
    for (x, y), tile in zip(table.coords_l0.tolist(), tiles):
        np.testing.assert_array_equal(tile, PIXELS[y : y + 32, x : x + 32])


def test_overlapping_and_padded_tiles_are_white_outside() -> None:
    slide = WatchedSlide([PIXELS])
    table = tile_grid(slide, TilesConfig(tile_px=32, overlap=8, edge="pad"))
    tiles = collect(slide, table, 16)
    padded = np.pad(PIXELS, ((0, 32), (0, 32), (0, 0)), constant_values=255)
    for (x, y), tile in zip(table.coords_l0.tolist(), tiles):
        np.testing.assert_array_equal(tile, padded[y : y + 32, x : x + 32])


@pytest.mark.parametrize("segment", [None, (32, 64)])
def test_a_resampled_tile_equals_the_tile_read_and_resampled_alone(
    segment: tuple[int, int] | None,
) -> None:
    slide = WatchedSlide([PIXELS], slide_mpp=(0.5, 0.25), segment=segment)
    table = tile_grid(slide, TilesConfig(tile_px=32, tile_mpp="1.0"))
    assert table.plan.size_lv == (64, 128)
    tiles = collect(slide, table, 5)
    for (x, y), tile in zip(table.coords_l0.tolist(), tiles):
        np.testing.assert_array_equal(tile, resample(PIXELS[y : y + 128, x : x + 64], 32))


def test_regions_cover_each_tile_once_and_stay_small() -> None:
    slide = WatchedSlide([PIXELS])
    table = tile_grid(slide, TilesConfig(tile_px=16))
    rng = np.random.default_rng(0)
    table = table.select(np.sort(rng.permutation(len(table))[:600]))
    coords_l0 = table.coords_l0[100:500]
    corners = origins_lv(coords_l0, table.plan.downsample)
    regions = list(plan_regions(coords_l0, corners, table.plan))
    covered = [i for region in regions for i in range(region.start, region.stop)]
    assert covered == list(range(400))
    for region in regions:
        low = corners[region.start : region.stop].min(axis=0)
        assert region.origin_lv == tuple(low.tolist())
        used = (region.stop - region.start) * 16 * 16
        assert region.size_lv[0] * region.size_lv[1] <= 1.3 * used


def test_a_whole_block_is_one_read() -> None:
    slide = WatchedSlide([PIXELS])
    table = tile_grid(slide, TilesConfig(tile_px=16))
    tasks = plan_batch(table.coords_l0[:64], table.plan)
    corner_lv = origins_lv(table.coords_l0[:1], table.plan.downsample)[0]
    assert tasks == [[Read(0, 64, tuple(corner_lv.tolist()), (128, 128))]]


@pytest.mark.parametrize("segment", [(32, 32), (16, 32), (16, 16)])
def test_tiles_of_whole_segments_are_read_one_by_one(segment: tuple[int, int]) -> None:
    slide = WatchedSlide([PIXELS], segment=segment)
    table = tile_grid(slide, TilesConfig(tile_px=32))
    tasks = plan_batch(table.coords_l0[:21], table.plan, segment=segment)
    assert tasks == [[Read(0, 8)], [Read(8, 16)], [Read(16, 21)]]


@pytest.mark.parametrize("segment", [(64, 64), (48, 32), (32, 20)])
def test_tiles_that_share_segments_are_read_together(segment: tuple[int, int]) -> None:
    slide = WatchedSlide([PIXELS], segment=segment)
    table = tile_grid(slide, TilesConfig(tile_px=32))
    tasks = plan_batch(table.coords_l0[:64], table.plan, segment=segment)
    assert all(read.origin_lv is not None for reads in tasks for read in reads)


def entries(*slides: WatchedSlide | Exception) -> Iterator[tuple[int, WatchedSlide | Exception]]:
    yield from enumerate(slides)


def prepare(entry: tuple[int, WatchedSlide | Exception]) -> SlideTiles | SlideFailed:
    key, slide = entry
    if isinstance(slide, Exception):
        return SlideFailed(key=key, stage="open", error=slide)
    table = tile_grid(slide, TilesConfig(tile_px=32))
    return SlideTiles(key=key, slide=slide, table=table)


def test_slides_follow_each_other_and_a_bad_one_stops_no_other() -> None:
    good, broken, last = WatchedSlide([PIXELS]), WatchedSlide([PIXELS], broken_below_lv=100), None
    last = WatchedSlide([PIXELS[:200]])
    story: list[tuple[int, str]] = []
    source = entries(good, OSError("not a slide"), broken, last)
    with TileStream(source, prepare, budget=budget(8), batch_size=8) as stream:
        for event in stream:
            if isinstance(event, TileBatch):
                event.release()
            story.append((event.key, type(event).__name__))
    kinds = {key: [name for k, name in story if k == key] for key in range(4)}
    assert kinds[0][0] == "SlideStarted"
    assert kinds[0][-1] == "SlideFinished"
    assert kinds[1] == ["SlideFailed"]
    assert kinds[2][-1] == "SlideFailed"
    assert kinds[3][-1] == "SlideFinished"
    assert [key for key, _ in story] == sorted(key for key, _ in story)
    assert good.closed
    assert broken.closed
    assert last.closed


def test_an_empty_table_starts_and_finishes() -> None:
    slide = WatchedSlide([PIXELS[:20, :20]])
    with TileStream(entries(slide), prepare, budget=budget(8), batch_size=8) as stream:
        assert [type(event) for event in stream] == [SlideStarted, SlideFinished]


def test_leaving_early_ends_every_thread_and_closes_the_slides() -> None:
    slides = [WatchedSlide([PIXELS]) for _ in range(5)]
    before = threading.active_count()
    with TileStream(entries(*slides), prepare, budget=budget(4), batch_size=4) as stream:
        for event in stream:
            if isinstance(event, TileBatch):
                break
    assert threading.active_count() == before


def test_at_most_the_budgeted_batches_exist_at_once() -> None:
    slide = WatchedSlide([PIXELS])
    made: list[tuple[int, ...]] = []

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        made.append(shape)
        return np.empty(shape, np.uint8)

    config = StreamConfig(memory=str(3 * 8 * 32 * 32 * 3 + 2 * 1000), decode_workers=2)
    limit = config.budget(8, tile_px=32, scratch_bytes=1000)
    assert limit.slots == 3
    source = entries(*[WatchedSlide([PIXELS]) for _ in range(3)])
    with TileStream(source, prepare, budget=limit, batch_size=8, allocate=allocate) as stream:
        for event in stream:
            if isinstance(event, TileBatch):
                event.release()
    assert made == [(8, 32, 32, 3)] * 3
    assert slide.size == (700, 430)


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    with pytest.raises(BudgetError, match=r"memory must be >= .* got 1.0 KiB; raise --memory"):
        StreamConfig(memory="1KiB").budget(8, tile_px=64, scratch_bytes=10)


def test_reading_one_broken_slide_raises_its_error() -> None:
    slide = WatchedSlide([PIXELS], broken_below_lv=64)
    table = tile_grid(slide, TilesConfig(tile_px=32))
    with pytest.raises(SlideReadError, match="rows"):
        for _ in iter_tiles(slide, table, config=StreamConfig(decode_workers=2)):
            pass
    assert not slide.closed


def test_an_error_of_the_stream_itself_is_raised_not_swallowed() -> None:
    def explode(entry: object) -> SlideTiles:
        raise RuntimeError("a bug in prepare")

    with (
        TileStream([1], explode, budget=budget(8), batch_size=8) as stream,
        pytest.raises(RuntimeError, match="a bug in prepare"),
    ):
        list(stream)


def test_failed_events_carry_stage_and_error() -> None:
    error = OSError("truncated")
    with TileStream(entries(error), prepare, budget=budget(8), batch_size=8) as stream:
        assert list(stream) == [SlideFailed(key=0, stage="open", error=error)]
