"""The stream: tiles of all slides of a run, decoded ahead by threads into a fixed set of buffers.

    entries -> [prepare thread] -> opened slides -> planned reads -> [decode workers]
                                                         |                  |
                                free buffers <- consumer <- full batches <- decoded ones, in order

The next slide is prepared while this one is decoded, and the decoders go on into it without a
pause. Batches come in table order and never mix slides, so that what a batch holds does not depend
on timing; tiles close the gaps that filters leave, and only a slide's last batch may be smaller.

Peak = slots * batch + scratch, with
    batch   = batch_size * tile_px² * 3          bytes of decoded tiles
    scratch = one tile of the level that is read, for as many workers as the memory holds
A slot is a batch that is being decoded, waits, or is being transferred. The stream allocates by
these and `thinsection plan` shows them; readers bound their own caches of decoded segments.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from thinsection.config import option
from thinsection.errors import BudgetError, ConfigError
from thinsection.machine import cpu_count
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan
from thinsection.slide.resize import read_tiles
from thinsection.stream import batches
from thinsection.stream.batches import (
    Channel,
    ChannelClosed,
    DecodedBatch,
    SlideTiles,
    TileBatch,
)
from thinsection.tiles import TileFilter, TileTable
from thinsection.tiles.transforms import TileTransform
from thinsection.types import MIB, TileArray, format_bytes, parse_bytes

CHANNELS = 3
MIN_SLOTS, MAX_SLOTS = 3, 5  # more only moves decoded tiles out of the caches
MAX_SCRATCH = 32 * MIB  # of decoded px that one tile may be made of
# handing work to a thread costs some µs: worth it for about a ms of decoding
_TASK_TILES = 8
_MOST_TILES = 32  # so that a large batch is not one thread's alone for long

_Task = tuple[DecodedBatch, slice]
_Prepared = SlideTiles | batches.SlideFailed
_Ordered = (
    _Prepared | batches.SlideStarted | DecodedBatch
)  # `SlideTiles`: the end of a slide


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBudget:
    """What the stream may allocate: batch buffers, and scratch that its workers share."""

    slots: int
    batch_bytes: int  # of one slot
    scratch_bytes: int  # of all workers; who finds none left waits
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings of the stream from slides to batches."""

    memory: str = option(
        "2GiB", "Host memory for decoded tiles, whatever the slides' size."
    )
    decode_workers: int = option(
        0, "Threads that decode tiles; 0: one per CPU of this process."
    )
    prefetch_slides: int = option(2, "Slides that are opened and tiled ahead.")

    def __post_init__(self) -> None:
        parse_bytes(self.memory, name="stream.memory")
        for name, least in (("decode_workers", 0), ("prefetch_slides", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"stream.{name} must be >= {least}, got {value}")

    def budget(self, batch_size: int, *, tile_px: int, tile_bytes: int) -> StreamBudget:
        """Divides the memory into batch buffers and scratch, and says how many threads decode.

        By default there are no more of them than CPUs, nor than tasks in all slots. Where the
        memory does not hold a tile for each, they take turns. `tile_bytes` is the most that one
        tile is made of on the level that is read. Raises BudgetError: not even `MIN_SLOTS` batches
        and one such tile fit; says what would.
        """
        memory, batch_bytes = (
            parse_bytes(self.memory),
            batch_size * tile_px * tile_px * CHANNELS,
        )
        slots = min(MAX_SLOTS, (memory - tile_bytes) // batch_bytes)
        if slots < MIN_SLOTS:
            least = format_bytes(MIN_SLOTS * batch_bytes + tile_bytes)
            rule = (
                f"must be >= {least} for batches of {batch_size} tiles of {tile_px} px"
            )
            remedy = "raise --memory or lower --batch-size"
            raise BudgetError(f"memory {rule}, got {format_bytes(memory)}; {remedy}")
        tasks = slots * -(-batch_size // _TASK_TILES)
        workers = self.decode_workers or min(cpu_count(), tasks)
        scratch = min(workers * tile_bytes, memory - slots * batch_bytes)
        sizes = {
            "batch_bytes": batch_bytes,
            "scratch_bytes": scratch,
            "workers": workers,
        }
        return StreamBudget(slots=slots, **sizes)

    def largest_batch(self, *, tile_px: int, tile_bytes: int) -> int:
        """Tiles of a batch that the memory holds `MIN_SLOTS` of beside one tile, at least 1."""
        room = parse_bytes(self.memory) - tile_bytes
        return max(1, room // (MIN_SLOTS * tile_px * tile_px * CHANNELS))


def read_bytes(plan: ReadPlan) -> int:
    """What one tile is made of on the level that is read; 0 where it is decoded into place."""
    return plan.size_lv[0] * plan.size_lv[1] * CHANNELS if plan.resamples else 0


def tasks_of(num_tiles: int, workers: int) -> list[slice]:
    """A batch's tiles, in order, in parts as threads take them: a part for each, if not too few."""
    step = max(_TASK_TILES, min(_MOST_TILES, -(-num_tiles // workers)))
    return [
        slice(start, min(start + step, num_tiles))
        for start in range(0, num_tiles, step)
    ]


class TileStream:
    """Iterates over the events of many slides; use as a context manager, iterate once.

    Entries are taken lazily; `prepare`, which must not raise, turns them into `SlideTiles`, or
    `SlideFailed`, in a thread of its own, until `prefetch_slides` wait opened. Tiles that one of
    the pixel filters refuses are left out. `allocate` makes a batch buffer (pinned memory for CUDA;
    None: pageable memory), `clock` adds up where time goes. Memory: slots * batch + scratch of the
    budget, the prepared slides and their tables. A consumer may hold `slots - 2` batches, without
    filters one more, while it asks for the next.
    """

    def __init__(
        self,
        entries: Iterable[Any],
        prepare: Callable[[Any], _Prepared],
        *,
        budget: StreamBudget,
        batch_size: int,
        filters: Sequence[TileFilter] = (),
        prefetch_slides: int = 2,
        allocate: Callable[[tuple[int, ...]], TileArray] | None = None,
        clock: batches.StageClock | None = None,
    ) -> None:
        self._entries, self._prepare = entries, prepare
        self._batch_size, self._filters = batch_size, tuple(filters)
        self._allocate = allocate or (lambda shape: np.empty(shape, dtype=np.uint8))
        self.clock = clock or batches.StageClock()
        self._prepared: Channel[_Prepared] = Channel(prefetch_slides)
        # None is a buffer that nobody needed yet; the one that came back last is still in the CPU's
        # caches, and where the consumer keeps up some are never made
        self._free: Channel[TileArray | None] = Channel(newest_first=True)
        self._free.put(*[None] * budget.slots)
        self._ordered: Channel[_Ordered] = Channel()
        self._packer = batches.BatchPacker(self._give_back)
        self._scratch = batches.Scratch(budget.scratch_bytes)
        self._failure: BaseException | None = None
        self._opened: list[SlideTiles] = []
        self._tasks, self._taking = self._plan_tasks(), threading.Lock()
        self._workers = budget.workers
        targets = [self._run_prepare, *[self._run_worker] * budget.workers]
        guarded = [partial(self._guard, target) for target in targets]
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in guarded
        ]

    def __enter__(self) -> "TileStream":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        waiting = self._prepared.close()
        self._free.close()
        self._ordered.close()
        for thread in self._threads:
            thread.join()
        for source in (*waiting, *self._opened):
            if isinstance(source, SlideTiles):
                source.close()

    def __iter__(self) -> Iterator[batches.StreamEvent]:
        """Yields each slide's events in order; raises what broke the stream itself, not a slide."""
        for item in self._ordered:
            yield from self._events(item)
        self._check()

    def _events(self, item: _Ordered) -> Iterator[batches.StreamEvent]:
        if isinstance(item, batches.SlideFailed | batches.SlideStarted):
            yield item
        elif isinstance(item, DecodedBatch):
            with self.clock.timed("encode_wait"):
                while not item.done.wait(0.5):
                    self._check()
            if item.source.error is None:
                yield from self._packer.add(item)
            else:
                self._give_back(item.buffer)
        else:
            yield from self._packer.finish()
            self._opened.remove(item)
            item.close()
            if item.error is None:
                yield batches.SlideFinished(key=item.key)
            else:
                yield batches.SlideFailed(
                    key=item.key, stage="decode", error=item.error
                )

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _give_back(self, buffer: TileArray) -> None:
        with suppress(ChannelClosed):  # the stream has ended; the buffer goes with it
            self._free.put(buffer)

    def _guard(self, target: Callable[[], None]) -> None:
        """Runs a thread's body; an error of the stream itself ends the whole stream, loudly."""
        try:
            target()
        except ChannelClosed:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
            self._failure = error
            self._ordered.close()

    def _run_prepare(self) -> None:
        for entry in self._entries:
            with self.clock.timed("prepare_busy"):
                prepared = self._prepare(entry)
            try:
                self._prepared.put(prepared)
            except ChannelClosed:
                if isinstance(prepared, SlideTiles):
                    prepared.close()
                raise
        self._prepared.finish()

    def _plan_tasks(self) -> Iterator[_Task]:
        """What workers take, in order; who finds nothing left of a batch plans the next one here.

        So a buffer is taken no sooner than somebody decodes into it, and in the batches' order.
        """
        for source in self._prepared:
            if isinstance(source, batches.SlideFailed):
                self._ordered.put(source)
                continue
            self._opened.append(source)
            self._ordered.put(
                batches.SlideStarted(key=source.key, num_tiles=source.num_tiles)
            )
            if source.slide is not None and source.table is not None:
                source.slide.expect(source.table.coords_l0, source.table.plan)
            for start in range(0, source.num_tiles, self._batch_size):
                yield from self._plan_batch(source, start)
            self._ordered.put(source)
        self._ordered.finish()

    def _plan_batch(self, source: SlideTiles, start: int) -> Iterator[_Task]:
        assert source.table is not None  # there are tiles to read
        tile_px = source.table.plan.tile_px
        indices = np.arange(start, min(start + self._batch_size, source.num_tiles))
        tasks = tasks_of(len(indices), self._workers)
        with self.clock.timed("decode_wait"):
            buffer = self._free.get()
        shape = (self._batch_size, tile_px, tile_px, 3)
        if buffer is None or buffer.shape != shape:
            buffer = self._allocate(shape)
        batch = DecodedBatch(source, indices, buffer, len(tasks))
        self._ordered.put(batch)
        for rows in tasks:
            yield batch, rows

    def _run_worker(self) -> None:
        while True:
            with self._taking:
                task = next(self._tasks, None)
            if task is None:
                return
            batch, rows = task
            try:
                if batch.source.error is None:
                    self._decode(batch, rows)
            except Exception as error:  # noqa: BLE001 - the per-slide boundary of decoding
                batch.source.error = error
            finally:
                batch.finish_one()

    def _decode(self, batch: DecodedBatch, rows: slice) -> None:
        source, out = batch.source, batch.buffer[rows]
        slide, table = source.slide, source.table
        assert slide is not None and table is not None
        with (
            self._scratch.taken(read_bytes(table.plan)),
            self.clock.timed("decode_busy"),
        ):
            read_tiles(slide, table.plan, table.coords_l0[batch.indices[rows]], out)
            for tile_filter in self._filters:
                batch.keep[rows] &= tile_filter(out)
            if source.measure is not None:
                keep, indices = batch.keep[rows], batch.indices[rows]
                source.measure(indices[keep], out if keep.all() else out[keep])
            if source.transform is not None:
                for index in np.flatnonzero(batch.keep[rows]).tolist():
                    source.transform(out[index : index + 1])


def iter_tiles(
    slide: Slide,
    tiles: TileTable,
    *,
    batch_size: int = 64,
    filters: Sequence[TileFilter] = (),
    transform: TileTransform | None = None,
    config: StreamConfig | None = None,
) -> Iterator[TileBatch]:
    """Batches of decoded tiles of one opened slide, in table order.

    `batch.tiles` is valid until the next batch is asked for; copy what should stay.

    Args:
        slide: opened; stays open.
        tiles: from `tile_grid`, or a table of your own coordinates.
        batch_size: tiles per batch.
        filters: pixel filters, see `thinsection.tiles.load_filters`.
        transform: changes the tiles that are kept, in place; see `thinsection.tiles.fit_stain`.
        config: memory and decoding threads.

    Yields:
        `TileBatch` with indices (b,), coords_l0 (b, 2) and tiles uint8 (b, tile_px, tile_px, 3).

    Memory: `config.memory`, whatever the slide's size.

    Raises:
        SlideReadError: a region cannot be decoded.
        BudgetError: the memory does not hold three batches.
    """
    sizes = {"tile_px": tiles.plan.tile_px, "tile_bytes": read_bytes(tiles.plan)}
    budget = (config or StreamConfig()).budget(batch_size, **sizes)
    key = slide.slide_path
    source = SlideTiles(
        key=key, slide=slide, table=tiles, transform=transform, owned=False
    )
    options: dict[str, Any] = {
        "budget": budget,
        "batch_size": batch_size,
        "filters": filters,
    }
    with TileStream([source], lambda given: given, **options) as stream:
        for event in stream:
            if isinstance(event, batches.SlideFailed):
                raise event.error
            if isinstance(event, TileBatch):
                yield event
                event.release()
