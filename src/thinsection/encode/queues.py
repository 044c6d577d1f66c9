"""Three queues of a GPU: batches travel in, are encoded and travel back side by side.

Events put the queues in order, the host waits last:

    host buffer --[in]--> tiles --[compute]--> answers --[out]--> page-locked ring --> arrays
                   k+1              k                     k-1

Tensors that a queue uses stay referenced until the host has seen the last event of their batch, so
that the allocator hands no memory on that another queue still reads.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Arrays = tuple[npt.NDArray[np.float32], ...]
Encode = Callable[[Tensor], tuple[Tensor, ...]]  # tiles to answers, row by row
# tiles to the answers of consecutive parts of them
EncodeInParts = Callable[[Tensor], Sequence[tuple[Tensor, ...]]]
Stream = Any  # a queue: torch.cuda's, or a simulated one


class Event(Protocol):
    """A place in a queue."""

    def query(self) -> bool:
        """True where the queue has passed it."""

    def synchronize(self) -> None:
        """Wait until the queue has passed it."""


class Card:
    """Operations of a CUDA device; tests hand in one whose queues have simulated times."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Stream:
        """A new queue, behind all that was queued on the device's current one."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # on which the weights travel to the device
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context whose operations go into this queue."""
        return torch.cuda.stream(stream)

    def record(self, stream: Stream, *, for_host: bool) -> Event:
        """An event at the queue's end.

        `for_host`: the host will wait for it, and sleeps then, where it would else spin and take
        a core from the decode workers.
        """
        event: Event = torch.cuda.Event(blocking=for_host)  # type: ignore[no-untyped-call]
        event.record(stream)  # type: ignore[attr-defined]
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Let the queue go on when the event has passed; the host does not wait."""
        stream.wait_event(event)

    def to_device(self, host: Tensor) -> Tensor:
        """A copy on the device, by the current queue; `host` is page-locked, or the host waits."""
        return host.to(self.device, non_blocking=True)

    def to_host(self, answer: Tensor, pinned: Tensor) -> None:
        """Copy an answer into a page-locked buffer, by the current queue."""
        pinned.copy_(answer, non_blocking=True)

    def pinned(self, numbers: int) -> Tensor:
        """A page-locked float32 buffer."""
        return torch.empty(numbers, dtype=torch.float32, pin_memory=True)

    def free_unused(self) -> None:
        """Give memory that no tensor holds back to the device."""
        torch.cuda.empty_cache()


@dataclass(frozen=True, eq=False)
class Sent:
    """Tiles on their way to the device."""

    tiles: Tensor
    copied: Event


@dataclass(eq=False)
class Answer:
    """Answer of an encoder to a batch, on its way back: a buffer and a shape for each tensor."""

    buffers: list[Tensor]
    shapes: list[torch.Size]
    fetched: Event
    held: list[object] = field(repr=False)  # the device's tensors, until `fetched`


class Queues:
    """The three queues of one device and the page-locked ring of its answers.

    Memory: of the host, the answers of the batches under way; of the device, their tiles too.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._into = card.stream()
        self._compute = card.stream()
        self._out = card.stream()
        self._free: list[Tensor] = []

    def send(self, host: Tensor) -> Sent:
        """Queue the copy of a host buffer, which may be used again after `copied`."""
        with self._card.on(self._into):
            tiles = self._card.to_device(host)
        return Sent(tiles, self._card.record(self._into, for_host=True))

    def answer(self, sent: Sent, encode: EncodeInParts) -> Answer:
        """Queue the computing behind the copy, and the way back behind the computing."""
        card = self._card
        card.wait(self._compute, sent.copied)
        with card.on(self._compute):
            parts = encode(sent.tiles)
        card.wait(self._out, card.record(self._compute, for_host=False))
        shapes = [torch.Size((len(sent.tiles), *x.shape[1:])) for x in parts[0]]
        buffers = [self._take_buffer(shape.numel()) for shape in shapes]
        with card.on(self._out):
            for number, shape in enumerate(shapes):
                whole = buffers[number][: shape.numel()].view(shape)
                start = 0
                for part in parts:
                    rows = part[number]
                    card.to_host(rows, whole[start : start + len(rows)])
                    start += len(rows)
        fetched = card.record(self._out, for_host=True)
        return Answer(buffers, shapes, fetched, held=[sent, parts])

    def fetch(self, answer: Answer) -> Arrays:
        """Wait for the way back; returns the answer, and its buffers are free again."""
        answer.fetched.synchronize()
        answer.held.clear()
        self._free += answer.buffers
        return tuple(
            buffer[: shape.numel()].view(shape).numpy().copy()
            for buffer, shape in zip(answer.buffers, answer.shapes, strict=True)
        )

    def _take_buffer(self, numbers: int) -> Tensor:
        """The smallest free buffer that is large enough; a new one takes the largest's place."""
        self._free.sort(key=Tensor.numel)
        place = bisect_left(self._free, numbers, key=Tensor.numel)
        if place < len(self._free):
            return self._free.pop(place)
        # to lock pages takes long: it is done for the first batches only
        if self._free:
            self._free.pop()
        return self._card.pinned(numbers)


class Halving:
    """Batches that may turn out too large for the device: halved until one fits.

    A size that did not fit is not tried again: `at_once` stays for the batches that follow. Rows
    stay in order; their last bits may be those of the smaller batch.
    """

    def __init__(self, free_unused: Callable[[], None]) -> None:
        self._free_unused = free_unused
        self.at_once: int | None = None  # tiles; None: all of a batch

    def encode(self, encode: Encode, tiles: Tensor) -> list[tuple[Tensor, ...]]:
        """Answers of each part, in order; an OutOfMemoryError if a single tile does not fit."""
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
            # here, not in the handler: its traceback holds what was computed
            self._free_unused()
