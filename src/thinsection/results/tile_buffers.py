"""Buffers of tiles of several slides, which a thread reads ahead and `TileDataset` shuffles."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinsection.results.folder import Listener
from thinsection.results.tile_items import Item, TileItems
from thinsection.slide import Slide
from thinsection.tiles import TileTable
from thinsection.tiles.budget import CHANNELS, MAX_SCRATCH, StreamBudget
from thinsection.tiles.order import Numbers, Run
from thinsection.tiles.stream import (
    Prepared,
    SlideFailed,
    SlideFinished,
    SlideTiles,
    TileBatch,
    TileStream,
)
from thinsection.types import Closing, CoordsL0, TileArray

# Tiles that the stream decodes at once; 5 such batches wait at most.
_MAX_BATCH = 32
_SLOTS = 5
# Share of a buffer that one such batch may be.
_BATCHES_PER_BUFFER = 16


@dataclass(kw_only=True, eq=False)
class Buffer:
    """Tiles of several slides, in the order of their chunks.

    Attributes:
        tiles: uint8 (n, tile_px, tile_px, 3).
        is_read: (n,), False for tiles of slides that could not be read.
        slides: (n,), index of each tile's slide in the list of slides.
        indices: (n,), number of each tile in the dataset.
        coords_l0: (n, 2).
        columns: values per tile by name, float32 (n,).
    """

    tiles: TileArray
    is_read: npt.NDArray[np.bool_]
    slides: Numbers
    indices: Numbers
    coords_l0: CoordsL0
    columns: dict[str, npt.NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.tiles)

    def item(self, items: TileItems, place: int) -> Item:
        """Item of the tile at a place; its pixels are a copy, as a view would keep the buffer."""
        columns = {name: values[place] for name, values in self.columns.items()}
        return items.item(
            int(self.indices[place]),
            self.tiles[place].copy(),
            self.coords_l0[place],
            columns,
        )


@dataclass(kw_only=True, eq=False)
class _Piece(SlideTiles):
    """Tiles of one slide in a buffer."""

    number: int  # index in the list of slides
    places: Numbers  # (k,), places in the buffer, by ascending row of the tile table


class BufferReader(Closing):
    """Reads the buffers of a shard in a thread, and keeps slides open from one to the next.

    Memory: as `TileDataset`. Arrays are used again: new ones in each of the threads would leave
    gaps in the memory of the process.
    """

    def __init__(
        self,
        items: TileItems,
        *,
        buffer_tiles: int,
        open_slides: int,
        decode_threads: int,
        on_message: Listener,
    ) -> None:
        self._items = items
        self._open_slides = open_slides
        self._on_message = on_message
        batch = min(_MAX_BATCH, max(1, buffer_tiles // _BATCHES_PER_BUFFER))
        self._batch_size = batch
        tile_px = items.tile_px
        shape = (buffer_tiles, tile_px, tile_px, CHANNELS)
        # One is filled while the other is used.
        self._arrays = [np.empty(shape, np.uint8), np.empty(shape, np.uint8)]
        self._batch_arrays: list[TileArray] = []
        self._budget = StreamBudget(
            slots=_SLOTS,
            batch_bytes=batch * tile_px * tile_px * CHANNELS,
            scratch_bytes=decode_threads * MAX_SCRATCH,
            workers=decode_threads,
        )
        # Only the thread that prepares slides uses it while a stream runs.
        self._opened: dict[int, tuple[Slide, TileTable]] = {}
        self._reported: set[str] = set()
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, "thinsection-tiles")

    def close(self) -> None:
        """Stops reading and closes the slides."""
        self._stopped.set()
        self._thread.shutdown(cancel_futures=True)
        for slide, _ in self._opened.values():
            slide.close()
        # Streams are cycles of references, which may live for a while.
        self._arrays.clear()
        self._batch_arrays.clear()

    def buffers(self, orders: Iterator[list[Run]]) -> Iterator[Buffer]:
        """Yields buffers in order; the next one is read meanwhile.

        A buffer is valid until the next one is asked for.
        """
        waiting: Future[Buffer] | None = None
        for number, runs in enumerate(orders):
            buffer = None if waiting is None else waiting.result()
            array = self._arrays[number % 2]
            waiting = self._thread.submit(self._read, runs, array)
            if buffer is not None:
                yield buffer
        if waiting is not None:
            yield waiting.result()

    def _read(self, runs: Sequence[Run], array: TileArray) -> Buffer:
        """Reads the tiles of one buffer into the first rows of an array."""
        buffer = self._new_buffer(runs, array)
        # by slide; slides come in the order in which they enter the buffer
        numbers, first_places = np.unique(buffer.slides, return_index=True)
        pieces = []
        for number in numbers[np.argsort(first_places)].tolist():
            places = np.flatnonzero(buffer.slides == number)
            places = places[np.argsort(buffer.indices[places])]
            pieces.append(_Piece(number=number, places=places, slide=None, table=None))
        needed = [piece.number for piece in pieces]
        for index in [index for index in self._opened if index not in needed]:
            slide, _ = self._opened.pop(index)
            slide.close()

        def prepare(piece: _Piece) -> list[Prepared[_Piece]]:
            try:
                return [self._prepare(buffer, piece)]
            except Exception as error:  # noqa: BLE001 - the per-slide boundary
                return [SlideFailed(source=piece, stage="open", error=error)]

        with TileStream(
            pieces,
            prepare,
            budget=self._budget,
            batch_size=self._batch_size,
            allocate=self._batch_allocator(),
        ) as stream:
            for event in stream:
                if self._stopped.is_set():
                    break
                if isinstance(event, TileBatch):
                    places = event.source.places[event.indices]
                    buffer.tiles[places] = event.tiles
                    event.release()
                elif isinstance(event, SlideFinished):
                    buffer.is_read[event.source.places] = True
                elif isinstance(event, SlideFailed):
                    slide_id = self._items.chosen[event.source.number].slide_id
                    text = f"{slide_id}: left out: {event.error}"
                    if text not in self._reported:
                        self._reported.add(text)
                        self._on_message(text)
        return buffer

    def _batch_allocator(self) -> Callable[[tuple[int, ...]], TileArray]:
        """Function that gives a stream the arrays of the stream before it, then new ones."""
        free = list(self._batch_arrays)

        def allocate(shape: tuple[int, ...]) -> TileArray:
            if free:
                return free.pop()
            array = np.empty(shape, dtype=np.uint8)
            self._batch_arrays.append(array)
            return array

        return allocate

    def _new_buffer(self, runs: Sequence[Run], array: TileArray) -> Buffer:
        lengths = [len(run) for run in runs]
        first_indices = self._items.first_indices
        indices = [
            first_indices[run.slide] + np.arange(run.start, run.stop) for run in runs
        ]
        count = sum(lengths)
        columns = {
            name: np.full(count, np.nan, dtype=np.float32)
            for name in self._items.columns
        }
        return Buffer(
            tiles=array[:count],
            is_read=np.zeros(count, dtype=np.bool_),
            slides=np.repeat([run.slide for run in runs], lengths),
            indices=np.concatenate(indices),
            coords_l0=np.zeros((count, 2), dtype=np.int64),
            columns=columns,
        )

    def _prepare(self, buffer: Buffer, piece: _Piece) -> _Piece:
        """Opens the slide of a piece, or uses it if it is open already."""
        opened = self._opened.get(piece.number)
        is_kept = opened is not None
        if opened is None:
            opened = self._items.open(piece.number)
            if len(self._opened) < self._open_slides:
                self._opened[piece.number] = opened
                is_kept = True
        slide, table = opened
        tiles_of_slide = (
            buffer.indices[piece.places] - self._items.first_indices[piece.number]
        )
        rows = self._items.chosen[piece.number].table_rows(tiles_of_slide)
        chosen = table.select(rows)
        buffer.coords_l0[piece.places] = chosen.coords_l0
        for name in self._items.columns:
            buffer.columns[name][piece.places] = chosen.columns[name]
        return replace(piece, slide=slide, table=chosen, closes_slide=not is_kept)
