"""`FeatureCache`: features of N images on disk, read back as float32 batches in bounded memory."""

import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from thinsection.errors import BudgetError, InvalidInputError, StoreError, require
from thinsection.store.cache import format as fmt
from thinsection.store.cache.format import F32, Bytes, CacheKey, Chunk, Shape
from thinsection.types import GIB, MIB, Closing, format_bytes

if TYPE_CHECKING:
    import torch

DEFAULT_BUDGET_BYTES = 1 * GIB
PREFETCH = 2  # batches ahead, where the budget holds them
LOAD_BYTES = 64 * MIB  # of one read while the file is taken into RAM
RUN_BYTES = (
    1 * MIB
)  # of float32: neighbouring rows are read together up to here; a row may be more

RowNumbers = npt.NDArray[np.int64]  # (B,)


class FeatureCache(Closing):
    """A finished cache. Use as a context manager, or close it.

    A forked child (a DataLoader's worker) may use the cache of its parent: it reads with a thread
    and buffers of its own.

    Where the file and two batches fit into the budget, the file is read once into RAM and stays;
    else a batch is read from disk into one of a few reused buffers while the one before is in use.
    Every value comes back as the float32 that was written (unless a lossy dtype was forced).

    Memory: budget_bytes, whatever N; and 9 N bytes of checksums and which were looked at.
    """

    def __init__(
        self, folder: Path, *, budget_bytes: int = DEFAULT_BUDGET_BYTES
    ) -> None:
        self.folder, self._budget, self._busy = Path(folder), budget_bytes, False
        self.manifest = manifest = fmt.read_manifest(self.folder)
        self.shape, size = manifest.shape, manifest.data_bytes  # (N, ...)
        self._rows = StoredRows(self.folder, manifest.chunks, self.shape, size=size)
        self._thread = _reading_thread()
        self._process = os.getpid()  # that the thread runs in
        self._buffers: list[torch.Tensor] = []

    @classmethod
    def find(
        cls, root: Path, key: CacheKey, *, budget_bytes: int = DEFAULT_BUDGET_BYTES
    ) -> Self | None:
        """The finished cache of that key, or None; StoreError if it is there and damaged."""
        folder = Path(root) / key.folder_name
        found = (folder / fmt.MANIFEST).exists()
        return cls(folder, budget_bytes=budget_bytes) if found else None

    @property
    def in_ram(self) -> bool:
        """Whether the whole file is held; decided when batches are first asked for."""
        return self._rows.held is not None

    @property
    def prefetch(self) -> int:
        """Batches that are read ahead; 0 before batches are asked for."""
        return max(0, len(self._buffers) - 1)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: npt.ArrayLike) -> F32:
        """Those rows as a new float32 array (B, ...), in the given order.

        Memory: the result and half of a run, max(1 MiB, one row) / 2, beyond the budget.
        Raises InvalidInputError for a row that is not there; StoreError: truncated or damaged.
        """
        wanted = _as_rows(rows)
        out = np.empty((len(wanted), *self.shape[1:]), dtype=np.float32)
        self._rows.fill(wanted, out)
        return out

    def batches(
        self,
        order: npt.ArrayLike,
        batch_size: int,
        *,
        device: "str | torch.device" = "cpu",
    ) -> Iterator["torch.Tensor"]:
        """Rows in that order as float32 tensors (B, ...); the last batch may be smaller.

        A tensor on the CPU is valid until the next one is asked for: its buffer is used again.
        Raises what `read` does, and BudgetError where the budget does not hold one batch.
        """
        import torch

        self._renew_after_fork()
        rows, target = _as_rows(order), torch.device(device)
        require(batch_size >= 1, "batch_size must be >= 1", batch_size)
        rule, got = (
            "batches must be read one iteration at a time",
            "a second one; close the first",
        )
        require(not self._busy, rule, got)
        size = min(batch_size, len(self))
        self._prepare((size, *self.shape[1:]), pinned=target.type == "cuda")
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        self._busy = True
        try:
            yield from prefetched(
                parts, self._buffers, self._rows.fill, self._thread, target
            )
        finally:
            self._busy = False

    def damaged_rows(self) -> list[int]:
        """Every row whose checksum does not hold, in order. Memory: one row."""
        return self._rows.damaged()

    def close(self) -> None:
        """Stops the thread, lets go of buffers and file."""
        self._renew_after_fork()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._buffers = []
        self._rows.close()

    def _renew_after_fork(self) -> None:
        """Replaces what a fork leaves behind: no thread lives on, nothing is under way in the
        child, and page-locked buffers are the parent's."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._thread = _reading_thread()
        self._buffers = []
        self._busy = False

    def _prepare(self, shape: Shape, *, pinned: bool) -> None:
        """Buffers of one batch each, within the budget; page-locked where they feed a GPU."""
        import torch

        if any((b.shape, b.is_pinned()) == (shape, pinned) for b in self._buffers):
            return  # those of the last iteration
        batch_bytes, scratch = math.prod(shape) * 4, self._rows.scratch_bytes(shape[0])
        needed, data = batch_bytes + scratch, self.manifest.data_bytes
        self._buffers = []  # before the file or new buffers take their place: never both
        self._rows.hold(data + batch_bytes + needed <= self._budget)
        free = self._budget - scratch - (data if self.in_ram else 0)
        count = min(1 + PREFETCH, free // batch_bytes)
        rule = f"cache_memory must hold a batch of {shape[0]} rows ({format_bytes(needed)})"
        remedy = "raise --cache-memory (twice that reads ahead)"
        require(
            count >= 1,
            rule,
            f"{format_bytes(self._budget)}; {remedy}",
            error=BudgetError,
        )
        empty = partial(torch.empty, shape, dtype=torch.float32, pin_memory=pinned)
        self._buffers = [empty() for _ in range(count)]


def _reading_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="cache-reader")


class StoredRows(Closing):
    """Rows of features.bin as float32: read by `preadv` (no page counts as RSS), or held in RAM.

    Any thread may read, several at once. StoreError where the file is not as the manifest says.
    Memory: the file's size while it is held; in `fill` `scratch_bytes`.
    """

    def __init__(
        self, folder: Path, chunks: Sequence[Chunk], shape: Shape, *, size: int
    ) -> None:
        self._folder, self._path, self._size = folder, folder / fmt.DATA, size
        self._chunks, self._starts = chunks, [chunk.first_row for chunk in chunks]
        self._row_values = math.prod(shape[1:])
        self._run_rows = max(1, RUN_BYTES // (4 * self._row_values))
        self._narrow = any(chunk.dtype != "fp32" for chunk in chunks)
        self._num_rows = sum(chunk.rows for chunk in chunks)
        self._checked = bytearray(self._num_rows)
        self.held: Bytes | None = None  # the whole file, while it is in RAM
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        found = os.fstat(self._file).st_size
        if found != size:
            os.close(self._file)
            got = f"{found} in {str(self._path)!r}; {fmt.remedy(folder)}"
            raise StoreError(f"cache data must have {size} bytes, got {got}")

    def scratch_bytes(self, num_rows: int) -> int:
        """What `fill` takes for so many rows: a run in two bytes a value, if not all is float32."""
        return (
            2 * self._row_values * min(num_rows, self._run_rows) if self._narrow else 0
        )

    def hold(self, wanted: bool) -> None:
        """Takes the file into RAM, or lets go of it; its rows are checked again then."""
        if wanted == (self.held is not None):
            return
        self.held, self._checked = None, bytearray(self._num_rows)
        if wanted:
            data = np.empty(self._size, dtype=np.uint8)
            for start in range(0, self._size, LOAD_BYTES):
                self._read(start, data[start : start + LOAD_BYTES])
            self.held = data

    def fill(self, rows: RowNumbers, out: F32) -> None:
        """Writes the rows to `out`, (B, ...) in their order; raises as `FeatureCache.read` does."""
        if rows.size and not 0 <= rows.min() <= rows.max() < self._num_rows:
            got = f"{rows.min()}..{rows.max()}"
            raise InvalidInputError(
                f"rows must be in 0..{self._num_rows - 1}, got {got}"
            )
        held = self.held is not None
        scratch = np.empty(0 if held else self.scratch_bytes(len(rows)), dtype=np.uint8)
        values, numbers = out.reshape(-1), rows.tolist()
        for start, stop in self._runs(rows):
            chunk = self._chunk_of(first := numbers[start])
            target = values[start * self._row_values : stop * self._row_values]
            # float32 needs no way round: it is read straight into its place
            exact = chunk.dtype == "fp32"
            into = target.view(np.uint8) if exact else scratch
            stored = self._stored(chunk, first, stop - start, into)
            if 0 in self._checked[first : first + stop - start]:
                self._check(chunk, first, stored.reshape(stop - start, -1))
            if not exact or held:
                fmt.widen_into(stored, chunk.dtype, target)

    def damaged(self) -> list[int]:
        """Rows whose checksum does not hold."""
        scratch = np.empty(4 * self._row_values, dtype=np.uint8)
        chunks = ((row, self._chunk_of(row)) for row in range(self._num_rows))
        return [
            row for row, c in chunks if not c.has(row, self._stored(c, row, 1, scratch))
        ]

    def close(self) -> None:
        self.held = None
        os.close(self._file)

    def _chunk_of(self, row: int) -> Chunk:
        return self._chunks[bisect_right(self._starts, row) - 1]

    def _runs(self, rows: RowNumbers) -> Iterator[tuple[int, int]]:
        """First and last + 1 position of rows that lie one after the other in one chunk."""
        chunk = np.searchsorted(self._starts, rows, side="right")
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(chunk) != 0)) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(rows)]):
            for start in range(begin, end, self._run_rows):
                yield start, min(end, start + self._run_rows)

    def _stored(self, chunk: Chunk, row: int, num_rows: int, scratch: Bytes) -> Bytes:
        """The bytes of rows from `row` on: read into `scratch`, or a view of what is held."""
        offset, row_bytes = chunk.place(row, self._row_values)
        count = num_rows * row_bytes
        if self.held is not None:
            return self.held[offset : offset + count]
        self._read(offset, scratch[:count])
        return scratch[:count]

    def _check(self, chunk: Chunk, first: int, stored: Bytes) -> None:
        """Checksums of the rows that are read for the first time."""
        for row, place in enumerate(stored, first):
            if not self._checked[row] and not chunk.has(row, place):
                where = (
                    f"row {row} in {self._folder.name!r}; {fmt.remedy(self._folder)}"
                )
                raise StoreError(
                    f"cache row must have its checksum, got other bytes in {where}"
                )
            self._checked[row] = True

    def _read(self, offset: int, out: Bytes) -> None:
        """Fills `out`, over as many calls as the kernel makes of it."""
        view = out.data
        while view:
            try:
                count = os.preadv(self._file, [view], offset)
            except OSError as error:
                raise self._unreadable(error) from error
            if count == 0:
                got = f"its end before in {str(self._path)!r}; it was truncated while open"
                raise StoreError(
                    f"cache data must reach byte {offset + len(view)}, got {got}"
                )
            view, offset = view[count:], offset + count

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(
            f"cache data must be readable, got {error} in {str(self._path)!r}"
        )


def prefetched(
    parts: Sequence[RowNumbers],
    buffers: Sequence["torch.Tensor"],
    fill: Callable[[RowNumbers, F32], None],
    thread: ThreadPoolExecutor,
    device: "torch.device",
) -> Iterator["torch.Tensor"]:
    """Batches in order, one in each buffer, filled ahead; what `fill` raises comes at its batch.
    Memory: the buffers; on CUDA besides, a batch on the device for each that is in use."""
    import torch

    process = os.getpid()
    ahead: deque[tuple[int, Future[torch.Tensor]]] = deque()
    waiting = iter(parts)
    # the copy to the device that last read a buffer: it must end before the buffer is filled
    copied: list[torch.cuda.Event | None] = [None] * len(buffers)

    def filled(slot: int, rows: RowNumbers) -> torch.Tensor:
        if (event := copied[slot]) is not None:
            event.synchronize()
        batch = buffers[slot][: len(rows)]
        fill(rows, batch.numpy())
        return batch

    def submit(slot: int) -> None:
        if (rows := next(waiting, None)) is not None:
            ahead.append((slot, thread.submit(filled, slot, rows)))

    try:
        for slot in range(len(buffers)):
            submit(slot)
        while ahead:
            slot, future = ahead.popleft()
            batch = future.result().to(device, non_blocking=device.type == "cuda")
            if device.type == "cuda":
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                torch.cuda.current_stream(device).record_event(event)
                copied[slot] = event
            yield batch  # on a CPU it is the buffer itself
            if os.getpid() != process:
                raise InvalidInputError(
                    "batches must be read in the process that began them, got a forked child; "
                    "call batches() there again"
                )
            submit(slot)
    finally:
        # nobody may write to a buffer after this; in a forked child nobody does
        if os.getpid() == process:
            wait([future for _, future in ahead if not future.cancel()])
            for event in filter(None, copied):
                event.synchronize()


def _as_rows(rows: npt.ArrayLike) -> RowNumbers:
    wanted = np.asarray(rows)
    fits = wanted.ndim == 1 and (not wanted.size or wanted.dtype.kind in "iu")
    require(
        fits, "rows must be integers of shape (B,)", f"{wanted.dtype} {wanted.shape}"
    )
    return wanted.astype(np.int64)
