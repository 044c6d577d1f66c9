"""Slides and batches on their way through the stream, and the packing of kept tiles.

`K` is the type by which a caller identifies a slide; the key comes back with every event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.slide import Slide
from thinsection.tiles import TileTable
from thinsection.tiles.transforms import TileTransform
from thinsection.types import CoordsL0, TileArray

K = TypeVar("K")
Indices = npt.NDArray[np.int64]  # (b,), places in a tile table
TileMeasure = Callable[[Indices, TileArray], None]


@dataclass(kw_only=True, eq=False)
class SlideTiles(Generic[K]):
    """An opened slide and the tiles of one grid to read from it."""

    key: K
    slide: Slide | None  # None where no tile of it is to be read
    table: TileTable | None  # may be empty; None with no slide
    # changes kept tiles, in the decode threads
    transform: TileTransform | None = None
    # gets kept tiles before `transform`, with their places, in the decode threads
    measure: TileMeasure | None = None
    # the stream closes a slide that it owns
    owned: bool = True
    # raised by decoding; the rest of the slide is not read
    error: Exception | None = field(default=None, init=False)

    @property
    def num_tiles(self) -> int:
        """Tiles to read."""
        return 0 if self.table is None else len(self.table)

    def close(self) -> None:
        """Closes the slide where it is the stream's."""
        if self.owned and self.slide is not None:
            self.slide.close()


@dataclass(frozen=True, kw_only=True)
class SlideStarted(Generic[K]):
    """The first event of a slide that could be opened."""

    key: K
    num_tiles: int


@dataclass
class TileBatch(Generic[K]):
    """Decoded tiles of one slide, in table order."""

    key: K
    indices: Indices  # int64 (b,), the tiles' places in the table
    coords_l0: CoordsL0  # int64 (b, 2)
    # (b, tile_px, tile_px, 3), a view of a buffer that `release` gives back
    tiles: TileArray
    _release: Callable[[], None] = field(repr=False)
    _released: bool = field(default=False, repr=False)

    def __len__(self) -> int:
        return len(self.indices)

    def release(self) -> None:
        """Gives the buffer back, once; `tiles` must not be used afterwards."""
        if not self._released:
            self._released = True
            self._release()


@dataclass(frozen=True, kw_only=True)
class SlideFinished(Generic[K]):
    """Every batch of the slide was yielded."""

    key: K


@dataclass(frozen=True, kw_only=True)
class SlideFailed(Generic[K]):
    """The slide could not be prepared or decoded; no event of it follows."""

    key: K
    stage: str
    error: Exception


# one tile grid of a slide that is ready to be read, or the error of a slide
Prepared = SlideTiles[K] | SlideFailed[K]
StreamEvent = SlideStarted[K] | TileBatch[K] | SlideFinished[K] | SlideFailed[K]


class DecodedBatch(Generic[K]):
    """Tiles of a slide, in table order, while workers decode them, and after.

    The first b tiles of `buffer` (batch_size, tile_px, tile_px, 3) are used. `keep` (b,)
    is False where a filter refused the tile. `done` is set when no task is left.
    """

    def __init__(
        self, source: SlideTiles[K], indices: Indices, buffer: TileArray, num_tasks: int
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


class BatchPacker(Generic[K]):
    """Closes the gaps that filters leave: all batches of a slide but its last are full.

    Memory: none of its own; the batch that is being filled is one of the stream's
    buffers, which goes to `give_back` when it is free again. A row that closes a gap is
    copied once.
    """

    def __init__(self, give_back: Callable[[TileArray], None]) -> None:
        self._give_back = give_back
        # its indices are those of the first rows of its buffer
        self._filling: DecodedBatch[K] | None = None

    def add(self, batch: DecodedBatch[K]) -> Iterator[TileBatch[K]]:
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

    def flush(self) -> Iterator[TileBatch[K]]:
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
            key=source.key,
            indices=batch.indices,
            coords_l0=source.table.coords_l0[batch.indices],
            tiles=batch.buffer[: len(batch.indices)],
            _release=partial(self._give_back, batch.buffer),
        )

    def _flush_full(self) -> Iterator[TileBatch[K]]:
        batch = self._filling
        if batch is not None and len(batch.indices) == len(batch.buffer):
            yield from self.flush()


def _move_rows(source: TileArray, rows: Indices, target: TileArray, start: int) -> None:
    """Copies rows to `target[start:]`; within one array rows only move to the front."""
    for place, row in enumerate(rows.tolist(), start):
        if source is not target or row != place:
            target[place] = source[row]
