"""`FeatureCache`: features of N images on disk, read in bounded memory."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from thinsection.errors import (
    BudgetError,
    CopyError,
    InvalidInputError,
    StoreError,
    ThinsectionError,
)
from thinsection.store.cache import format as fmt
from thinsection.store.cache.dtypes import F32
from thinsection.store.cache.format import CacheKey, Shape
from thinsection.store.cache.rows import RowNumbers, StoredRows
from thinsection.types import GIB, MIB, Closing, format_bytes, shortened

if TYPE_CHECKING:
    import torch

DEFAULT_BUDGET_BYTES = 1 * GIB
# Buffers that are filled ahead, if the budget allows it.
PREFETCH = 2
# Small batches are read together up to this number of bytes, because a task costs a thread 50 µs.
TASK_BYTES = 8 * MIB


# batches of a task before the first error, and this error
_Filled: TypeAlias = "tuple[Sequence[torch.Tensor], ThinsectionError | None]"


class FeatureCache(Closing):
    """A finished cache. Use as a context manager, or close it.

    If the file and two batches fit into the budget, the file is read into RAM once. Otherwise each
    batch is read from disk into one of a few reused buffers while the previous batch is in use.
    Every value is returned as the float32 that was written (unless a lossy dtype was forced).

    A forked child (a DataLoader's worker) may use its parent's cache: it reads with its own thread
    and buffers. A copy or a pickle opens the same folder again, and raises StoreError if another
    cache lies there.

    Memory: budget_bytes for any N, and 13 N bytes for checksums and the list of checked rows.
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
        # process in which the thread runs
        self._process = os.getpid()
        self._buffers: list[torch.Tensor] = []
        # batch shape and page-locking for which the buffers were made
        self._request: tuple[Shape, bool] = ((), False)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles the cache as its folder, its budget and its checksum."""
        if not self._rows.is_open:
            raise CopyError(
                f"cache must be open to be copied or pickled, got {self!r}; open it again"
            )
        folder = str(self.folder.absolute())
        return _open_again, (type(self), folder, self._budget, _checksum(self))

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        place = "in RAM" if self.in_ram else format_bytes(self.manifest.data_bytes)
        if not self._rows.is_open:
            place = "closed"
        return f"FeatureCache({shape}, {place}, {shortened([self.folder.name])!r})"

    @classmethod
    def find(
        cls, root: Path, key: CacheKey, *, budget_bytes: int = DEFAULT_BUDGET_BYTES
    ) -> Self | None:
        """Opens the finished cache of a key; None if there is none, so check before `with`.

        Raises:
            StoreError: the cache is damaged.
        """
        folder = Path(root) / key.folder_name
        if not (folder / fmt.MANIFEST).exists():
            return None
        return cls(folder, budget_bytes=budget_bytes)

    @property
    def in_ram(self) -> bool:
        """True if the whole file is in RAM; this is decided when batches are first requested."""
        return self._rows.held is not None

    @property
    def prefetch(self) -> int:
        """Number of buffers that are filled ahead; 0 before batches are requested."""
        return max(0, len(self._buffers) - 1)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice | npt.NDArray[np.integer]) -> F32:
        """Returns one row (...), or several (B, ...), in float32.

        Raises:
            IndexError: there is no such row.
        """
        if isinstance(rows, int | np.integer):
            return np.asarray(self.read([range(len(self))[rows]])[0])
        return self.read(np.arange(len(self))[rows])

    def read(self, rows: npt.ArrayLike) -> F32:
        """Reads rows into a new float32 array (B, ...), in the given order.

        Memory: beyond the budget, the result and max(1 MiB, one row) / 2 for rows read together.

        Raises:
            InvalidInputError: a row does not exist.
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
        """Reads rows in the given order as float32 tensors (B, ...); the last may be smaller.

        A tensor on the CPU is valid until the next one is requested, because its buffer is reused.

        Raises:
            InvalidInputError: a row does not exist, or another iteration is in progress.
            StoreError: the file is truncated or damaged.
            BudgetError: the budget is smaller than one batch.
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
        step = len(self._buffers[0])
        tasks = [rows[start : start + step] for start in range(0, len(rows), step)]
        self._busy = True
        try:
            yield from prefetched(
                tasks,
                self._rows.fill,
                batch_size=size,
                buffers=self._buffers,
                thread=self._thread,
                device=target,
            )
        finally:
            self._busy = False

    def damaged_rows(self) -> list[int]:
        """All rows whose checksum is wrong, in order.

        Memory: one row.
        """
        return self._rows.damaged()

    def close(self) -> None:
        """Stops the thread, and releases the buffers and the file."""
        self._renew_after_fork()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._buffers = []
        self._rows.close()

    def _renew_after_fork(self) -> None:
        """Replaces state that belongs to the parent: thread, page-locked buffers, iteration."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._thread = _reading_thread()
        self._buffers = []
        self._busy = False

    def _prepare(self, shape: Shape, *, pinned: bool) -> None:
        """Makes buffers of one or more batches within the budget; page-locked for a GPU."""
        import torch

        request = (shape, pinned)
        if self._buffers and self._request == request:
            return  # the buffers of the last iteration fit
        batch_bytes = math.prod(shape) * 4
        scratch = self._rows.scratch_bytes(shape[0])
        data = self.manifest.data_bytes
        # old buffers are released first, so that old and new ones never exist together
        self._buffers = []
        self._rows.hold(data + 2 * batch_bytes + scratch <= self._budget)
        free = self._budget - (data if self.in_ram else 0)
        count = min(1 + PREFETCH, (free - scratch) // batch_bytes)
        if count < 1:
            raise BudgetError(
                f"cache_memory must be >= {format_bytes(batch_bytes + scratch)} for a batch of "
                f"{shape[0]} rows, got {format_bytes(self._budget)}; raise cache_memory=... "
                "(twice that reads ahead)"
            )
        num_batches = max(1, TASK_BYTES // batch_bytes)
        scratch = self._rows.scratch_bytes(shape[0] * num_batches)
        num_batches = min(
            num_batches, max(1, (free - scratch) // (count * batch_bytes))
        )
        rows = min(shape[0] * num_batches, -(-len(self) // shape[0]) * shape[0])
        self._request = request
        self._buffers = [
            torch.empty((rows, *shape[1:]), dtype=torch.float32, pin_memory=pinned)
            for _ in range(count)
        ]


def _checksum(cache: FeatureCache) -> str:
    """Checksum of the manifest, in which are the checksums of all rows."""
    return str(cache.manifest.as_mapping()["crc32"])


def _open_again(
    kind: type[FeatureCache], folder: str, budget_bytes: int, checksum: str
) -> FeatureCache:
    """Opens the folder of a cache that was copied or pickled.

    Raises:
        StoreError: another cache lies there.
    """
    cache = kind(Path(folder), budget_bytes=budget_bytes)
    if _checksum(cache) != checksum:
        cache.close()
        raise StoreError(
            f"cache must be the one that was opened, got another in {folder!r}; open it again"
        )
    return cache


def _reading_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="cache-reader")


def prefetched(
    tasks: Sequence[RowNumbers],
    fill: Callable[[RowNumbers, F32], None],
    *,
    batch_size: int,
    buffers: Sequence["torch.Tensor"],
    thread: ThreadPoolExecutor,
    device: "torch.device",
) -> Iterator["torch.Tensor"]:
    """Yields batches in order; for each task, rows are read ahead into one of the buffers.

    An error of `fill` is raised when its batch is due.

    Memory: the buffers; with CUDA also one batch on the device for each batch in use.
    """
    import torch

    process = os.getpid()
    ahead: deque[tuple[int, Future[_Filled]]] = deque()
    waiting = iter(tasks)
    # the last copy from a buffer to the device must end before the buffer is filled again
    copies: list[torch.cuda.Event | None] = [None] * len(buffers)

    def fill_buffer(slot: int, rows: RowNumbers) -> "_Filled":
        copy = copies[slot]
        if copy is not None:
            copy.synchronize()
        target = buffers[slot][: len(rows)]
        batches = target.split(batch_size)  # type: ignore[no-untyped-call]
        return _fill_batches(rows, batches, target, fill)

    def submit_next(slot: int) -> None:
        rows = next(waiting, None)
        if rows is not None:
            ahead.append((slot, thread.submit(fill_buffer, slot, rows)))

    try:
        for slot in range(len(buffers)):
            submit_next(slot)
        while ahead:
            slot, future = ahead.popleft()
            filled, error = future.result()
            for stored in filled:
                batch = stored.to(device, non_blocking=device.type == "cuda")
                if device.type == "cuda":
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    torch.cuda.current_stream(device).record_event(event)
                    copies[slot] = event
                # on a CPU, the batch is the buffer itself
                yield batch
                if os.getpid() != process:
                    raise InvalidInputError(
                        "batches must be read in the process that started them, got a forked "
                        "child; call batches() there again"
                    )
            if error is not None:
                raise error
            submit_next(slot)
    finally:
        # after this, no thread may write to a buffer; in a forked child none does
        if os.getpid() == process:
            wait([future for _, future in ahead if not future.cancel()])
            for copy in copies:
                if copy is not None:
                    copy.synchronize()


def _fill_batches(
    rows: RowNumbers,
    batches: Sequence["torch.Tensor"],
    whole: "torch.Tensor",
    fill: Callable[[RowNumbers, F32], None],
) -> "_Filled":
    """Fills the batches of a task; returns those before the first error, and this error."""
    try:
        fill(rows, whole.numpy())
    except ThinsectionError as error:
        if len(batches) == 1:
            return (), error
    else:
        return batches, None
    first = 0
    for number, batch in enumerate(batches):
        last = first + len(batch)
        try:
            fill(rows[first:last], batch.numpy())
        except ThinsectionError as error:
            return batches[:number], error
        first = last
    return batches, None


def _as_row_numbers(rows: npt.ArrayLike) -> RowNumbers:
    numbers = np.asarray(rows)
    is_whole = not numbers.size or numbers.dtype.kind in "iu"
    if numbers.ndim != 1 or not is_whole:
        raise InvalidInputError(
            f"rows must be integers of shape (B,), got {numbers.dtype} {numbers.shape}"
        )
    return numbers.astype(np.int64)
