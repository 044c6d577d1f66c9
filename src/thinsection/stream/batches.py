"""What the stream takes and yields, and batches in the making between the two.

Threads decode into buffers; where filters refuse tiles, full batches are made of sifted ones.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.slide import Slide
from thinsection.tiles import TileTable, TileTransform
from thinsection.types import CoordsL0, CoordsLv, RgbArray, TileArray


@dataclass(frozen=True, kw_only=True)
class SlideTiles:
    """An opened slide and the tiles to read from it.

    Attributes:
        key: whatever the caller knows the slide by; comes back with every event.
        slide: opened; None where no tile of it is to be read.
        table: its tiles; may be empty. None with no slide.
        transform: changes the tiles that filters keep, in the decode workers; None leaves them.
        owned: whether the stream closes the slide when it is done with it.
    """

    key: Any
    slide: Slide | None
    table: TileTable | None
    transform: TileTransform | None = None
    owned: bool = True

    @property
    def num_tiles(self) -> int:
        """Tiles to read."""
        return 0 if self.table is None else len(self.table)

    def close(self) -> None:
        """Closes the slide where it is the stream's."""
        if self.owned and self.slide is not None:
            self.slide.close()


@dataclass(frozen=True, kw_only=True)
class SlideStarted:
    """The first event of a slide that could be opened."""

    key: Any
    num_tiles: int


@dataclass(kw_only=True)
class TileBatch:
    """Decoded tiles of one slide, in table order.

    Attributes:
        key: of its slide.
        indices: int64 (b,), the tiles' places in the table.
        coords_l0: int64 (b, 2).
        tiles: uint8 (b, tile_px, tile_px, 3), a view of a buffer that `release` gives back.
    """

    key: Any
    indices: npt.NDArray[np.int64]
    coords_l0: CoordsL0
    tiles: RgbArray
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
class SlideFinished:
    """Every batch of the slide was yielded."""

    key: Any


@dataclass(frozen=True, kw_only=True)
class SlideFailed:
    """The slide could not be prepared or decoded; no further event of it follows.

    `prepare` returns it in place of `SlideTiles` for a slide that cannot be read.
    """

    key: Any
    stage: str
    error: Exception


StreamEvent = SlideStarted | TileBatch | SlideFinished | SlideFailed

Allocate = Callable[[tuple[int, ...]], TileArray]


@dataclass(kw_only=True, eq=False)
class OpenedSlide:
    """A slide while it is decoded; among decoded batches it stands for their end."""

    source: SlideTiles
    error: Exception | None = None  # the first that decoding met; the slide is given up then


@dataclass(kw_only=True)
class DecodedBatch:
    """Tiles of a slide, in table order, while workers decode them, and after."""

    owner: OpenedSlide
    indices: npt.NDArray[np.int64]  # (b,), the tiles' places in the table
    corners_lv: CoordsLv  # (b, 2)
    buffer: TileArray  # (batch_size, tile_px, tile_px, 3); the first b are used
    keep: npt.NDArray[np.bool_]  # (b,), False where a filter refused the tile
    pending: int  # reads that are not done
    done: threading.Event = field(default_factory=threading.Event)  # set when none is pending
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish_one(self) -> None:
        """Counts one read as done."""
        with self.lock:
            self.pending -= 1
            if self.pending == 0:
                self.done.set()


class BatchPacker:
    """Closes the gaps that filters leave, so that all batches of a slide but its last are full.

    What a batch holds depends on the tiles that are kept, not on those that were refused. A buffer
    that is free again goes to `give_back`.

    Memory: none of its own; the batch that is being filled is one of the stream's buffers. A row
    that closes a gap is copied once.
    """

    def __init__(self, give_back: Callable[[TileArray], None]) -> None:
        self._give_back = give_back
        self._filling: DecodedBatch | None = None  # its indices: of the buffer's first rows

    def add(self, batch: DecodedBatch) -> Iterator[TileBatch]:
        """Takes a decoded batch and its buffer; yields what is full."""
        kept, filling = np.flatnonzero(batch.keep), self._filling
        if filling is not None and len(kept):
            filled = len(filling.indices)
            taken, kept = np.split(kept, [len(filling.buffer) - filled])
            _move(batch.buffer, taken, filling.buffer, filled)
            filling.indices = np.append(filling.indices, batch.indices[taken])
            yield from self._full()
        if len(kept) == 0:
            self._give_back(batch.buffer)
            return
        _move(batch.buffer, kept, batch.buffer, 0)
        batch.indices = batch.indices[kept]
        self._filling = batch
        yield from self._full()

    def finish(self) -> Iterator[TileBatch]:
        """Yields the last batch of a slide, which may be smaller; none of a slide that failed."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        owner, indices = filling.owner, filling.indices
        if owner.error is not None:
            self._give_back(filling.buffer)
            return
        assert owner.source.table is not None
        yield TileBatch(
            key=owner.source.key,
            indices=indices,
            coords_l0=owner.source.table.coords_l0[indices],
            tiles=filling.buffer[: len(indices)],
            _release=partial(self._give_back, filling.buffer),
        )

    def _full(self) -> Iterator[TileBatch]:
        if self._filling is not None and len(self._filling.indices) == len(self._filling.buffer):
            yield from self.finish()


def _move(source: TileArray, rows: npt.NDArray, target: TileArray, start: int) -> None:
    """Copies rows to `target[start:]`; within one array a row only moves towards the front."""
    for place, row in enumerate(rows.tolist(), start):
        if source is not target or row != place:
            target[place] = source[row]
