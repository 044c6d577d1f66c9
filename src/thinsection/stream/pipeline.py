"""The stream: tiles of all slides of a run, decoded ahead by threads into a fixed set of buffers.

    entries -> [prepare thread] -> opened slides -> [feeder] -> regions -> [decode workers]
                                                        |                        |
                                                   free buffers <- consumer <- batches, in order

The next slide is opened, its tissue found and its grid laid while this one is decoded, and the
decoders go on into it without a pause. Batches come in table order and never mix slides, so that
what a batch holds does not depend on timing.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thinsection.stream.budget import StreamBudget
from thinsection.stream.channel import Channel, ChannelClosed
from thinsection.stream.clock import StageClock
from thinsection.stream.decode import decode_region
from thinsection.stream.events import (
    PrepareFailed,
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
    StreamEvent,
    TileBatch,
)
from thinsection.stream.regions import Region, batched_regions, origins_lv, plan_regions
from thinsection.tiles import TileFilter
from thinsection.types import RgbArray

Allocate = Callable[[tuple[int, ...]], RgbArray]


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allocate_pageable(shape: tuple[int, ...]) -> RgbArray:
    """An ordinary uint8 buffer."""
    return np.empty(shape, dtype=np.uint8)


@dataclass(kw_only=True)
class _OpenSlide:
    source: SlideTiles
    error: Exception | None = None


@dataclass(kw_only=True)
class _Batch:
    owner: _OpenSlide
    start: int
    stop: int
    corners_lv: np.ndarray
    buffer: RgbArray
    keep: np.ndarray
    pending: int
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish_one(self) -> None:
        with self.lock:
            self.pending -= 1
            if self.pending == 0:
                self.done.set()


@dataclass(frozen=True)
class _End:
    owner: _OpenSlide


class TileStream:
    """Iterates over the events of many slides; use as a context manager, iterate once.

    Args:
        entries: what `prepare` turns into `SlideTiles`, or `PrepareFailed`; taken lazily.
        prepare: runs in a thread of its own, ahead of decoding; must not raise.
        budget: buffers, scratch and worker count.
        batch_size: tiles per batch; the last batch of a slide may be smaller.
        filters: pixel filters; a batch comes without the tiles that one of them refuses.
        prefetch_slides: slides that wait opened.
        allocate: makes a batch buffer (pinned memory for CUDA).
        clock: where busy and waiting time is added up.
        decode: False yields slides without any batch, for stages that need no pixels.

    Memory: `budget.peak_bytes`, the prepared slides and their tile tables.
    """

    def __init__(
        self,
        entries: Iterable[Any],
        prepare: Callable[[Any], SlideTiles | PrepareFailed],
        *,
        budget: StreamBudget,
        batch_size: int,
        filters: Sequence[TileFilter] = (),
        prefetch_slides: int = 2,
        allocate: Allocate = allocate_pageable,
        clock: StageClock | None = None,
        decode: bool = True,
    ) -> None:
        self._decodes = decode
        self._entries, self._prepare = entries, prepare
        self._budget, self._batch_size = budget, batch_size
        self._filters, self._allocate = tuple(filters), allocate
        self.clock = clock or StageClock()
        self._prepared: Channel[SlideTiles | PrepareFailed] = Channel(prefetch_slides)
        # the buffer that came back last is still in the CPU's caches; later ones are never made
        # where the consumer keeps up
        self._free: Channel[RgbArray | None] = Channel(newest_first=True)
        self._tasks: Channel[tuple[_Batch, tuple[Region, ...]]] = Channel()
        self._ordered: Channel[_OpenSlide | _Batch | _End | PrepareFailed] = Channel()
        self._failure: BaseException | None = None
        for _ in range(budget.slots):
            self._free.put(None)  # buffers are made when first needed, at the slide's tile size
        targets = [self._run_prepare, self._run_feeder, *[self._run_worker] * budget.workers]
        self._threads = [threading.Thread(target=self._guard, args=(t,)) for t in targets]

    def __enter__(self) -> "TileStream":
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        left = self._prepared.close()
        for channel in (self._free, self._tasks, self._ordered):
            channel.close()
        for thread in self._threads:
            thread.join()
        for item in left:
            if isinstance(item, SlideTiles):
                item.slide.close()

    def __iter__(self) -> Iterator[StreamEvent]:
        """Yields each slide's events in the order of the entries.

        Raises:
            BaseException: whatever broke a thread of the stream itself, not a slide.
        """
        while True:
            try:
                item = self._ordered.get()
            except ChannelClosed:
                if self._failure is not None:
                    raise self._failure from None
                return
            yield from self._events(item)

    def _events(self, item: "_OpenSlide | _Batch | _End | PrepareFailed") -> Iterator[StreamEvent]:
        if isinstance(item, PrepareFailed):
            yield SlideFailed(key=item.key, stage=item.stage, error=item.error)
        elif isinstance(item, _OpenSlide):
            yield SlideStarted(key=item.source.key, table=item.source.table)
        elif isinstance(item, _Batch):
            with self.clock.timed("encode_wait"):
                while not item.done.wait(0.5):
                    if self._failure is not None:
                        raise self._failure
            if item.owner.error is None and item.keep.any():
                yield self._as_batch(item)
            else:
                self._free.put(item.buffer)
        else:
            item.owner.source.slide.close()
            key, error = item.owner.source.key, item.owner.error
            if error is not None:
                yield SlideFailed(key=key, stage="decode", error=error)
            else:
                yield SlideFinished(key=key)

    def _as_batch(self, item: _Batch) -> TileBatch:
        indices = np.arange(item.start, item.stop)
        count = len(indices)
        if not item.keep.all():  # close the gaps in place: a kept row moves only towards the front
            indices = indices[item.keep]
            for row, kept in enumerate(np.flatnonzero(item.keep)):
                if row != kept:
                    item.buffer[row] = item.buffer[kept]
            count = len(indices)
        return TileBatch(
            key=item.owner.source.key,
            indices=indices,
            coords_l0=item.owner.source.table.coords_l0[indices],
            tiles=item.buffer[:count],
            _release=lambda: self._give_back(item.buffer),
        )

    def _give_back(self, buffer: RgbArray) -> None:
        try:
            self._free.put(buffer)
        except ChannelClosed:
            return  # the stream has ended; the buffer goes with it

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
                    prepared.slide.close()
                raise
        self._prepared.finish()

    def _run_feeder(self) -> None:
        while True:
            try:
                source = self._prepared.get()
            except ChannelClosed:
                break
            if isinstance(source, PrepareFailed):
                self._ordered.put(source)
                continue
            owner = _OpenSlide(source=source)
            self._ordered.put(owner)
            count = len(source.table) if self._decodes else 0
            for start in range(0, count, self._batch_size):
                self._feed_batch(owner, start)
            self._ordered.put(_End(owner))
        self._ordered.finish()
        self._tasks.finish()

    def _feed_batch(self, owner: _OpenSlide, start: int) -> None:
        table, slide = owner.source.table, owner.source.slide
        stop = min(start + self._batch_size, len(table))
        segment = slide.levels[table.plan.level].segment
        tasks = list(batched_regions(plan_regions(table, start, stop, segment=segment)))
        with self.clock.timed("decode_wait"):
            buffer = self._free.get()
        shape = (self._batch_size, table.plan.tile_px, table.plan.tile_px, 3)
        if buffer is None or buffer.shape != shape:
            buffer = self._allocate(shape)
        batch = _Batch(
            owner=owner,
            start=start,
            stop=stop,
            corners_lv=origins_lv(table.select(np.arange(start, stop))),
            buffer=buffer,
            keep=np.ones(stop - start, dtype=bool),
            pending=len(tasks),
        )
        self._ordered.put(batch)
        for task in tasks:
            self._tasks.put((batch, task))

    def _run_worker(self) -> None:
        while True:
            batch, regions = self._tasks.get()
            try:
                with self.clock.timed("decode_busy"):
                    for region in regions:
                        if batch.owner.error is None:
                            self._decode(batch, region)
            except Exception as error:  # noqa: BLE001 - the per-slide boundary of decoding
                batch.owner.error = error
            finally:
                batch.finish_one()

    def _decode(self, batch: _Batch, region: Region) -> None:
        rows = slice(region.start - batch.start, region.stop - batch.start)
        source = batch.owner.source
        out = batch.buffer[rows]
        decode_region(source.slide, source.table.plan, region, batch.corners_lv[rows], out)
        for tile_filter in self._filters:
            batch.keep[rows] &= tile_filter(out)
