"""The stream: tiles of all slides of a run, decoded ahead by threads into a fixed set of buffers.

    entries -> [prepare thread] -> opened slides -> planned reads -> [decode workers]
                                                         |                  |
                                free buffers <- consumer <- full batches <- decoded ones, in order

The next slide is opened, its tissue found and its grid laid while this one is decoded, and the
decoders go on into it without a pause. Batches come in table order and never mix slides, so that
what a batch holds does not depend on timing. Where filters refuse tiles, the tiles after them close
the gaps: a batch is smaller than asked for only at the end of its slide.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from thinsection.slide import Slide
from thinsection.slide.resize import read_tiles
from thinsection.stream.batches import (
    Allocate,
    BatchPacker,
    DecodedBatch,
    OpenedSlide,
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
    StreamEvent,
    TileBatch,
)
from thinsection.stream.budget import (
    StreamBudget,
    StreamConfig,
    cpu_count,
    scratch_bytes,
    stream_budget,
)
from thinsection.stream.reading import Reads, RegionRead, TileRun, decode_region, plan_batch
from thinsection.stream.threads import Channel, ChannelClosed, StageClock
from thinsection.tiles import TileFilter, TileTable, TileTransform
from thinsection.types import TileArray
from thinsection.units import parse_bytes

_Ordered = SlideFailed | SlideStarted | DecodedBatch | OpenedSlide


class TileStream:
    """Iterates over the events of many slides; use as a context manager, iterate once.

    Args:
        entries: what `prepare` turns into `SlideTiles`, or `SlideFailed`; taken lazily.
        prepare: runs in a thread of its own, ahead of decoding; must not raise.
        budget: buffers, scratch and worker count.
        batch_size: tiles per batch; the last batch of a slide may be smaller.
        filters: pixel filters; tiles that one of them refuses are left out.
        prefetch_slides: slides that wait opened.
        allocate: makes a batch buffer (pinned memory for CUDA); None: pageable memory.
        clock: where busy and waiting time is added up.

    Memory: `budget.peak_bytes`, the prepared slides and their tile tables. With filters one of the
    budget's buffers is the batch that is being filled, so none is added; a consumer may hold
    `budget.slots - 2` batches, without filters one more, while it asks for the next.
    """

    def __init__(
        self,
        entries: Iterable[Any],
        prepare: Callable[[Any], SlideTiles | SlideFailed],
        *,
        budget: StreamBudget,
        batch_size: int,
        filters: Sequence[TileFilter] = (),
        prefetch_slides: int = 2,
        allocate: Allocate | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self._entries, self._prepare = entries, prepare
        self._budget, self._batch_size = budget, batch_size
        self._filters = tuple(filters)
        self._allocate: Allocate = allocate or (lambda shape: np.empty(shape, dtype=np.uint8))
        self.clock = clock or StageClock()
        self._prepared: Channel[SlideTiles | SlideFailed] = Channel(prefetch_slides)
        # None is a buffer that nobody needed yet; the one that came back last is still in the CPU's
        # caches, and where the consumer keeps up some are never made
        self._free: Channel[TileArray | None] = Channel(newest_first=True)
        self._free.put(*[None] * budget.slots)
        self._ordered: Channel[_Ordered] = Channel()
        self._packer = BatchPacker(self._give_back)
        self._failure: BaseException | None = None
        self._opened: list[OpenedSlide] = []
        self._tasks, self._taking = self._plan_tasks(), threading.Lock()
        targets = [self._run_prepare, *[self._run_worker] * budget.workers]
        self._threads = [threading.Thread(target=self._guard, args=(t,)) for t in targets]

    def __enter__(self) -> "TileStream":
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        left = self._prepared.close()
        for channel in (self._free, self._ordered):
            channel.close()
        for thread in self._threads:
            thread.join()
        waiting = [item for item in left if isinstance(item, SlideTiles)]
        for source in [*waiting, *[owner.source for owner in self._opened]]:
            source.close()

    def __iter__(self) -> Iterator[StreamEvent]:
        """Yields each slide's events in the order of the entries.

        Raises:
            BaseException: whatever broke a thread of the stream itself, not a slide.
        """
        for item in self._ordered:
            yield from self._events(item)
        if self._failure is not None:
            raise self._failure

    def _events(self, item: _Ordered) -> Iterator[StreamEvent]:
        if isinstance(item, SlideFailed | SlideStarted):
            yield item
        elif isinstance(item, DecodedBatch):
            with self.clock.timed("encode_wait"):
                while not item.done.wait(0.5):
                    if self._failure is not None:
                        raise self._failure
            if item.owner.error is None:
                yield from self._packer.add(item)
            else:
                self._give_back(item.buffer)
        else:
            yield from self._packer.finish()
            self._opened.remove(item)
            item.source.close()
            if item.error is not None:
                yield SlideFailed(key=item.source.key, stage="decode", error=item.error)
            else:
                yield SlideFinished(key=item.source.key)

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

    def _plan_tasks(self) -> Iterator[tuple[DecodedBatch, Reads]]:
        """What workers take, in order: a batch and some of its reads.

        A worker that finds nothing left of a batch plans the next one here, so a buffer is taken
        no sooner than somebody decodes into it, and never before that of an earlier batch.
        """
        for source in self._prepared:
            if isinstance(source, SlideFailed):
                self._ordered.put(source)
                continue
            owner = OpenedSlide(source=source)
            self._opened.append(owner)
            self._ordered.put(SlideStarted(key=source.key, num_tiles=source.num_tiles))
            for start in range(0, source.num_tiles, self._batch_size):
                batch, tasks = self._plan_batch(owner, start)
                self._ordered.put(batch)
                for reads in tasks:
                    yield batch, reads
            self._ordered.put(owner)
        self._ordered.finish()

    def _plan_batch(self, owner: OpenedSlide, start: int) -> tuple[DecodedBatch, list[Reads]]:
        table, slide = owner.source.table, owner.source.slide
        assert table is not None and slide is not None  # there are tiles to read
        coords_l0, plan = table.coords_l0[start : start + self._batch_size], table.plan
        segment = slide.levels[plan.level].segment
        corners_lv, tasks = plan_batch(coords_l0, plan, segment=segment)
        with self.clock.timed("decode_wait"):
            buffer = self._free.get()
        shape = (self._batch_size, plan.tile_px, plan.tile_px, 3)
        if buffer is None or buffer.shape != shape:
            buffer = self._allocate(shape)
        return DecodedBatch(
            owner=owner,
            indices=np.arange(start, start + len(coords_l0)),
            corners_lv=corners_lv,
            buffer=buffer,
            keep=np.ones(len(coords_l0), dtype=bool),
            pending=len(tasks),
        ), tasks

    def _run_worker(self) -> None:
        while True:
            with self._taking:
                task = next(self._tasks, None)
            if task is None:
                return
            batch, reads = task
            try:
                with self.clock.timed("decode_busy"):
                    for read in reads:
                        if batch.owner.error is None:
                            self._decode(batch, read)
            except Exception as error:  # noqa: BLE001 - the per-slide boundary of decoding
                batch.owner.error = error
            finally:
                batch.finish_one()

    def _decode(self, batch: DecodedBatch, read: RegionRead | TileRun) -> None:
        rows, source = slice(read.start, read.stop), batch.owner.source
        slide, table, transform = source.slide, source.table, source.transform
        assert slide is not None and table is not None
        out = batch.buffer[rows]
        if isinstance(read, TileRun):
            read_tiles(slide, table.plan, table.coords_l0[batch.indices[rows]], out)
        else:
            decode_region(slide, table.plan, read, batch.corners_lv[rows], out)
        for tile_filter in self._filters:
            batch.keep[rows] &= tile_filter(out)
        if transform is not None:
            for index in np.flatnonzero(batch.keep[rows]).tolist():
                transform(out[index : index + 1])


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
    config = config or StreamConfig()
    budget = stream_budget(
        budget_bytes=parse_bytes(config.memory),
        batch_size=batch_size,
        tile_px=tiles.plan.tile_px,
        workers=config.decode_workers or cpu_count(),
        scratch_bytes=scratch_bytes(tiles.plan),
    )
    key = slide.slide_path
    source = SlideTiles(key=key, slide=slide, table=tiles, transform=transform, owned=False)
    stream = TileStream(
        [source], lambda given: given, budget=budget, batch_size=batch_size, filters=filters
    )
    with stream:
        for event in stream:
            if isinstance(event, SlideFailed):
                raise event.error
            if isinstance(event, TileBatch):
                yield event
                event.release()
