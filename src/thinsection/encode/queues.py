"""Three CUDA streams of a GPU: copy in, encode and copy back run at the same time.

Here a CUDA stream is called a queue, because the package calls its flow of decoded tiles the
stream. Events put the queues in order; only the host waits, at the end:

    host buffer --[in]--> tiles --[compute]--> results --[out]--> page-locked ring --> arrays
                   k+1              k                     k-1

Tensors that a queue uses stay referenced until the host has seen the last event of their batch.
Otherwise the allocator could reuse memory that another queue still reads.
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
Encode = Callable[[Tensor], tuple[Tensor, ...]]  # tiles to results, row by row
# tiles to the results of consecutive parts
EncodeInParts = Callable[[Tensor], Sequence[tuple[Tensor, ...]]]
Stream = Any  # a queue: from torch.cuda, or simulated


class Event(Protocol):
    """Position in a queue."""

    def query(self) -> bool:
        """True if the queue has passed it."""

    def synchronize(self) -> None:
        """Wait until the queue has passed it."""


class CudaDevice:
    """Operations of a CUDA device; tests use a substitute with simulated times."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Stream:
        """New queue, which starts after all work in the device's current queue."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # the queue that copies the weights to the device
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Context whose operations are added to this queue."""
        return torch.cuda.stream(stream)

    def record(self, stream: Stream, *, for_host: bool) -> Event:
        """Event at the queue's end.

        `for_host`: the host will wait for it. It then sleeps, as otherwise it would spin and take
        a core from the decode threads.
        """
        event: Event = torch.cuda.Event(blocking=for_host)  # type: ignore[no-untyped-call]
        event.record(stream)  # type: ignore[attr-defined]
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Make the queue wait until the event has passed; the host does not wait."""
        stream.wait_event(event)

    def to_device(self, host: Tensor) -> Tensor:
        """Copy on the device, in the current queue; the host waits unless `host` is page-locked."""
        return host.to(self.device, non_blocking=True)

    def to_host(self, result: Tensor, pinned: Tensor) -> None:
        """Copy a result into a page-locked buffer, in the current queue."""
        pinned.copy_(result, non_blocking=True)

    def pinned(self, numbers: int) -> Tensor:
        """Page-locked float32 buffer."""
        return torch.empty(numbers, dtype=torch.float32, pin_memory=True)

    def free_unused(self) -> None:
        """Return unused memory to the device."""
        torch.cuda.empty_cache()


@dataclass(frozen=True, eq=False)
class Sent:
    """Tiles in transfer to the device."""

    tiles: Tensor
    copied: Event  # the copy has ended


@dataclass(eq=False)
class PendingResult:
    """Result of an encoder for a batch, in transfer: a buffer and a shape for each tensor."""

    buffers: list[Tensor]
    shapes: list[torch.Size]
    # the device's tensors, until `fetched`
    fetched: Event
    held: list[object] = field(repr=False)


class DeviceStreams:
    """Three queues of one device and the page-locked ring buffer for its results.

    Memory: on the host, the results of batches in progress; on the device, also their tiles.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._into = device.stream()
        self._compute = device.stream()
        self._out = device.stream()
        self._free: list[Tensor] = []

    def send(self, host: Tensor) -> Sent:
        """Queue the copy of a host buffer, which may be reused after `copied`."""
        with self.device.on(self._into):
            tiles = self.device.to_device(host)
        return Sent(tiles, self.device.record(self._into, for_host=True))

    def encode(self, sent: Sent, encode_in_parts: EncodeInParts) -> PendingResult:
        """Queue the computation after the copy, and the copy back after the computation."""
        device = self.device
        device.wait(self._compute, sent.copied)
        with device.on(self._compute):
            parts = encode_in_parts(sent.tiles)
        device.wait(self._out, device.record(self._compute, for_host=False))
        shapes = [torch.Size((len(sent.tiles), *x.shape[1:])) for x in parts[0]]
        buffers = [self._take_buffer(shape.numel()) for shape in shapes]
        with device.on(self._out):
            for number, shape in enumerate(shapes):
                whole = buffers[number][: shape.numel()].view(shape)
                start = 0
                for part in parts:
                    rows = part[number]
                    device.to_host(rows, whole[start : start + len(rows)])
                    start += len(rows)
        fetched = device.record(self._out, for_host=True)
        return PendingResult(buffers, shapes, fetched, held=[sent, parts])

    def fetch(self, pending: PendingResult) -> Arrays:
        """Wait for the copy back; returns the result, and its buffers become free."""
        pending.fetched.synchronize()
        pending.held.clear()
        self._free += pending.buffers
        return tuple(
            buffer[: shape.numel()].view(shape).numpy().copy()
            for buffer, shape in zip(pending.buffers, pending.shapes, strict=True)
        )

    def _take_buffer(self, numbers: int) -> Tensor:
        """Smallest free buffer that is large enough; otherwise a new one replaces the largest."""
        self._free.sort(key=Tensor.numel)
        place = bisect_left(self._free, numbers, key=Tensor.numel)
        if place < len(self._free):
            return self._free.pop(place)
        # locking pages is slow, so it is done only for the first batches
        if self._free:
            self._free.pop()
        return self.device.pinned(numbers)


class Halving:
    """Halves batches that are too large for the device until one fits.

    A size that failed is not tried again: `at_once` stays for the following batches. Rows stay in
    order; their last bits may be those of the smaller batch.
    """

    def __init__(self, free_unused: Callable[[], None]) -> None:
        self._free_unused = free_unused
        self.at_once: int | None = None  # tiles per part; None for all of a batch

    def encode(self, encode: Encode, tiles: Tensor) -> list[tuple[Tensor, ...]]:
        """Results of each part, in order; OutOfMemoryError if a single tile does not fit."""
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
            # not inside the handler, since its traceback references the computed tensors
            self._free_unused()
