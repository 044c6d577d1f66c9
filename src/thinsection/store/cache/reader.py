"""`FeatureCache`: features of N images on disk, read back in bounded memory."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from thinsection.errors import BudgetError, InvalidInputError
from thinsection.store.cache import format as fmt
from thinsection.store.cache.dtypes import F32
from thinsection.store.cache.format import CacheKey, Shape
from thinsection.store.cache.rows import RowNumbers, StoredRows
from thinsection.types import GIB, Closing, format_bytes

if TYPE_CHECKING:
    import torch

DEFAULT_BUDGET_BYTES = 1 * GIB
# Batches that are read ahead, where the budget holds them.
PREFETCH = 2


class FeatureCache(Closing):
    """A finished cache. Use as a context manager, or close it.

    Where the file and two batches fit into the budget, the file is read once into RAM and
    stays; else a batch is read from disk into one of a few reused buffers while the one
    before is in use. Every value comes back as the float32 that was written (unless a
    lossy dtype was forced).

    A forked child (a DataLoader's worker) may use the cache of its parent: it reads with
    a thread and buffers of its own.

    Memory: budget_bytes, whatever N; and 9 N bytes of checksums and checked rows.
    """

    def __init__(
        self, folder: Path, *, budget_bytes: int = DEFAULT_BUDGET_BYTES
    ) -> None:
        self.folder = Path(folder)
        self.manifest = fmt.read_manifest(self.folder)
        self.shape = self.manifest.shape  # (N, ...)
        self._budget = budget_bytes
        self._busy = False
        self._rows = StoredRows(
            self.folder,
            self.manifest.chunks,
            self.shape,
            size=self.manifest.data_bytes,
        )
        self._thread = _reading_thread()
        # the process that the thread runs in
        self._process = os.getpid()
        self._buffers: list[torch.Tensor] = []

    @classmethod
    def find(
        cls, root: Path, key: CacheKey, *, budget_bytes: int = DEFAULT_BUDGET_BYTES
    ) -> Self | None:
        """Opens the finished cache of a key; None where there is none.

        Raises:
            StoreError: it is there and damaged.
        """
        folder = Path(root) / key.folder_name
        if not (folder / fmt.MANIFEST).exists():
            return None
        return cls(folder, budget_bytes=budget_bytes)

    @property
    def in_ram(self) -> bool:
        """True where the whole file is held; decided when batches are first asked for."""
        return self._rows.held is not None

    @property
    def prefetch(self) -> int:
        """Batches that are read ahead; 0 before batches are asked for."""
        return max(0, len(self._buffers) - 1)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: npt.ArrayLike) -> F32:
        """Reads rows into a new float32 array (B, ...), in the given order.

        Memory: the result and half of a run, max(1 MiB, one row) / 2, beyond the budget.

        Raises:
            InvalidInputError: a row is not there.
            StoreError: the file is truncated or damaged.
        """
        numbers = _as_row_numbers(rows)
        out = np.empty((len(numbers), *self.shape[1:]), dtype=np.float32)
        self._rows.fill(numbers, out)
        return out

    def batches(
        self,
        order: npt.ArrayLike,
        batch_size: int,
        *,
        device: "str | torch.device" = "cpu",
    ) -> Iterator["torch.Tensor"]:
        """Reads rows in an order as float32 tensors (B, ...); the last may be smaller.

        A tensor on the CPU is valid until the next one is asked for: its buffer is used
        again.

        Raises:
            InvalidInputError: a row is not there, or another iteration is under way.
            StoreError: the file is truncated or damaged.
            BudgetError: the budget does not hold one batch.
        """
        import torch

        self._renew_after_fork()
        rows = _as_row_numbers(order)
        target = torch.device(device)
        if batch_size < 1:
            raise InvalidInputError(f"batch_size must be >= 1, got {batch_size}")
        if self._busy:
            raise InvalidInputError(
                "batches must be read one iteration at a time, got a second one; "
                "close the first"
            )
        size = min(batch_size, len(self))
        self._prepare((size, *self.shape[1:]), pinned=target.type == "cuda")
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        self._busy = True
        try:
            yield from prefetched(
                parts, self._buffers, self._rows.fill, self._thread, target
            )
        finally:
            self._busy = False

    def damaged_rows(self) -> list[int]:
        """Every row whose checksum does not hold, in order.

        Memory: one row.
        """
        return self._rows.damaged()

    def close(self) -> None:
        """Stops the thread, lets go of buffers and file."""
        self._renew_after_fork()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._buffers = []
        self._rows.close()

    def _renew_after_fork(self) -> None:
        """Replaces state that is the parent's: thread, page-locked buffers, iteration."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._thread = _reading_thread()
        self._buffers = []
        self._busy = False

    def _prepare(self, shape: Shape, *, pinned: bool) -> None:
        """Makes buffers of one batch each, within the budget; page-locked for a GPU."""
        import torch

        for buffer in self._buffers:
            if buffer.shape == shape and buffer.is_pinned() == pinned:
                return  # those of the last iteration
        batch_bytes = math.prod(shape) * 4
        scratch = self._rows.scratch_bytes(shape[0])
        data = self.manifest.data_bytes
        # first, so that old buffers and what takes their place never exist together
        self._buffers = []
        self._rows.hold(data + 2 * batch_bytes + scratch <= self._budget)
        free = self._budget - scratch - (data if self.in_ram else 0)
        count = min(1 + PREFETCH, free // batch_bytes)
        if count < 1:
            raise BudgetError(
                f"cache_memory must be >= {format_bytes(batch_bytes + scratch)} for a batch of "
                f"{shape[0]} rows, got {format_bytes(self._budget)}; raise --cache-memory "
                "(twice that reads ahead)"
            )
        self._buffers = [
            torch.empty(shape, dtype=torch.float32, pin_memory=pinned)
            for _ in range(count)
        ]


def _reading_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="cache-reader")


def prefetched(
    parts: Sequence[RowNumbers],
    buffers: Sequence["torch.Tensor"],
    fill: Callable[[RowNumbers, F32], None],
    thread: ThreadPoolExecutor,
    device: "torch.device",
) -> Iterator["torch.Tensor"]:
    """Yields batches in order, one in each buffer, filled ahead.

    An error of `fill` is raised at its batch.

    Memory: the buffers; on CUDA besides, a batch on the device for each that is in use.
    """
    import torch

    process = os.getpid()
    ahead: deque[tuple[int, Future[torch.Tensor]]] = deque()
    waiting = iter(parts)
    # the copy to the device that last read a buffer must end before it is filled again
    copies: list[torch.cuda.Event | None] = [None] * len(buffers)

    def fill_buffer(slot: int, rows: RowNumbers) -> torch.Tensor:
        copy = copies[slot]
        if copy is not None:
            copy.synchronize()
        batch = buffers[slot][: len(rows)]
        fill(rows, batch.numpy())
        return batch

    def submit_next(slot: int) -> None:
        rows = next(waiting, None)
        if rows is not None:
            ahead.append((slot, thread.submit(fill_buffer, slot, rows)))

    try:
        for slot in range(len(buffers)):
            submit_next(slot)
        while ahead:
            slot, future = ahead.popleft()
            batch = future.result().to(device, non_blocking=device.type == "cuda")
            if device.type == "cuda":
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                torch.cuda.current_stream(device).record_event(event)
                copies[slot] = event
            # on a CPU it is the buffer itself
            yield batch
            if os.getpid() != process:
                raise InvalidInputError(
                    "batches must be read in the process that started them, got a forked "
                    "child; call batches() there again"
                )
            submit_next(slot)
    finally:
        # nobody may write to a buffer after this; in a forked child nobody does
        if os.getpid() == process:
            wait([future for _, future in ahead if not future.cancel()])
            for copy in copies:
                if copy is not None:
                    copy.synchronize()


def _as_row_numbers(rows: npt.ArrayLike) -> RowNumbers:
    numbers = np.asarray(rows)
    is_whole = not numbers.size or numbers.dtype.kind in "iu"
    if numbers.ndim != 1 or not is_whole:
        raise InvalidInputError(
            f"rows must be integers of shape (B,), got {numbers.dtype} {numbers.shape}"
        )
    return numbers.astype(np.int64)
