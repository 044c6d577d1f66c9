"""Tiles through an encoder: one batch is transferred and decoded while another is encoded."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from thinsection.encode.encoder import TileEncoder
from thinsection.errors import require
from thinsection.slide import Slide
from thinsection.stream import StageClock, StreamConfig, TileBatch, iter_tiles
from thinsection.tiles import TileFilter, TileTable
from thinsection.types import CoordsL0, RgbArray

_IN_FLIGHT = 2  # batches that a GPU has been given and whose embeddings were not fetched yet


@dataclass(frozen=True, kw_only=True)
class EmbeddedBatch:
    """Embeddings of one batch of tiles on the host, in the order of the encoders."""

    key: Any  # of the slide
    indices: npt.NDArray[np.int64]  # (b,), places in the tile table
    coords_l0: CoordsL0
    tile_embeddings: tuple[npt.NDArray[np.float32] | None, ...]  # (b, D); None where not wanted
    tokens: tuple[npt.NDArray[np.float32] | None, ...]  # (b, T, C); None where not wanted


Wanted = Literal["", "embeddings", "tokens"]  # of an encoder: nothing, or tokens beside embeddings


class BatchEncoder:
    """Feeds each batch to every encoder from one buffer and hands embeddings back in order.

    On CUDA the one copy to the device and the encoders are queued and the embeddings of the batch
    before are fetched meanwhile, so that the device always has work; elsewhere it runs at once.
    Each encoder gets the batch that it would get alone: its embeddings are the same to the byte.

    Memory: `_IN_FLIGHT` batches on the device, beside what one encoder after another takes.
    """

    def __init__(self, encoders: Sequence[TileEncoder], *, clock: StageClock | None = None) -> None:
        require(encoders, "encoders must hold at least one encoder", "none")
        self._encoders = tuple(encoders)
        self._clock = clock or StageClock()
        self._devices = {e.device for e in self._encoders if e.device.type == "cuda"}
        self._leave = _IN_FLIGHT - 1 if self._devices else 0  # batches that may stay under way
        self._queue: deque[Any] = deque()

    def submit(self, batch: TileBatch, wanted: Sequence[Wanted] | None = None) -> Iterator[Any]:
        """Encodes a batch as `wanted` of each encoder (None: embeddings); yields what is ready.

        The batch's buffer is released when all have taken it.
        """
        asked: Sequence[Wanted] = wanted or ["embeddings"] * len(self._encoders)
        with self._clock.timed("transfer_busy"):
            host = torch.from_numpy(batch.tiles)
            copies, copied = {}, []
            for device in self._devices:
                copies[device] = host.to(device, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                copied.append(event)
        with self._clock.timed("encode_busy"):
            found = [
                _encoded(encoder, copies.get(encoder.device, host), what)
                for encoder, what in zip(self._encoders, asked, strict=True)
            ]
        self._queue.append(partial(self._fetch, batch, copied, found))
        yield from self._drain(self._leave)

    def mark(self, marker: Any) -> Iterator[Any]:
        """Passes a marker through the queue: it comes out after every batch submitted before it."""
        self._queue.append(marker)
        yield from self._drain(self._leave)

    def flush(self) -> Iterator[Any]:
        """Yields all that is still under way."""
        yield from self._drain(0)

    def _drain(self, leave: int) -> Iterator[Any]:
        while self._queue:
            under_way = sum(isinstance(item, partial) for item in self._queue)
            if isinstance(self._queue[0], partial) and under_way <= leave:
                return
            item = self._queue.popleft()
            yield item() if isinstance(item, partial) else item

    def _fetch(self, batch: TileBatch, copied: list[Any], answers: list[Any]) -> EmbeddedBatch:
        """What the encoders answered, after the copies of the batch; frees its buffer."""
        for event in copied:
            event.synchronize()
        batch.release()
        with self._clock.timed("encode_busy"):
            on_host = [tuple(t.float().cpu().numpy() for t in found) for found in answers]
        return EmbeddedBatch(
            key=batch.key,
            indices=batch.indices,
            coords_l0=batch.coords_l0,
            tile_embeddings=tuple(found[0] if found else None for found in on_host),
            tokens=tuple(found[1] if len(found) > 1 else None for found in on_host),
        )


def _encoded(encoder: TileEncoder, tiles: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor, ...]:
    """What is wanted of a batch: nothing, embeddings, or embeddings and tokens."""
    if wanted == "tokens":
        return encoder.encode_with_tokens(tiles)
    return (encoder.encode(tiles),) if wanted else ()


def pinned_allocator(encoders: Sequence[TileEncoder]) -> Callable[[tuple[int, ...]], RgbArray]:
    """Allocates batch buffers: page-locked where a device of the encoders copies asynchronously."""
    pin = any(encoder.device.type == "cuda" for encoder in encoders)

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
        tiles, encoder: from `tile_grid` and `load_encoder`.
        batch_size: tiles per batch.
        filters: pixel filters; tiles that one refuses are left out.
        config: memory and decoding threads of the stream.

    Returns:
        tile_embeddings float32 (N, D), and the table of those N tiles.

    Memory: the stream's budget, the encoder's activations, and 4 N D bytes for the result.

    Raises:
        SlideReadError: a region cannot be decoded.
    """
    worker = BatchEncoder([encoder])
    indices, embeddings = [np.arange(0)], [np.empty((0, encoder.dim), dtype=np.float32)]
    batches = iter_tiles(slide, tiles, batch_size=batch_size, filters=filters, config=config)
    for batch in batches:
        # the stream releases each batch itself: fetch before the next one is asked for
        for made in (*worker.submit(batch), *worker.flush()):
            indices.append(made.indices)
            embeddings += [part for part in made.tile_embeddings if part is not None]
    return np.concatenate(embeddings), tiles.select(np.concatenate(indices))
