"""Batches ahead of their use: a ring of reused buffers, filled by threads, handed out in order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Rows = npt.NDArray[np.int64]
Fill = Callable[[Rows, npt.NDArray[np.float32]], None]


class BufferRing:
    """`depth` buffers of one batch each, page-locked where they feed a CUDA device.

    Attributes:
        device: where batches go.

    Memory: depth * batch on the host; on CUDA one batch on the device for each that is in use.
    """

    def __init__(self, shape: tuple[int, ...], depth: int, device: "torch.device") -> None:
        import torch

        self.device, self.depth, self.shape = device, depth, shape
        pinned = device.type == "cuda"
        self._buffers = [
            torch.empty(shape, dtype=torch.float32, pin_memory=pinned) for _ in range(depth)
        ]
        # the copy to the device that last read a buffer: it must end before the buffer is filled
        self._copied: list[Any] = [None] * depth

    def fill(self, slot: int, rows: Rows, fill: Fill) -> "torch.Tensor":
        """The rows in that buffer, on the host."""
        if self._copied[slot] is not None:
            self._copied[slot].synchronize()
        buffer = self._buffers[slot][: len(rows)]
        fill(rows, buffer.numpy())
        return buffer

    def hand_out(self, slot: int, batch: "torch.Tensor") -> "torch.Tensor":
        """The batch on its device; on a CPU it is the buffer itself."""
        if self.device.type == "cpu":
            return batch
        if self.device.type != "cuda":
            return batch.to(self.device)
        import torch

        moved = batch.to(self.device, non_blocking=True)
        self._copied[slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied[slot].record(torch.cuda.current_stream(self.device))
        return moved


def prefetched(
    batches: Sequence[Rows], ring: BufferRing, threads: ThreadPoolExecutor | None, fill: Fill
) -> Iterator["torch.Tensor"]:
    """The batches in order. A yielded tensor is valid until the next one is asked for.

    Args:
        batches: rows of each.
        ring: `ring.depth` - 1 batches are read ahead.
        threads: who fills; None: the caller, when a batch is asked for.
        fill: reads rows to a buffer.

    Raises:
        Whatever `fill` raises, at the batch that it concerns.
    """
    if threads is None:
        for rows in batches:
            yield ring.hand_out(0, ring.fill(0, rows, fill))
        return
    ahead: deque[tuple[int, Future[torch.Tensor]]] = deque()
    waiting = iter(batches)

    def submit(slot: int) -> None:
        rows = next(waiting, None)
        if rows is not None:
            ahead.append((slot, threads.submit(ring.fill, slot, rows, fill)))

    try:
        for slot in range(ring.depth):
            submit(slot)
        while ahead:
            slot, future = ahead.popleft()
            yield ring.hand_out(slot, future.result())
            submit(slot)
    finally:
        for _, future in ahead:
            future.cancel()
        for _, future in ahead:
            if not future.cancelled():
                future.exception()  # waits: nobody may write to a buffer after this
