"""Tiles through encoders: batches are decoded and transferred while others are encoded.

A GPU has three queues; events put them in order, the host waits last:

    host buffer --[in]--> tiles --[compute]--> answers --[out]--> page-locked ring --> arrays
                   k+1              k                     k-1

What a queue uses stays referenced until the host has seen the last event of its batch, so that the
allocator hands no memory on that another queue still reads.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.encode.encoder import TileEncoder
from thinsection.errors import require
from thinsection.slide import Slide
from thinsection.stream import StageClock, StreamConfig, TileBatch, iter_tiles
from thinsection.tiles import TileFilter, TileTable
from thinsection.types import CoordsL0, RgbArray

_IN_FLIGHT = 3  # batches on a GPU: one on its way in, one at work, one on its way back

Arrays = tuple[npt.NDArray[np.float32], ...]
Encode = Callable[[Tensor], tuple[Tensor, ...]]  # tiles to answers, row by row
Event = Any  # a place in a queue, torch.cuda's: `query` says whether it has passed it
EncodeInParts = Callable[
    [Tensor], Sequence[tuple[Tensor, ...]]
]  # the answers of rows in order


class Card:
    """What the loop asks of a CUDA device; tests hand in one whose queues have simulated times."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Any:
        """A new queue, behind all that was queued on the device's current one."""
        made = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        made.wait_stream(
            torch.cuda.current_stream(self.device)
        )  # the weights' way to the device
        return made

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is called in the block goes into this queue."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any, *, for_host: bool) -> Event:
        """An event at the queue's end.

        `for_host`: the host will wait for it, and sleeps then, where it would else spin and take
        a core from the decode workers.
        """
        event = torch.cuda.Event(blocking=for_host)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Event) -> None:
        """The queue goes on when the event has passed; the host does not wait."""
        stream.wait_event(event)

    def to_device(self, host: Tensor) -> Tensor:
        """A copy on the device, by the current queue; `host` is page-locked, or the host waits."""
        return host.to(self.device, non_blocking=True)

    def to_host(self, found: Tensor, pinned: Tensor) -> None:
        """Copies an answer into a page-locked buffer, by the current queue."""
        pinned.copy_(found, non_blocking=True)

    def pinned(self, numbers: int) -> Tensor:
        """A page-locked float32 buffer."""
        return torch.empty(numbers, dtype=torch.float32, pin_memory=True)

    def free_unused(self) -> None:
        """Gives memory that no tensor holds back to the device."""
        torch.cuda.empty_cache()


@dataclass(frozen=True, eq=False)
class Sent:
    """Tiles on their way to the device."""

    tiles: Tensor
    copied: Event


@dataclass(eq=False)
class Answer:
    """What an encoder makes of a batch, on its way back: a buffer and a shape for each part."""

    buffers: list[Tensor]
    shapes: list[torch.Size]
    fetched: Event
    held: list[Any] = field(repr=False)  # the device's tensors, until `fetched`


class Queues:
    """The three queues of one device and the page-locked ring of what comes back.
    Memory: of the host, the answers of the batches under way; of the device, their tiles too."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._into, self._compute, self._out = (card.stream() for _ in range(3))
        self._free: list[Tensor] = []

    def send(self, host: Tensor) -> Sent:
        """Queues the copy of a host buffer, which may be used again after `copied`."""
        with self._card.on(self._into):
            tiles = self._card.to_device(host)
        return Sent(tiles, self._card.record(self._into, for_host=True))

    def answer(self, sent: Sent, encode: EncodeInParts) -> Answer:
        """Queues the computing behind the copy, and the way back behind the computing."""
        card = self._card
        card.wait(self._compute, sent.copied)
        with card.on(self._compute):
            parts = encode(sent.tiles)
        card.wait(self._out, card.record(self._compute, for_host=False))
        shapes = [torch.Size((len(sent.tiles), *part.shape[1:])) for part in parts[0]]
        buffers = [self._taken(shape.numel()) for shape in shapes]
        with card.on(self._out):
            for buffer, shape, found in zip(buffers, shapes, zip(*parts), strict=True):
                whole = buffer[: shape.numel()].view(shape)
                for part, rows in zip(
                    found, torch.split(whole, [len(part) for part in found])
                ):
                    card.to_host(part, rows)
        fetched = card.record(self._out, for_host=True)
        return Answer(buffers, shapes, fetched, [sent, parts])

    def fetch(self, answer: Answer) -> Arrays:
        """Waits for the way back; what it brought, and its buffers are free again."""
        answer.fetched.synchronize()
        answer.held.clear()
        self._free += answer.buffers
        parts = zip(answer.buffers, answer.shapes, strict=True)
        return tuple(
            b[: shape.numel()].view(shape).numpy().copy() for b, shape in parts
        )

    def _taken(self, numbers: int) -> Tensor:
        """The smallest free buffer that is large enough; a new one takes the largest's place."""
        self._free.sort(key=Tensor.numel)
        place = bisect_left(self._free, numbers, key=Tensor.numel)
        if place < len(self._free):
            return self._free.pop(place)
        del self._free[
            -1:
        ]  # to lock pages takes long: it is done for the first batches only
        return self._card.pinned(numbers)


