"""The stream: right pixels in the right order, bounded, and a bad slide stops no other."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from tests.support.watched_slide import WatchedSlide

from thinsection.errors import BudgetError, SlideReadError
from thinsection.slide.resize import resample
from thinsection.testing.synthetic import position_pixels
from thinsection.tiles import (
    StreamConfig,
    TileBatch,
    TilesConfig,
    TileStream,
    TileTable,
    iter_tiles,
    tile_grid,
)
from thinsection.tiles.budget import MAX_SCRATCH, MemoryAllowance, split_tasks
from thinsection.tiles.stream import (
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
)
from thinsection.types import parse_bytes

PIXELS = position_pixels((700, 430))


def budget(batch_size: int, workers: int = 2):  # type: ignore[no-untyped-def]
    config = StreamConfig(memory="64MiB", decode_threads=workers)
    return config.budget(batch_size, tile_px=32, tile_bytes=1 << 20)


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
        alone = np.empty((32, 32, 3), np.uint8)
        resample(PIXELS[None, y : y + 128, x : x + 64], alone[None])
        np.testing.assert_array_equal(tile, alone)


@pytest.mark.parametrize(
    ("num_tiles", "workers", "longest"),
    [(1, 1, 1), (8, 4, 8), (21, 2, 11), (32, 1, 32), (64, 64, 8), (256, 2, 32)],
)
def test_tasks_cover_each_tile_once_in_order(
    num_tiles: int, workers: int, longest: int
) -> None:
    tasks = split_tasks(num_tiles, workers)
    assert [i for rows in tasks for i in range(num_tiles)[rows]] == list(
        range(num_tiles)
    )
    assert max(rows.stop - rows.start for rows in tasks) == longest


@pytest.mark.parametrize("cpus", [1, 2, 16, 60, 64, 128, 256])
@pytest.mark.parametrize("memory", ["64MiB", "256MiB", "2GiB"])
@pytest.mark.parametrize("batch_size", [32, 256])
def test_any_number_of_cpus_keeps_the_memory_and_is_not_refused(
    cpus: int, memory: str, batch_size: int
) -> None:
    config = StreamConfig(memory=memory, decode_threads=cpus)
    fits = min(batch_size, config.largest_batch(tile_px=256, tile_bytes=MAX_SCRATCH))
    found = config.budget(fits, tile_px=256, tile_bytes=MAX_SCRATCH)
    assert found.workers == cpus
    assert found.scratch_bytes >= MAX_SCRATCH
    assert found.total_bytes <= parse_bytes(memory)


def test_no_more_threads_decode_than_the_slots_have_tasks() -> None:
    found = StreamConfig().budget(8, tile_px=256, tile_bytes=0)
    assert found.workers <= found.slots


def test_threads_take_turns_where_the_scratch_holds_no_more() -> None:
    scratch, lock, held, most = MemoryAllowance(100), threading.Lock(), [0], [0]
    inside = threading.Barrier(2, timeout=30)  # two of 50 bytes are in at once

    def work(num_bytes: int) -> None:
        with scratch.taken(num_bytes):
            with lock:
                held[0] += num_bytes
                most[0] = max(most[0], held[0])
            if num_bytes == 50:
                inside.wait()
            with lock:
                held[0] -= num_bytes

    threads = [
        threading.Thread(target=work, args=(n,)) for n in (50, 50, 70, 40, 70, 40, 500)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] == 500  # more than all: alone


@dataclass(kw_only=True, eq=False)
class Numbered(SlideTiles):
    """Tiles that say of which slide they are."""

    number: int


def entries(
    *slides: WatchedSlide | Exception,
) -> Iterator[tuple[int, WatchedSlide | Exception]]:
    yield from enumerate(slides)


def prepare(
    entry: tuple[int, WatchedSlide | Exception],
) -> list[Numbered | SlideFailed]:
    number, slide = entry
    if isinstance(slide, Exception):
        source = Numbered(number=number, slide=None, table=None)
        return [SlideFailed(source=source, stage="open", error=slide)]
    table = tile_grid(slide, TilesConfig(tile_px=32))
    return [Numbered(number=number, slide=slide, table=table)]


def test_slides_follow_each_other_and_a_bad_one_stops_no_other() -> None:
    good, broken, last = (
        WatchedSlide([PIXELS]),
        WatchedSlide([PIXELS], broken_below_lv=100),
        None,
    )
    last = WatchedSlide([PIXELS[:200]])
    story: list[tuple[int, str]] = []
    source = entries(good, OSError("not a slide"), broken, last)
    with TileStream(source, prepare, budget=budget(8), batch_size=8) as stream:
        for event in stream:
            if isinstance(event, TileBatch):
                event.release()
            story.append((event.source.number, type(event).__name__))
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
    with TileStream(
        entries(*slides), prepare, budget=budget(4), batch_size=4
    ) as stream:
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

    config = StreamConfig(memory=str(3 * 8 * 32 * 32 * 3 + 2 * 1000), decode_threads=2)
    limit = config.budget(8, tile_px=32, tile_bytes=1000)
    assert (limit.slots, limit.scratch_bytes) == (3, 2000)
    source = entries(*[WatchedSlide([PIXELS]) for _ in range(3)])
    with TileStream(
        source, prepare, budget=limit, batch_size=8, allocate=allocate
    ) as stream:
        for event in stream:
            if isinstance(event, TileBatch):
                event.release()
    assert made == [(8, 32, 32, 3)] * 3
    assert slide.size == (700, 430)


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    with pytest.raises(
        BudgetError, match=r"memory must be >= .* got 1.0 KiB; raise memory=\.\.\."
    ):
        StreamConfig(memory="1KiB").budget(8, tile_px=64, tile_bytes=10)


def test_reading_one_broken_slide_raises_its_error() -> None:
    slide = WatchedSlide([PIXELS], broken_below_lv=64)
    table = tile_grid(slide, TilesConfig(tile_px=32))
    with pytest.raises(SlideReadError, match="rows"):
        for _ in iter_tiles(slide, table, config=StreamConfig(decode_threads=2)):
            pass
    assert not slide.closed


def test_an_error_of_the_stream_itself_is_raised_not_swallowed() -> None:
    def explode(entry: object) -> list[SlideTiles]:
        raise RuntimeError("a bug in prepare")

    with (
        TileStream([1], explode, budget=budget(8), batch_size=8) as stream,
        pytest.raises(RuntimeError, match="a bug in prepare"),
    ):
        list(stream)


def test_failed_events_carry_stage_and_error() -> None:
    error = OSError("truncated")
    with TileStream(entries(error), prepare, budget=budget(8), batch_size=8) as stream:
        (failed,) = stream
    assert isinstance(failed, SlideFailed)
    assert (failed.source.number, failed.stage, failed.error) == (0, "open", error)
