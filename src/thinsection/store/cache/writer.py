"""Writes caches while the encoder runs, and continues them after a crash."""

import datetime
import errno
import fcntl
import math
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from thinsection.errors import (
    BudgetError,
    DiskSpaceError,
    InvalidInputError,
    LockedError,
    StoreError,
)
from thinsection.files.atomic import write_json
from thinsection.store.cache import format as fmt
from thinsection.store.cache.dtypes import (
    F32,
    ITEM_BYTES,
    Loss,
    check_rows_finite,
    measure_loss,
    narrow,
    narrowest,
)
from thinsection.store.cache.format import CacheKey, Chunk, Manifest, Shape
from thinsection.store.cache.rows import StoredRows
from thinsection.types import GIB, MIB, Closing, Uncopied, format_bytes

if TYPE_CHECKING:
    import torch

    Rows: TypeAlias = "torch.Tensor | F32"

# Bytes of a chunk as float32, unless a row is larger or the budget smaller.
CHUNK_BYTES = 64 * MIB
# Disk space reserved for the journal, the manifest and the file system.
SPARE_DISK_BYTES = 16 * MIB


class CacheWriter(Uncopied, Closing):
    """Appends rows in order; `finish` completes the cache. Use as a context manager.

    Rows that were appended before an error, a full disk or a kill are kept: the next writer
    starts at row `rows_kept`.

    Memory: two and a half chunks of float32: 2.5 * max(min(64 MiB, budget / 4), one row).

    Raises:
        DiskSpaceError: the disk is too small for all rows in the widest dtype that may be needed.
        BudgetError: the budget is smaller than two and a half rows.
        LockedError: another process writes the cache.
        StoreError: the cache exists already.
    """

    def __init__(
        self, root: Path, key: CacheKey, shape: Shape, *, budget_bytes: int = GIB
    ) -> None:
        if len(shape) < 2 or min(shape) <= 0:
            raise InvalidInputError(
                f"shape must be (N, ...) of positive sizes, got {shape}"
            )
        self.folder = Path(root) / key.folder_name
        self._key = key
        self._shape = tuple(shape)
        self._row_values = math.prod(shape[1:])
        row_bytes = self._row_values * 4
        if row_bytes * 5 // 2 > budget_bytes:
            raise BudgetError(
                "cache_memory must be large enough for two and a half rows of "
                f"{format_bytes(row_bytes)}, got {format_bytes(budget_bytes)}"
            )
        self._chunk_rows = max(1, min(CHUNK_BYTES, budget_bytes // 4) // row_bytes)
        self._is_lossy = key.storage in ("bf16", "fp16")
        self._loss = Loss()
        self._pending: Future[None] | None = None
        self._buffer: torch.Tensor | None = None
        self._open()
        self.rows_kept = self._rows_on_disk
        # number of rows that were appended, and of rows that were passed to the thread
        self._num_given = self.rows_kept
        self._num_queued = self.rows_kept

    def append(self, rows: "Rows") -> None:
        """Takes the next rows (B, ...): float32, float16 or bfloat16, on any device.

        Raises:
            InvalidInputError: shape, dtype or number of rows does not fit, or a value is not
                finite.
            DiskSpaceError: the disk is full; rows that were written remain.
        """
        import torch

        tensor = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)
        self._check(tensor)
        while len(tensor):
            if self._buffer is None:
                num_rows = min(self._chunk_rows, self._shape[0] - self._num_queued)
                self._buffer = torch.empty(
                    (num_rows, *self._shape[1:]),
                    dtype=torch.float32,
                    pin_memory=tensor.is_cuda,
                )
            free = self._buffer[self._num_given - self._num_queued :][: len(tensor)]
            free.copy_(tensor[: len(free)])
            tensor = tensor[len(free) :]
            self._num_given += len(free)
            if self._num_given - self._num_queued == len(self._buffer):
                # the thread works on at most one full chunk at a time
                self._wait()
                chunk = self._buffer.numpy()
                self._pending = self._thread.submit(
                    self._write, chunk, self._num_queued
                )
                self._num_queued = self._num_given
                self._buffer = None

    def finish(self) -> Manifest:
        """Writes the last rows, then the manifest; from then on the cache exists.

        Raises:
            InvalidInputError: rows are missing.
            DiskSpaceError: as for `append`.
        """
        if self._num_given != self._shape[0]:
            raise self._count_error(self._num_given)
        self._wait()
        now = datetime.datetime.now(datetime.UTC)
        manifest = Manifest(
            key=self._key,
            shape=self._shape,
            data_bytes=os.fstat(self._file).st_size,
            loss=self._loss if self._is_lossy else None,
            created=now.isoformat(timespec="seconds"),
            chunks=tuple(self._chunks),
        )
        try:
            os.fsync(self._file)
            write_json(self.folder / fmt.MANIFEST, manifest.as_mapping())
        except OSError as error:
            raise self._disk_error(error) from error
        (self.folder / fmt.JOURNAL).unlink()
        return manifest

    def close(self) -> None:
        """Waits for the thread and unlocks the folder; the next writer keeps complete chunks."""
        self._resources.close()

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self._wait()
        finally:
            self.close()

    @property
    def _rows_on_disk(self) -> int:
        return sum(chunk.rows for chunk in self._chunks)

    @property
    def _end(self) -> int:
        """Offset of the byte after the last complete chunk."""
        return self._chunks[-1].end(self._row_values) if self._chunks else 0

    def _open(self) -> None:
        """Opens lock, files and thread; keeps complete chunks of an earlier process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / fmt.JOURNAL
        # if an error occurs, everything that was opened before is closed
        with ExitStack() as stack:
            stack.callback(os.close, lock_folder(self.folder))
            if (self.folder / fmt.MANIFEST).exists():
                raise StoreError(
                    f"cache must not exist yet, got the complete {str(self.folder)!r}; open it "
                    "instead"
                )
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.folder / fmt.DATA, flags, 0o644)
            stack.callback(os.close, self._file)
            # the error of a lossy dtype is measured over all rows, so a lossy cache starts again
            self._chunks: list[Chunk] = []
            if not self._is_lossy:
                self._chunks = _whole_chunks(self.folder, self._shape)
            os.ftruncate(self._file, self._end)
            self._check_disk()
            journal.write_text("".join(map(fmt.journal_line, self._chunks)))
            self._journal = stack.enter_context(journal.open("a", encoding="ascii"))
            self._thread = stack.enter_context(ThreadPoolExecutor(1, "cache-writer"))
            self._resources = stack.pop_all()

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.folder).free
        num_values = (self._shape[0] - self._rows_on_disk) * self._row_values
        needed = num_values * ITEM_BYTES[self._key.storage] + SPARE_DISK_BYTES
        if needed > free:
            raise DiskSpaceError(
                f"disk must have {format_bytes(needed)} free for the feature cache, "
                f"got {format_bytes(free)} in {str(self.folder)!r}; choose another "
                "cache_dir=... or remove old caches ('thinsection cache ls')"
            )

    def _check(self, rows: "torch.Tensor") -> None:
        import torch

        is_float = rows.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if not is_float or tuple(rows.shape[1:]) != self._shape[1:]:
            shape = ", ".join(["B", *map(str, self._shape[1:])])
            raise InvalidInputError(
                f"features must be float32, float16 or bfloat16 of shape ({shape}), "
                f"got {str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape)}"
            )
        num_rows = self._num_given + len(rows)
        if num_rows > self._shape[0]:
            raise self._count_error(num_rows)

    def _count_error(self, num_rows: int) -> InvalidInputError:
        return InvalidInputError(
            f"number of rows must be {self._shape[0]}, as announced, got {num_rows}"
        )

    def _wait(self) -> None:
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def _write(self, rows: F32, first_row: int) -> None:
        """Writes a chunk, first its data, then its line in the journal. Runs in the thread."""
        check_rows_finite(rows, first_row=first_row)
        storage = self._key.storage
        dtype = narrowest(rows) if storage == "lossless" else storage
        stored = narrow(rows, dtype)
        if self._is_lossy:
            self._loss = measure_loss(rows, stored, dtype, first_row, self._loss)
        chunk = Chunk(
            first_row=first_row,
            rows=len(rows),
            dtype=dtype,
            offset=-(-self._end // fmt.ALIGN) * fmt.ALIGN,
            crc32=fmt.checksum_digits(stored.reshape(len(rows), -1)),
        )
        view = stored.data
        offset = chunk.offset
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view = view[written:]
                offset += written
            self._journal.write(fmt.journal_line(chunk))
            self._journal.flush()
        except OSError as error:
            raise self._disk_error(error) from error
        self._chunks.append(chunk)

    def _disk_error(self, error: OSError) -> StoreError:
        kept = f"rows 0 to {self._rows_on_disk} are kept in {str(self.folder)!r}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskSpaceError(
                f"disk must have room for the cache, got {error.strerror!r}; {kept}, so free "
                "some space and run again to continue"
            )
        return StoreError(f"cache must be writable, got {error}; {kept}")


def lock_folder(folder: Path) -> int:
    """Locks the folder for this process; returns the descriptor to close at the end.

    Raises:
        LockedError: another process holds the lock.
        StoreError: the file system does not support locks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(folder / fmt.LOCK, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LockedError(
            f"cache must have one writer, got another process in {str(folder)!r}; "
            "wait for it"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"cache must be on a file system with flock, got {error.strerror!r} in "
            f"{str(folder)!r}; pass another cache_dir=..."
        ) from None
    return descriptor


def _whole_chunks(folder: Path, shape: Shape) -> list[Chunk]:
    """The first chunks of the journal, as long as all their rows have the right checksums.

    Memory: one row.
    """
    size = (folder / fmt.DATA).stat().st_size
    row_values = math.prod(shape[1:])
    chunks = []
    for chunk in fmt.read_journal(folder):
        if chunk.first_row + chunk.rows > shape[0] or chunk.end(row_values) > size:
            break
        chunks.append(chunk)
    with StoredRows(folder, chunks, shape, size=size) as rows:
        damaged = rows.damaged()
    if not damaged:
        return chunks
    return [chunk for chunk in chunks if chunk.first_row + chunk.rows <= damaged[0]]
