"""The stream: tiles of all slides of a run, decoded ahead into a fixed set of buffers.

    entries
      -> [prepare thread]  -> opened slides
      -> [decode threads]  -> decoded batches, in planned order
      -> [packer]          -> full batches
      -> [consumer]        -> free buffers, for the next batches to decode

The next slide is prepared while this one is decoded, and the decoders go on into it
without a pause. Batches come in table order and never mix slides, so that the content of
a batch does not depend on timing. Later tiles move up into the places of tiles that a
filter refused, so only the last batch of a `SlideTiles` may be smaller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import CopyError, InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.slide import Slide, check_slide
from thinsection.slide.geometry import ReadPlan
from thinsection.slide.resize import read_tiles
from thinsection.slide.same_slide import check_same_slide
from thinsection.tiles.budget import (
    Channel,
    ChannelClosed,
    MemoryAllowance,
    StepTimer,
    StreamBudget,
    StreamConfig,
    resample_scratch_bytes,
    split_tasks,
)
from thinsection.tiles.filters import TileFilter, passing
from thinsection.tiles.table import TileTable
from thinsection.tiles.transforms import TileTransform
from thinsection.types import CoordsL0, RgbArray, TileArray, counted, format_mpp

Indices = npt.NDArray[np.int64]  # (b,), row numbers in a tile table
TileMeasure = Callable[[Indices, TileArray], None]


@dataclass(kw_only=True, eq=False)
class SlideTiles:
    """An opened slide and the tiles of one grid to read from it.

    Every event of the stream has it as `source`; it is not a file. A caller that needs more with
    its events makes a subclass.
    """

    slide: Slide | None  # None if no tile of it is to be read
    table: TileTable | None  # may be empty; None if `slide` is None
    # changes the tiles that the filters kept, in the decode threads
    transform: TileTransform | None = None
    # Functions that measure the tiles that the filters kept, before `transform`. The decode threads
    # call them with the tiles and their row numbers in the table.
    measures: tuple[TileMeasure, ...] = ()
    # True if the stream closes the slide after these tiles
    closes_slide: bool = True
    # error of decoding; the rest of the slide is not read
    error: Exception | None = field(default=None, init=False)

    @property
    def slide_path(self) -> str:
        """Path or URL of the slide; '' if no tile of it is read."""
        return "" if self.slide is None else self.slide.slide_path

    @property
    def plan(self) -> ReadPlan | None:
        """How the tiles are read; None if no tile is read."""
        return None if self.table is None else self.table.plan

    @property
    def num_tiles(self) -> int:
        """Tiles to read."""
        return 0 if self.table is None else len(self.table)

    def close(self) -> None:
        """Closes the slide if `closes_slide`."""
        if self.closes_slide and self.slide is not None:
            self.slide.close()


class SourceOfCopy(SlideTiles):
    """Source of a copied batch: `slide_path` and `plan`, without the opened slide and its table."""

    def __init__(self, slide_path: str, plan: ReadPlan | None) -> None:
        super().__init__(slide=None, table=None, closes_slide=False)
        self._slide_path = slide_path
        self._plan = plan

    @property
    def slide_path(self) -> str:
        """See `SlideTiles.slide_path`."""
        return self._slide_path

    @property
    def plan(self) -> ReadPlan | None:
        """See `SlideTiles.plan`."""
        return self._plan


S = TypeVar("S", bound=SlideTiles)


@dataclass(frozen=True, kw_only=True)
class SlideStarted(Generic[S]):
    """The first event of a `SlideTiles`; a slide has one for each of its grids."""

    source: S


_SHOWN_TILES = 8  # in a notebook


@dataclass(repr=False)
class TileBatch(Generic[S]):
    """Decoded tiles of one slide, in table order.

    A copy or a pickle has pixels of its own, and stays valid: hand `copy.copy(batch)` to another
    thread or process. The `source` of a copy states `slide_path` and `plan`, without the slide and
    its table.

    Memory: 3 b tile_px² bytes for a copy; while a batch is pickled, up to four times that.
    """

    source: S
    indices: Indices  # int64 (b,), row numbers of the tiles in the table
    coords_l0: CoordsL0  # int64 (b, 2)
    # (b, tile_px, tile_px, 3), a view of a buffer that `release` gives back
    tiles: TileArray
    _release: Callable[[], None] = field(repr=False)
    _released: bool = field(default=False, repr=False)

    def __len__(self) -> int:
        return len(self.indices)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles the batch with pixels of its own.

        Raises:
            CopyError: the batch was released, so that its pixels may be those of the next one.
        """
        tiles = self.tiles.copy()
        # looked at after the copy, because another thread may release it in the meantime
        if self._released:
            raise CopyError(
                "batch must be copied before the next one is asked for, got a released one; pass "
                "copy.copy(batch)"
            )
        source = SourceOfCopy(self.source.slide_path, self.source.plan)
        return TileBatch, (source, self.indices, self.coords_l0, tiles, _keep_pixels)

    def __repr__(self) -> str:
        return f"TileBatch({', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        """Returns the first tiles beside the facts."""
        picture: RgbArray | None = None
        if len(self) and not self._released:
            picture = np.concatenate(list(self.tiles[:_SHOWN_TILES]), axis=1)
        return notebook_html(picture, "TileBatch", self._facts())

    def _facts(self) -> list[str]:
        plan = self.source.plan
        mpp = None if plan is None else plan.tile_mpp
        resolution = format_mpp(None if mpp is None else (mpp, mpp))
        edge = self.tiles.shape[1]
        facts = [f"{counted(len(self), 'tile')} of {edge} px at {resolution}"]
        if len(self):
            facts.append(f"rows {self.indices[0]} to {self.indices[-1]}")
        facts.append(f"slide {Path(self.source.slide_path).name!r}")
        if self._released:
            facts.append("released")
        return facts

    def release(self) -> None:
        """Gives the buffer back, once; `tiles` must not be used afterwards."""
        if not self._released:
            self._released = True
            self._release()


@dataclass(frozen=True, kw_only=True)
class EmbeddedBatch(Generic[S]):
    """A batch after its pixels were released, with the outputs of the encoders.

    A label is absent if no stage of this slide needs its encoder.
    """

    source: S
    indices: Indices  # (b,), row numbers of the tiles in the table
    coords_l0: CoordsL0  # (b, 2)
    # (b, D) and (b, T, C) float32 by the label of the encoder
    tile_embeddings: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    tokens: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on how it was encoded, for the slide's record


@dataclass(frozen=True, kw_only=True)
class SlideFinished(Generic[S]):
    """Every batch of one `SlideTiles` was yielded."""

    source: S


@dataclass(frozen=True, kw_only=True)
class SlideFailed(Generic[S]):
    """The slide could not be prepared or decoded; no event of it follows."""

    source: S
    stage: str
    error: Exception


# one tile grid of a slide that is ready to be read, or the error of a slide
Prepared: TypeAlias = SlideFailed[S] | S
StreamEvent: TypeAlias = (
    SlideStarted[S] | TileBatch[S] | SlideFinished[S] | SlideFailed[S]
)


class DecodedBatch(Generic[S]):
    """Tiles of a slide, in table order, while workers decode them, and after.

    The first b tiles of `buffer` (batch_size, tile_px, tile_px, 3) are used. `keep` (b,) is False
    for a tile that a filter refused. `done` is set when no task is left.
    """

    def __init__(
        self, source: S, indices: Indices, buffer: TileArray, num_tasks: int
    ) -> None:
        self.source = source
        self.indices = indices
        self.buffer = buffer
        self.keep = np.ones(len(indices), dtype=np.bool_)
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._tasks_left = num_tasks

    def finish_task(self) -> None:
        """Counts one task as done."""
        with self._lock:
            self._tasks_left -= 1
            if self._tasks_left == 0:
                self.done.set()


class BatchPacker(Generic[S]):
    """Closes the gaps that filters leave: all batches of a slide but its last are full.

    Memory: none of its own; the batch that is being filled is one of the stream's
    buffers, which goes to `give_back` when it is free again. A row that closes a gap is
    copied once.
    """

    def __init__(self, give_back: Callable[[TileArray], None]) -> None:
        self._give_back = give_back
        # Batch that is being filled: `buffer[k]` holds the tile of table row `indices[k]`, and the
        # rest of the buffer is free.
        self._filling: DecodedBatch[S] | None = None

    def add(self, batch: DecodedBatch[S]) -> Iterator[TileBatch[S]]:
        """Takes a decoded batch and its buffer; yields batches that are full."""
        kept = np.flatnonzero(batch.keep)
        filling = self._filling
        if filling is not None and len(kept):
            num_filled = len(filling.indices)
            room = len(filling.buffer) - num_filled
            moved = kept[:room]
            kept = kept[room:]
            _move_rows(batch.buffer, moved, filling.buffer, num_filled)
            filling.indices = np.append(filling.indices, batch.indices[moved])
            yield from self._flush_full()
        if len(kept) == 0:
            self._give_back(batch.buffer)
            return
        _move_rows(batch.buffer, kept, batch.buffer, 0)
        batch.indices = batch.indices[kept]
        self._filling = batch
        yield from self._flush_full()

    def flush(self) -> Iterator[TileBatch[S]]:
        """Yields the last batch of a slide, which may be smaller; none of a failed slide."""
        batch = self._filling
        self._filling = None
        if batch is None:
            return
        source = batch.source
        if source.error is not None or source.table is None:
            self._give_back(batch.buffer)
            return
        yield TileBatch(
            source=source,
            indices=batch.indices,
            coords_l0=source.table.coords_l0[batch.indices],
            tiles=batch.buffer[: len(batch.indices)],
            _release=partial(self._give_back, batch.buffer),
        )

    def _flush_full(self) -> Iterator[TileBatch[S]]:
        batch = self._filling
        if batch is not None and len(batch.indices) == len(batch.buffer):
            yield from self.flush()


def _move_rows(source: TileArray, rows: Indices, target: TileArray, start: int) -> None:
    """Copies rows to `target[start:]`.

    Within one array each row must move to the front or stay; otherwise a row would be overwritten
    before it is copied.
    """
    for target_row, row in enumerate(rows.tolist(), start):
        if source is not target or row != target_row:
            target[target_row] = source[row]


Entry = TypeVar("Entry")
# makes an empty buffer of a shape
Allocate = Callable[[tuple[int, ...]], TileArray]
# Seconds after which a consumer that waits for a batch looks for a failure again.
_CHECK_S = 0.5

# The consumer's queue; `SlideTiles` stands for the end of its slide.
_Queued: TypeAlias = SlideFailed[S] | SlideStarted[S] | DecodedBatch[S] | S


class TileStream(Generic[Entry, S]):
    """Iterates over the events of many slides; use as a context manager, iterate once.

    Args:
        entries: taken lazily.
        prepare: turns an entry into its `SlideTiles`, one for each tile grid, or `SlideFailed`.
            It runs in its own thread, at most `prefetch_slides` slides ahead, and must not raise.
            If several `SlideTiles` read one opened slide, only the last closes it.
        budget: from `StreamConfig.budget`.
        batch_size: tiles of a batch.
        filters: pixel filters; tiles that one of them refuses are left out.
        prefetch_slides: slides that are prepared ahead.
        allocate: makes a batch buffer (pinned memory for CUDA); None: pageable memory.
        clock: adds up where time goes.

    Memory: `budget.slots` buffers of one batch each, the scratch of the budget, the prepared slides
    and their tables. A consumer may keep at most `budget.slots - 2` unreleased batches while it
    asks for the next (`budget.slots - 1` without filters). With more it would wait for ever.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        prepare: Callable[[Entry], Sequence[Prepared[S]]],
        *,
        budget: StreamBudget,
        batch_size: int,
        filters: Sequence[TileFilter] = (),
        prefetch_slides: int = 2,
        allocate: Allocate | None = None,
        clock: StepTimer | None = None,
    ) -> None:
        self._entries = entries
        self._prepare = prepare
        self._batch_size = batch_size
        self._filters = tuple(filters)
        self._allocate = allocate or (lambda shape: np.empty(shape, dtype=np.uint8))
        self._workers = budget.workers
        self.clock = clock or StepTimer()
        self._prepared: Channel[Sequence[Prepared[S]]] = Channel(prefetch_slides)
        # None: a buffer that is not allocated yet. The buffer that was returned last is reused
        # first, because it is still in the CPU's caches. With a fast consumer some buffers are
        # never allocated.
        self._free: Channel[TileArray | None] = Channel(newest_first=True)
        for _ in range(budget.slots):
            self._free.put(None)
        self._ordered: Channel[_Queued[S]] = Channel()
        # A bound method would make a reference cycle, and the buffers would live until the garbage
        # collector runs.
        self._give_back = partial(_give_back, self._free)
        self._packer: BatchPacker[S] = BatchPacker(self._give_back)
        self._scratch = MemoryAllowance(budget.scratch_bytes)
        self._failure: BaseException | None = None
        self._opened: list[S] = []
        self._tasks = self._plan_tasks()
        self._tasks_lock = threading.Lock()
        self._threads = [self._new_thread(self._run_prepare)]
        for _ in range(budget.workers):
            self._threads.append(self._new_thread(self._run_worker))

    def _new_thread(self, body: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(body,), daemon=True)

    def __enter__(self) -> TileStream[Entry, S]:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # `close`, unlike `finish`, returns the items that nobody took
        waiting = self._prepared.close()
        self._free.close()
        self._ordered.close()
        for thread in self._threads:
            thread.join()
        for parts in (*waiting, self._opened):
            _close_all(parts)

    def __iter__(self) -> Iterator[StreamEvent[S]]:
        """Yields each slide's events in order; raises errors of the stream itself."""
        for item in self._ordered:
            if isinstance(item, SlideFailed | SlideStarted):
                yield item
            elif isinstance(item, DecodedBatch):
                # the consumer, which encodes, waits for a decoded batch
                with self.clock.timed("encode_wait"):
                    while not item.done.wait(_CHECK_S):
                        self._raise_failure()
                if item.source.error is None:
                    yield from self._packer.add(item)
                else:
                    self._give_back(item.buffer)
            else:
                yield from self._packer.flush()
                self._opened.remove(item)
                item.close()
                if item.error is None:
                    yield SlideFinished(source=item)
                else:
                    yield SlideFailed(source=item, stage="decode", error=item.error)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _guard(self, body: Callable[[], None]) -> None:
        """Runs a thread's body; an error of the stream itself ends the whole stream."""
        try:
            body()
        except ChannelClosed:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
            self._failure = error
            self._ordered.close()

    def _run_prepare(self) -> None:
        for entry in self._entries:
            with self.clock.timed("prepare_busy"):
                parts = self._prepare(entry)
            try:
                self._prepared.put(parts)
            except ChannelClosed:
                _close_all(parts)
                raise
        self._prepared.finish()

    def _plan_tasks(self) -> Iterator[tuple[DecodedBatch[S], slice]]:
        """Yields decode tasks in the order of the batches.

        The workers advance it, each when it asks for a task. So a batch takes its buffer only when
        a worker is free to decode into it.
        """
        for parts in self._prepared:
            self._opened += [part for part in parts if isinstance(part, SlideTiles)]
            for part in parts:
                yield from self._plan_part(part)
        self._ordered.finish()

    def _plan_part(self, part: Prepared[S]) -> Iterator[tuple[DecodedBatch[S], slice]]:
        if isinstance(part, SlideFailed):
            self._ordered.put(part)
            return
        self._ordered.put(SlideStarted(source=part))
        if part.slide is not None and part.table is not None:
            # the reader's cache keeps compressed parts of the file (TIFF tiles or strips) until
            # their last use by these tiles
            part.slide.expect(part.table.coords_l0, part.table.plan)
            for start in range(0, part.num_tiles, self._batch_size):
                yield from self._plan_batch(part, part.table, start)
        self._ordered.put(part)

    def _plan_batch(
        self, source: S, table: TileTable, start: int
    ) -> Iterator[tuple[DecodedBatch[S], slice]]:
        indices = np.arange(start, min(start + self._batch_size, len(table)))
        tasks = split_tasks(len(indices), self._workers)
        # the decode thread waits for a free buffer
        with self.clock.timed("decode_wait"):
            buffer = self._free.get()
        tile_px = table.plan.tile_px
        shape = (self._batch_size, tile_px, tile_px, 3)
        if buffer is None or buffer.shape != shape:
            buffer = self._allocate(shape)
        batch = DecodedBatch(source, indices, buffer, len(tasks))
        self._ordered.put(batch)
        for rows in tasks:
            yield batch, rows

    def _run_worker(self) -> None:
        while True:
            with self._tasks_lock:
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
                batch.finish_task()

    def _decode(self, batch: DecodedBatch[S], rows: slice) -> None:
        source = batch.source
        slide = source.slide
        table = source.table
        assert slide is not None and table is not None  # a batch has tiles to read
        tiles = batch.buffer[rows]
        keep = batch.keep[rows]
        indices = batch.indices[rows]
        scratch_bytes = resample_scratch_bytes(table.plan)
        with self._scratch.taken(scratch_bytes), self.clock.timed("decode_busy"):
            read_tiles(slide, table.plan, table.coords_l0[indices], tiles)
            for tile_filter in self._filters:
                keep &= passing(tile_filter, tiles)
            if source.measures:
                kept = tiles if keep.all() else tiles[keep]
                for measure in source.measures:
                    measure(indices[keep], kept)
            if source.transform is not None:
                for index in np.flatnonzero(keep).tolist():
                    source.transform(tiles[index : index + 1])


