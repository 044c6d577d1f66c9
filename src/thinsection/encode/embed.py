"""Tiles through an encoder: one batch is transferred and decoded while another is encoded."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinsection.encode.encoder import TileEncoder
from thinsection.slide import Slide
from thinsection.stream import StageClock, StreamConfig, TileBatch, iter_tiles
from thinsection.tiles import TileFilter, TileTable
from thinsection.types import CoordsL0, RgbArray

# batches that a GPU has been given and whose embeddings were not fetched yet
_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class EmbeddedBatch:
    """Embeddings of one batch of tiles.

    Attributes:
        key: of the slide.
        indices: int64 (b,), places in the tile table.
        coords_l0: int64 (b, 2).
        tile_embeddings: float32 (b, D), on the host.
    """

    key: Any
    indices: npt.NDArray[np.int64]
    coords_l0: CoordsL0
    tile_embeddings: npt.NDArray[np.float32]


@dataclass(kw_only=True)
class _Pending:
    batch: TileBatch
    copied: torch.cuda.Event | None
    embeddings: torch.Tensor


class BatchEncoder:
    """Feeds batches to an encoder and hands embeddings back in order.

    On CUDA the copy to the device and the encoder are queued and the embeddings of the batch
    before are fetched meanwhile, so that the device always has work; elsewhere it runs at once.

    Args:
        encoder: the tile encoder.
        clock: where transfer and encoding time is added up.

    Memory: `_IN_FLIGHT` batches on the device, beside the encoder's own.
    """

    def __init__(self, encoder: TileEncoder, *, clock: StageClock | None = None) -> None:
        self._encoder = encoder
        self._clock = clock or StageClock()
        self._cuda = encoder.device.type == "cuda"
        self._queue: deque[_Pending | Any] = deque()

    def submit(self, batch: TileBatch) -> Iterator[EmbeddedBatch | Any]:
        """Encodes a batch and releases its buffer when it was copied; yields what is ready."""
        with self._clock.timed("transfer_busy"):
            tiles = torch.from_numpy(batch.tiles)
            copied = None
            if self._cuda:
                tiles = tiles.to(self._encoder.device, non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(torch.cuda.current_stream(self._encoder.device))
        with self._clock.timed("encode_busy"):
            embeddings = self._encoder.encode(tiles)
        self._queue.append(_Pending(batch=batch, copied=copied, embeddings=embeddings))
        yield from self._drain(_IN_FLIGHT - 1 if self._cuda else 0)

    def mark(self, marker: Any) -> Iterator[EmbeddedBatch | Any]:
        """Passes a marker through the queue: it comes out after every batch submitted before it."""
        self._queue.append(marker)
        yield from self._drain(_IN_FLIGHT - 1 if self._cuda else 0)

    def flush(self) -> Iterator[EmbeddedBatch | Any]:
        """Yields all that is still under way."""
        yield from self._drain(0)

    def _drain(self, leave: int) -> Iterator[EmbeddedBatch | Any]:
        while sum(isinstance(item, _Pending) for item in self._queue) > leave or (
            self._queue and not isinstance(self._queue[0], _Pending)
        ):
            item = self._queue.popleft()
            yield self._fetch(item) if isinstance(item, _Pending) else item

    def _fetch(self, item: _Pending) -> EmbeddedBatch:
        if item.copied is not None:
            item.copied.synchronize()
        batch = item.batch
        batch.release()
        with self._clock.timed("encode_busy"):
            embeddings = item.embeddings.float().cpu().numpy()
        return EmbeddedBatch(
            key=batch.key,
            indices=batch.indices,
            coords_l0=batch.coords_l0,
            tile_embeddings=embeddings,
        )


def pinned_allocator(encoder: TileEncoder) -> Callable[[tuple[int, ...]], RgbArray]:
    """Allocates batch buffers: page-locked where the encoder's device copies asynchronously."""
    pin = encoder.device.type == "cuda"

    def allocate(shape: tuple[int, ...]) -> RgbArray:
        return np.asarray(torch.empty(shape, dtype=torch.uint8, pin_memory=pin).numpy())

    return allocate


def embed_tiles(
    slide: Slide,
    tiles: TileTable,
    encoder: TileEncoder,
    *,
    batch_size: int = 32,
    filters: Sequence[TileFilter] = (),
    config: StreamConfig | None = None,
) -> tuple[npt.NDArray[np.float32], TileTable]:
    """Embeddings of a slide's tiles.

    Args:
        slide: opened; stays open.
        tiles: from `tile_grid`.
        encoder: from `load_encoder`.
        batch_size: tiles per batch.
        filters: pixel filters; tiles that one refuses are left out.
        config: memory and decoding threads of the stream.

    Returns:
        tile_embeddings float32 (N, D), and the table of those N tiles.

    Memory: the stream's budget, the encoder's activations, and 4 N D bytes for the result.

    Raises:
        SlideReadError: a region cannot be decoded.
    """
    worker = BatchEncoder(encoder)
    found: list[EmbeddedBatch] = []
    batches = iter_tiles(slide, tiles, batch_size=batch_size, filters=filters, config=config)
    for batch in batches:
        # the stream releases each batch itself: fetch before the next one is asked for
        found += [*worker.submit(batch), *worker.flush()]
    if not found:
        return np.empty((0, encoder.dim), dtype=np.float32), tiles.select(np.arange(0))
    indices = np.concatenate([batch.indices for batch in found])
    return np.concatenate([batch.tile_embeddings for batch in found]), tiles.select(indices)
