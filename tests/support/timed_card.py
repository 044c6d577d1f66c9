"""A GPU made of clocks: queues whose work takes simulated time and is done when that has passed.

Nothing is computed when it is called for. Each operation waits for its queue and for the events
that the queue was told to wait for, and touches memory only at its simulated end: who reads too
early, reuses a buffer too soon or forgets an event gets wrong numbers. Who lets go of memory that
an operation still needs gets an AssertionError, as a caching allocator would hand it on.
"""

import contextlib
import ctypes
import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(eq=False)
class Stream:
    name: str
    free_at: float = 0.0
    spans: list[tuple[float, float]] = field(
        default_factory=list
    )  # start and end of operations


@dataclass(eq=False)
class Event:
    card: "TimedCard"
    stream: Stream
    time: float
    for_host: bool

    def query(self) -> bool:
        self.card.catch_up()
        return self.card.now >= self.time

    def synchronize(self) -> None:
        assert self.for_host, "the host would spin while it waits for this event"
        self.card.waits.append((self.stream.name, self.card.now, self.time))
        self.card.now = max(self.card.now, self.time)
        self.card.catch_up()


class TimedCard:
    """Simulated `CudaDevice`: a copy in, a copy out and each operation take given seconds."""

    def __init__(self, *, copy_in_s: float = 0.5, copy_out_s: float = 0.25) -> None:
        self.copy_in_s, self.copy_out_s = copy_in_s, copy_out_s
        self.now = 0.0
        self.streams: list[Stream] = []
        self.waits: list[
            tuple[str, float, float]
        ] = []  # queue, from, to: when the host waited
        self.num_pinned = 0
        self._current = Stream("none")
        self._memory: list[
            np.ndarray
        ] = []  # stays mapped: an address is never given out twice
        self._order = itertools.count()
        self._left: list[tuple[float, int, Callable[[], None]]] = []

    def stream(self) -> Stream:
        names = ("in", "compute", "out")
        self.streams.append(Stream(names[len(self.streams) % 3]))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def record(self, stream: Stream, *, for_host: bool) -> Event:
        return Event(self, stream, stream.free_at, for_host)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.free_at = max(stream.free_at, event.time)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        target = self.empty(tuple(host.shape), host.dtype)
        source = _in_place(host)  # a buffer of the stream's, which keeps it
        self.run(self.copy_in_s, lambda array: np.copyto(array, source), target)
        return target

    def to_host(self, found: torch.Tensor, pinned: torch.Tensor) -> None:
        self.run(self.copy_out_s, np.copyto, pinned, found)

    def pinned(self, numbers: int) -> torch.Tensor:
        self.num_pinned += 1
        return self.empty((numbers,), torch.float32)

    def free_unused(self) -> None:
        """Nothing is cached."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory full of what no result may hold."""
        fill = 99 if dtype == torch.uint8 else float("nan")
        self._memory.append(torch.full(shape, fill, dtype=dtype).numpy())
        return torch.from_numpy(self._memory[-1])

    def run(
        self, seconds: float, operation: Callable[..., Any], *tensors: torch.Tensor
    ) -> None:
        """Queues an operation on arrays that lie where these tensors do; the host goes on."""
        stream = self._current
        start = max(self.now, stream.free_at)
        stream.free_at = start + seconds
        stream.spans.append((start, stream.free_at))
        alive = [StorageWeakRef(t.untyped_storage()) for t in tensors]
        arrays = [_in_place(t) for t in tensors]

        def work() -> None:
            freed = [ref.expired() for ref in alive]
            assert not any(freed), (
                f"memory was freed before {stream.name!r} was done with it"
            )
            operation(*arrays)

        heapq.heappush(self._left, (stream.free_at, next(self._order), work))

    def catch_up(self) -> None:
        """Does all that has ended by now."""
        while self._left and self._left[0][0] <= self.now:
            heapq.heappop(self._left)[2]()


def _in_place(tensor: torch.Tensor) -> np.ndarray:
    """An array of the tensor's memory that does not keep it."""
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    assert tensor.is_contiguous()
    raw = (ctypes.c_char * (tensor.numel() * dtype.itemsize)).from_address(
        tensor.data_ptr()
    )
    return np.frombuffer(raw, dtype).reshape(tensor.shape)
