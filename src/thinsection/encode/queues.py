"""A GPU's three queues: copy in, compute, copy out; events put them in order, the host waits last.

    host buffer --[in]--> tiles --[compute]--> answers --[out]--> page-locked ring --> arrays
                   k+1              k                     k-1

What a queue uses stays referenced until the host has seen the last event of its batch, so that the
allocator hands no memory on that another queue still reads.
"""

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
EncodeInParts = Callable[[Tensor], Sequence[tuple[Tensor, ...]]]  # the answers of rows in order


class Event(Protocol):
    """A place in a queue."""

    def query(self) -> bool:
        """Whether the queue has passed it."""

    def synchronize(self) -> None:
        """Waits until it has."""


class Card:
    """What the loop asks of a CUDA device; tests hand in one whose queues have simulated times."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Any:
        """A new queue, behind all that was queued on the device's current one."""
        made = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        made.wait_stream(torch.cuda.current_stream(self.device))  # the weights' way to the device
        return made

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is called in the block goes into this queue."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Event:
        """An event at the queue's end."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
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

    Memory: of the host, the answers of the batches under way; of the device, their tiles too.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._into, self._compute, self._out = (card.stream() for _ in range(3))
        self._free: list[Tensor] = []

    def send(self, host: Tensor) -> Sent:
        """Queues the copy of a host buffer, which may be used again after `copied`."""
        with self._card.on(self._into):
            tiles = self._card.to_device(host)
        return Sent(tiles, self._card.record(self._into))

    def answer(self, sent: Sent, encode: EncodeInParts) -> Answer:
        """Queues the computing behind the copy, and the way back behind the computing."""
        card = self._card
        card.wait(self._compute, sent.copied)
        with card.on(self._compute):
            parts = encode(sent.tiles)
        card.wait(self._out, card.record(self._compute))
        count = len(sent.tiles)
        shapes = [torch.Size((count, *part.shape[1:])) for part in parts[0]]
        buffers = [self._taken(shape.numel()) for shape in shapes]
        with card.on(self._out):
            for number, (buffer, shape) in enumerate(zip(buffers, shapes, strict=True)):
                whole, start = buffer[: shape.numel()].view(shape), 0
                for part in parts:
                    rows = slice(start, start + len(part[number]))
                    card.to_host(part[number], whole[rows])
                    start = rows.stop
        return Answer(buffers, shapes, card.record(self._out), [sent, parts])

    def fetch(self, answer: Answer) -> Arrays:
        """Waits for the way back; what it brought, and its buffers are free again."""
        answer.fetched.synchronize()
        answer.held.clear()
        found = tuple(
            buffer[: shape.numel()].view(shape).numpy().copy()
            for buffer, shape in zip(answer.buffers, answer.shapes, strict=True)
        )
        self._free += answer.buffers
        return found

    def _taken(self, numbers: int) -> Tensor:
        """The smallest free buffer that is large enough; a new one takes the largest one's place.

        To lock pages takes the driver long, so it is done for the first batches only.
        """
        self._free.sort(key=Tensor.numel)
        for place, buffer in enumerate(self._free):
            if buffer.numel() >= numbers:
                return self._free.pop(place)
        del self._free[-1:]
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
        """The answers of each part, in order.

        Raises:
            torch.OutOfMemoryError: a single tile does not fit.
        """
        while True:
            step = min(self.at_once or len(tiles), len(tiles))
            found = _tried(encode, tiles, step)
            if found is not None:
                return found
            self.at_once = -(-step // 2)
            self._free_unused()  # here, not in the handler: its traceback holds what was computed


def _tried(encode: Encode, tiles: Tensor, step: int) -> list[tuple[Tensor, ...]] | None:
    try:
        return [encode(tiles[start : start + step]) for start in range(0, len(tiles), step)]
    except torch.OutOfMemoryError:
        if step <= 1:
            raise
        return None