class Halving:
    """Batches that may turn out too large for the device: halved until one fits.

    What did not fit is not tried again: `at_once` stays for the batches that follow. Rows stay in
    order; their last bits may be those of the smaller batch.
    """

    def __init__(self, free_unused: Callable[[], None]) -> None:
        self._free_unused = free_unused
        self.at_once: int | None = None  # tiles; None: all of a batch

    def __call__(self, encode: Encode, tiles: Tensor) -> list[tuple[Tensor, ...]]:
        """The answers of each part, in order; an OutOfMemoryError if a single tile does not fit."""
        while True:
            step = min(self.at_once or len(tiles), len(tiles))
            try:
                return [
                    encode(tiles[start : start + step])
                    for start in range(0, len(tiles), step)
                ]
            except torch.OutOfMemoryError:
                if step <= 1:
                    raise
            self.at_once = -(-step // 2)
            self._free_unused()  # here, not in the handler: its traceback holds what was computed


@dataclass(frozen=True)
class EmbeddedBatch:
    """Embeddings of one batch of tiles on the host, in the order of the encoders."""

    key: Any  # of the slide
    indices: npt.NDArray[np.int64]  # (b,), places in the tile table
    coords_l0: CoordsL0
    tile_embeddings: tuple[
        npt.NDArray[np.float32] | None, ...
    ]  # (b, D); None where not wanted
    tokens: tuple[
        npt.NDArray[np.float32] | None, ...
    ]  # (b, T, C); None where not wanted
    notes: tuple[str, ...] = ()  # on how it was done, for the slide's record


Wanted = Literal[
    "", "embeddings", "tokens"
]  # of an encoder: nothing, or tokens beside embeddings


class BatchEncoder:
    """Feeds each batch to every encoder from one buffer and hands embeddings back in order.

    On CUDA the copy of batch k+1, the encoders of batch k and the way back of batch k-1 run side
    by side (`Queues`); elsewhere a batch runs at once. Each encoder gets the batch that it would
    get alone. What the device's memory does not hold is halved, and `notes` say so.

    Memory: `_IN_FLIGHT` batches of tiles and answers, beside what one encoder after another takes.
    """

    def __init__(
        self,
        encoders: Sequence[TileEncoder],
        *,
        clock: StageClock | None = None,
        card: Callable[[torch.device], Card] = Card,
    ) -> None:
        require(encoders, "encoders must hold at least one encoder", "none")
        self._encoders, self._clock = tuple(encoders), clock or StageClock()
        cards = {
            e.device: card(e.device) for e in self._encoders if e.device.type == "cuda"
        }
        self._queues = {device: Queues(made) for device, made in cards.items()}
        on = (cards.get(e.device) for e in self._encoders)
        self._halving = [Halving(made.free_unused) if made else None for made in on]
        self._leave = _IN_FLIGHT - 1 if cards else 0  # batches that may stay under way
        self._under_way: deque[Any] = deque()
        self._copying: deque[tuple[TileBatch, list[Sent]]] = deque()

    def submit(
        self, batch: TileBatch, wanted: Sequence[Wanted] | None = None
    ) -> Iterator[Any]:
        """Encodes a batch as `wanted` of each encoder (None: embeddings); yields what is ready.
        The batch's buffer is released when all have taken it; at most this one is kept longer."""
        asked: Sequence[Wanted] = wanted or ["embeddings"] * len(self._encoders)
        with self._clock.timed("transfer_busy"):
            host = torch.from_numpy(batch.tiles)
            sent = {
                device: queues.send(host) for device, queues in self._queues.items()
            }
        self._copying.append((batch, list(sent.values())))
        with self._clock.timed("encode_busy"):
            found = [
                self._answer(i, sent, host, w) if w else None
                for i, w in enumerate(asked)
            ]
        self.release(leave=1 if sent else 0)
        halved = zip(self._encoders, self._halving, strict=True)
        told = [(e.label, h.at_once) for e, h in halved if h and h.at_once]
        notes = tuple(
            f"{label}: out of GPU memory, {n} tiles at once" for label, n in told
        )
        self._under_way.append(partial(self._fetch, batch, found, notes))
        yield from self._drain(self._leave)

    def mark(self, marker: Any) -> Iterator[Any]:
        """Passes a marker through the queue: it comes out after every batch submitted before it."""
        self._under_way.append(marker)
        yield from self._drain(self._leave)

    def flush(self) -> Iterator[Any]:
        """Yields all that is still under way."""
        self.release()
        yield from self._drain(0)

    def release(self, *, leave: int = 0) -> None:
        """Releases the buffers that were copied, and waits for those beyond `leave`."""
        while self._copying:
            batch, sent = self._copying[0]
            if len(self._copying) <= leave and not all(s.copied.query() for s in sent):
                return
            for each in sent:
                each.copied.synchronize()
            batch.release()
            self._copying.popleft()

    def _answer(
        self, place: int, sent: dict[torch.device, Sent], host: Tensor, what: Wanted
    ) -> Answer | Arrays:
        encoder, halving = self._encoders[place], self._halving[place]
        both = what == "tokens"
        encode = (
            encoder.encode_with_tokens
            if both
            else lambda tiles: (encoder.encode(tiles),)
        )
        if halving is None:
            return tuple(found.float().cpu().numpy() for found in encode(host))
        device = encoder.device
        return self._queues[device].answer(sent[device], partial(halving, encode))

    def _drain(self, leave: int) -> Iterator[Any]:
        while self._under_way:
            under_way = sum(isinstance(item, partial) for item in self._under_way)
            if isinstance(self._under_way[0], partial) and under_way <= leave:
                return
            item = self._under_way.popleft()
            yield item() if isinstance(item, partial) else item

    def _fetch(
        self,
        batch: TileBatch,
        answers: list[Answer | Arrays | None],
        notes: tuple[str, ...],
    ) -> EmbeddedBatch:
        """What the encoders answered, on the host."""
        with self._clock.timed("encode_busy"):
            on_host = [
                self._queues[encoder.device].fetch(found)
                if isinstance(found, Answer)
                else found
                for encoder, found in zip(self._encoders, answers, strict=True)
            ]
        first = tuple(found[0] if found else None for found in on_host)
        tokens = tuple(
            found[1] if found and len(found) > 1 else None for found in on_host
        )
        return EmbeddedBatch(
            batch.key, batch.indices, batch.coords_l0, first, tokens, notes
        )


def pinned_allocator(
    encoders: Sequence[TileEncoder],
) -> Callable[[tuple[int, ...]], RgbArray]:
    """Allocates batch buffers: page-locked where a device of the encoders copies asynchronously."""
    pin = any(encoder.device.type == "cuda" for encoder in encoders)
    empty = partial(torch.empty, dtype=torch.uint8, pin_memory=pin)
    return lambda shape: np.asarray(empty(shape).numpy())


def embed_tiles(
    slide: Slide,
    tiles: TileTable,
    encoder: TileEncoder,
    *,
    batch_size: int = 32,
    filters: Sequence[TileFilter] = (),
    config: StreamConfig | None = None,
) -> tuple[npt.NDArray[np.float32], TileTable]:
    """Embeddings float32 (N, D) of a slide's tiles, and the table of those N tiles.

    Args:
        slide, tiles, encoder: from `open_slide` (it stays open), `tile_grid` and `load_encoder`.
        filters: pixel filters; tiles that one refuses are left out.
        config: memory and decoding threads of the stream.

    Memory: the stream's budget, the encoder's activations, and 4 N D bytes for the result.
    Raises SlideReadError: a region cannot be decoded.
    """
    worker = BatchEncoder([encoder])
    made: list[EmbeddedBatch] = []
    for batch in iter_tiles(
        slide, tiles, batch_size=batch_size, filters=filters, config=config
    ):
        made += worker.submit(batch)
        worker.release()  # the stream takes each buffer back before it gives the next one
    made += worker.flush()
    indices = [np.arange(0), *(each.indices for each in made)]
    found = [part for each in made for part in each.tile_embeddings if part is not None]
    embeddings = np.concatenate([np.empty((0, encoder.dim), dtype=np.float32), *found])
    return embeddings, tiles.select(np.concatenate(indices))
