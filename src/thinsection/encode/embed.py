"""Tiles through encoders: batches are decoded and transferred while others are encoded."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.encode.encoder import TileEncoder
from thinsection.encode.queues import Answer, Arrays, Card, Halving, Queues, Sent
from thinsection.errors import require
from thinsection.slide import Slide
from thinsection.stream import StageClock, StreamConfig, TileBatch, iter_tiles
from thinsection.tiles import TileFilter, TileTable
from thinsection.types import CoordsL0, RgbArray

_IN_FLIGHT = 3  # batches on a GPU: one on its way in, one at work, one on its way back


@dataclass(frozen=True, kw_only=True)
class EmbeddedBatch:
    """Embeddings of one batch of tiles on the host, in the order of the encoders."""

    key: Any  # of the slide
    indices: npt.NDArray[np.int64]  # (b,), places in the tile table
    coords_l0: CoordsL0
    tile_embeddings: tuple[npt.NDArray[np.float32] | None, ...]  # (b, D); None where not wanted
    tokens: tuple[npt.NDArray[np.float32] | None, ...]  # (b, T, C); None where not wanted
    notes: tuple[str, ...] = ()  # on how it was done, for the slide's record


Wanted = Literal["", "embeddings", "tokens"]  # of an encoder: nothing, or tokens beside embeddings


class BatchEncoder:
    """Feeds each batch to every encoder from one buffer and hands embeddings back in order.

    On CUDA a batch is queued and the host goes on to the next one: the copy of batch k+1, the
    encoders of batch k and the way back of batch k-1 run side by side (`Queues`); elsewhere it
    runs at once. Each encoder gets the batch that it would get alone: its embeddings are the same
    to the byte. Where the device's memory does not hold a batch it is halved, and `notes` say so.

    Memory: `_IN_FLIGHT` batches of tiles and of answers, beside what one encoder after another
    takes.
    """

    def __init__(
        self,
        encoders: Sequence[TileEncoder],
        *,
        clock: StageClock | None = None,
        card: Callable[[torch.device], Card] = Card,
    ) -> None:
        require(encoders, "encoders must hold at least one encoder", "none")
        self._encoders = tuple(encoders)
        self._clock = clock or StageClock()
        cards = {e.device: card(e.device) for e in self._encoders if e.device.type == "cuda"}
        self._queues = {device: Queues(made) for device, made in cards.items()}
        self._halving = [
            Halving(cards[e.device].free_unused) if e.device in cards else None
            for e in self._encoders
        ]
        self._leave = _IN_FLIGHT - 1 if cards else 0  # batches that may stay under way
        self._under_way: deque[Any] = deque()
        self._copying: deque[tuple[TileBatch, list[Sent]]] = deque()

    def submit(self, batch: TileBatch, wanted: Sequence[Wanted] | None = None) -> Iterator[Any]:
        """Encodes a batch as `wanted` of each encoder (None: embeddings); yields what is ready.

        The batch's buffer is released when all have taken it; at most this one is kept longer.
        """
        asked: Sequence[Wanted] = wanted or ["embeddings"] * len(self._encoders)
        with self._clock.timed("transfer_busy"):
            host = torch.from_numpy(batch.tiles)
            sent = {device: queues.send(host) for device, queues in self._queues.items()}
        self._copying.append((batch, list(sent.values())))
        with self._clock.timed("encode_busy"):
            found = [
                self._answer(place, sent, host, what) if what else None
                for place, what in enumerate(asked)
            ]
        self._release(leave=1 if sent else 0)
        self._under_way.append(partial(self._fetch, batch, found, self._notes()))
        yield from self._drain(self._leave)

    def mark(self, marker: Any) -> Iterator[Any]:
        """Passes a marker through the queue: it comes out after every batch submitted before it."""
        self._under_way.append(marker)
        yield from self._drain(self._leave)

    def flush(self) -> Iterator[Any]:
        """Yields all that is still under way."""
        self.release()
        yield from self._drain(0)

    def release(self) -> None:
        """Waits until the device has its own copy of every batch, and releases their buffers."""
        self._release(leave=0)

    def _answer(
        self, place: int, sent: dict[torch.device, Sent], host: Tensor, what: Wanted
    ) -> Answer | Arrays:
        encoder, halving = self._encoders[place], self._halving[place]
        encode = encoder.encode_with_tokens if what == "tokens" else partial(_encoded, encoder)
        if halving is None:
            return tuple(found.float().cpu().numpy() for found in encode(host))
        device = encoder.device
        return self._queues[device].answer(sent[device], partial(halving, encode))

    def _release(self, *, leave: int) -> None:
        """Releases the buffers that were copied, and waits for those beyond `leave`."""
        while self._copying:
            batch, sent = self._copying[0]
            if len(self._copying) <= leave and not all(s.copied.query() for s in sent):
                return
            for each in sent:
                each.copied.synchronize()
            batch.release()
            self._copying.popleft()

    def _notes(self) -> tuple[str, ...]:
        found = [(e, h.at_once) for e, h in zip(self._encoders, self._halving, strict=True) if h]
        return tuple(
            f"{e.label}: out of GPU memory, {n} tiles at once" for e, n in found if n is not None
        )

    def _drain(self, leave: int) -> Iterator[Any]:
        while self._under_way:
            under_way = sum(isinstance(item, partial) for item in self._under_way)
            if isinstance(self._under_way[0], partial) and under_way <= leave:
                return
            item = self._under_way.popleft()
            yield item() if isinstance(item, partial) else item

    def _fetch(
        self, batch: TileBatch, answers: list[Answer | Arrays | None], notes: tuple[str, ...]
    ) -> EmbeddedBatch:
        """What the encoders answered, on the host."""
        with self._clock.timed("encode_busy"):
            on_host = [
                self._queues[encoder.device].fetch(found) if isinstance(found, Answer) else found
                for encoder, found in zip(self._encoders, answers, strict=True)
            ]
        return EmbeddedBatch(
            key=batch.key,
            indices=batch.indices,
            coords_l0=batch.coords_l0,
            tile_embeddings=tuple(found[0] if found else None for found in on_host),
            tokens=tuple(found[1] if found and len(found) > 1 else None for found in on_host),
            notes=notes,
        )


def _encoded(encoder: TileEncoder, tiles: Tensor) -> tuple[Tensor, ...]:
    return (encoder.encode(tiles),)


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
    made: list[EmbeddedBatch] = []
    for batch in iter_tiles(slide, tiles, batch_size=batch_size, filters=filters, config=config):
        made += worker.submit(batch)
        worker.release()  # the stream takes each buffer back before it gives the next one
    made += worker.flush()
    indices = [np.arange(0), *(each.indices for each in made)]
    found = [part for each in made for part in each.tile_embeddings if part is not None]
    embeddings = np.concatenate([np.empty((0, encoder.dim), dtype=np.float32), *found])
    return embeddings, tiles.select(np.concatenate(indices))
