"""Slides and batches on their way through the stream, and the packing of kept tiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.slide import Slide
from thinsection.tiles.table import TileTable
from thinsection.tiles.transforms import TileTransform
from thinsection.types import CoordsL0, TileArray

Indices = npt.NDArray[np.int64]  # (b,), places in a tile table
TileMeasure = Callable[[Indices, TileArray], None]


@dataclass(kw_only=True, eq=False)
class SlideTiles:
    """An opened slide and the tiles of one grid to read from it.

    Every event of the stream has it as `source`. A caller that needs more with its events makes a
    subclass.
    """

    slide: Slide | None  # None where no tile of it is to be read
    table: TileTable | None  # may be empty; None with no slide
    # changes kept tiles, in the decode threads
    transform: TileTransform | None = None
    # each gets kept tiles before `transform`, with their places, in the decode threads
    measures: tuple[TileMeasure, ...] = ()
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


S = TypeVar("S", bound=SlideTiles)


@dataclass(frozen=True, kw_only=True)
class SlideStarted(Generic[S]):
    """The first event of a slide that could be opened."""

    source: S


@dataclass
class TileBatch(Generic[S]):
    """Decoded tiles of one slide, in table order."""

    source: S
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
class EmbeddedBatch(Generic[S]):
    """A batch whose pixels were given back, with what the encoders made of them.

    A label is absent where its encoder was not asked for this slide.
    """

    source: S
    indices: Indices  # (b,), the tiles' places in the table
    coords_l0: CoordsL0  # (b, 2)
    # (b, D) and (b, T, C) float32 by the label of the encoder
    tile_embeddings: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    tokens: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on how it was encoded, for the slide's record


@dataclass(frozen=True, kw_only=True)
class SlideFinished(Generic[S]):
    """Every batch of the slide was yielded."""

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

    The first b tiles of `buffer` (batch_size, tile_px, tile_px, 3) are used. `keep` (b,)
    is False where a filter refused the tile. `done` is set when no task is left.
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
        # its indices are those of the first rows of its buffer
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
    """Copies rows to `target[start:]`; within one array rows only move to the front."""
    for place, row in enumerate(rows.tolist(), start):
        if source is not target or row != place:
            target[place] = source[row]