def _close_all(parts: Sequence[Prepared[S]]) -> None:
    for part in parts:
        if isinstance(part, SlideTiles):
            part.close()


def _keep_pixels() -> None:
    """Gives no buffer back, because a copied batch has pixels of its own."""


def _give_back(free: Channel[TileArray | None], buffer: TileArray) -> None:
    # when the stream has ended, its buffers are not used any more
    with suppress(ChannelClosed):
        free.put(buffer)


def iter_tiles(
    slide: Slide,
    tiles: TileTable,
    *,
    batch_size: int = 64,
    filters: Sequence[TileFilter] = (),
    transform: TileTransform | None = None,
    config: StreamConfig | None = None,
) -> Iterator[TileBatch[SlideTiles]]:
    """Decodes tiles of one opened slide in batches, in table order.

    `batch.tiles` is valid until the next batch is asked for; copy tiles that should stay, or the
    batch by `copy.copy(batch)`.

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
        InvalidInputError: the tiles are of another slide.
    """
    check_slide(slide)
    if not isinstance(tiles, TileTable):
        raise InvalidInputError(
            f"tiles must be a TileTable, got {type(tiles).__name__}; pass the result of tile_grid"
        )
    check_same_slide(slide, tiles)
    config = config or StreamConfig()
    budget = config.budget(
        batch_size,
        tile_px=tiles.plan.tile_px,
        tile_bytes=resample_scratch_bytes(tiles.plan),
    )

    def prepare(entry: Slide) -> list[SlideTiles]:
        whole = SlideTiles(
            slide=entry,
            table=tiles,
            transform=transform,
            closes_slide=False,
        )
        return [whole]

    with TileStream(
        [slide], prepare, budget=budget, batch_size=batch_size, filters=filters
    ) as stream:
        for event in stream:
            if isinstance(event, SlideFailed):
                raise event.error
            if isinstance(event, TileBatch):
                yield event
                event.release()
