"""Writing a cache while the encoder runs: chunk by chunk, in a thread, continued after a crash."""

import datetime
import errno
import fcntl
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np

from thinsection.errors import (
    BudgetError,
    DiskSpaceError,
    InvalidInputError,
    LockedError,
    StoreError,
)
from thinsection.files.atomic import write_json
from thinsection.store.cache import layout
from thinsection.store.cache.dtypes import (
    F32,
    ITEM_BYTES,
    Bytes,
    Loss,
    StoredDtype,
    check_finite,
    measure_loss,
    narrow,
    narrowest,
)
from thinsection.store.cache.key import CacheKey
from thinsection.store.cache.layout import ALIGN, Chunk, Manifest, Shape
from thinsection.types import GIB, MIB
from thinsection.units import format_bytes

if TYPE_CHECKING:
    import torch

    Rows: TypeAlias = "torch.Tensor | F32"

CHUNK_BYTES = 64 * MIB  # of float32 in one chunk, unless a row is larger or the budget smaller
SPARE_DISK_BYTES = 16 * MIB  # for the journal, the manifest and the file system


class CacheWriter:
    """Appends rows in order; `finish` makes the cache. Use as a context manager.

    What was appended before an error, a full disk or a kill is kept: a writer for the same key
    starts at `rows_kept`.

    Memory:
        Two chunks of float32 and half of one: 2.5 * max(min(64 MiB, budget / 4), one row).
    """

    def __init__(self, root: Path, key: CacheKey, shape: Shape, *, budget_bytes: int = GIB) -> None:
        if len(shape) < 2 or min(shape) < 1:
            raise InvalidInputError(f"shape must be (N, ...) of positive sizes, got {shape}")
        self.folder, self._key, self._shape = Path(root) / key.folder_name, key, tuple(shape)
        self._row_bytes = layout.row_values(shape) * 4
        if self._row_bytes * 5 // 2 > budget_bytes:
            raise BudgetError(
                f"cache_memory must hold two and a half rows of {format_bytes(self._row_bytes)}, "
                f"got {format_bytes(budget_bytes)}"
            )
        chunk_bytes = min(CHUNK_BYTES, budget_bytes // 4)
        self._chunk_rows = min(shape[0], max(1, chunk_bytes // self._row_bytes))
        self._chunks: list[Chunk] = []
        self._loss = Loss()
        self._finished = False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder)
        try:
            self._continue_or_start()
        except BaseException:
            os.close(self._lock)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-writer")
        self._pending: Future[None] | None = None
        self._buffers: list[torch.Tensor] = []
        self._filled = 0
        self.rows_kept = self._queued = self._rows_on_disk()

    @property
    def rows_given(self) -> int:
        """Rows so far, those of an earlier process included."""
        return self._queued + self._filled

    def append(self, rows: "Rows") -> None:
        """Takes the next rows, (B, ...); float32, float16 or bfloat16, on any device.

        Raises:
            InvalidInputError: wrong shape or dtype, too many rows, a value that is not finite or
                (forced dtype) becomes infinite.
            DiskSpaceError: the disk is full; what was written stays.
        """
        import torch

        tensor = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)
        self._check(tensor)
        done = 0
        while done < len(tensor):
            buffer = self._buffer(tensor.is_cuda)
            take = min(len(tensor) - done, self._chunk_rows - self._filled)
            buffer[self._filled : self._filled + take].copy_(tensor[done : done + take])
            self._filled += take
            done += take
            if self._filled == self._chunk_rows:
                self._flush()

    def finish(self) -> Manifest:
        """Writes what is left, then the manifest: from here on the cache exists.

        Raises:
            InvalidInputError: fewer rows came than the shape says.
            DiskSpaceError: the disk is full; what was written stays.
        """
        if self.rows_given != self._shape[0]:
            raise InvalidInputError(
                f"rows must be {self._shape[0]} as announced, got {self.rows_given}"
            )
        self._flush()
        self._wait()
        manifest = Manifest(
            key=self._key,
            shape=self._shape,
            chunks=tuple(self._chunks),
            data_bytes=os.fstat(self._file).st_size,
            loss=self._loss if self._forced_loss else None,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        try:
            os.fsync(self._file)
            write_json(self.folder / layout.MANIFEST, layout.manifest_mapping(manifest))
        except OSError as error:
            raise self._disk_error(error) from error
        self._finished = True
        (self.folder / layout.JOURNAL).unlink()
        return manifest

    def close(self) -> None:
        """Waits for the thread and lets go of the folder; whole chunks stay for a later writer."""
        self._thread.shutdown(wait=True)
        os.close(self._file)
        self._journal.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc is None and not self._finished:
                self._wait()
        finally:
            self.close()

    @property
    def _forced_loss(self) -> bool:
        return self._key.storage in ("bf16", "fp16")

    def _rows_on_disk(self) -> int:
        return sum(c.rows for c in self._chunks)

    def _continue_or_start(self) -> None:
        """Opens the files; chunks of an earlier process count where their checksums hold."""
        if (self.folder / layout.MANIFEST).exists():
            raise StoreError(
                f"cache must not exist yet, got the finished {str(self.folder)!r}; open it instead"
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.folder / layout.DATA, flags, 0o644)
        try:
            kept = [] if self._forced_loss else layout.read_journal(self.folder)
            self._chunks = _whole_chunks(self._file, kept, self._shape)
            end = self._end()
            os.ftruncate(self._file, end)
            per_row = layout.row_values(self._shape) * ITEM_BYTES[self._key.storage]
            need = (self._shape[0] - self._rows_on_disk()) * per_row + SPARE_DISK_BYTES
            check_disk(self.folder, need)
            journal = "".join(layout.journal_line(c) for c in self._chunks)
            (self.folder / layout.JOURNAL).write_text(journal)
            self._journal = (self.folder / layout.JOURNAL).open("a", encoding="ascii")
        except BaseException:
            os.close(self._file)
            raise

    def _end(self) -> int:
        """Where the last whole chunk ends."""
        if not self._chunks:
            return 0
        last = self._chunks[-1]
        stride = layout.row_values(self._shape) * ITEM_BYTES[last.dtype]
        return last.offset + last.rows * stride

    def _check(self, rows: "torch.Tensor") -> None:
        import torch

        kinds = (torch.float32, torch.float16, torch.bfloat16)
        if rows.dtype not in kinds or tuple(rows.shape[1:]) != self._shape[1:]:
            raise InvalidInputError(
                f"features must be float32, float16 or bfloat16 of shape (B, "
                f"{', '.join(map(str, self._shape[1:]))}), "
                f"got {str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape)}"
            )
        if self.rows_given + len(rows) > self._shape[0]:
            raise InvalidInputError(
                f"rows must be {self._shape[0]} as announced, got {self.rows_given + len(rows)}"
            )

    def _buffer(self, pinned: bool) -> "torch.Tensor":
        """The chunk that is being filled; the other one is with the thread."""
        import torch

        if not self._buffers:
            size = (self._chunk_rows, *self._shape[1:])
            self._buffers = [
                torch.empty(size, dtype=torch.float32, pin_memory=pinned) for _ in range(2)
            ]
        return self._buffers[0]

    def _flush(self) -> None:
        """Hands the filled rows to the thread once it has written the chunk before."""
        if self._filled == 0:
            return
        self._wait()
        rows = self._buffers[0][: self._filled].numpy()
        self._pending = self._thread.submit(self._write, rows, self._queued)
        self._buffers.reverse()
        self._queued += self._filled
        self._filled = 0

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, rows: F32, first_row: int) -> None:
        """One chunk: data first, then its line in the journal. Runs in the thread."""
        check_finite(rows, first_row=first_row)
        storage = self._key.storage
        dtype: StoredDtype = narrowest(rows) if storage == "lossless" else storage
        stored = narrow(rows, dtype)
        if self._forced_loss:
            loss = measure_loss(rows, stored, dtype, first_row=first_row)
            self._loss = self._loss.merged(loss)
        per_row = stored.reshape(len(rows), -1)
        offset = -(-self._end() // ALIGN) * ALIGN
        chunk = Chunk(
            first_row=first_row,
            rows=len(rows),
            dtype=dtype,
            offset=offset,
            crc32="".join(f"{layout.row_checksum(r):08x}" for r in per_row),
        )
        try:
            _write_all(self._file, stored, offset)
            self._journal.write(layout.journal_line(chunk))
            self._journal.flush()
        except OSError as error:
            raise self._disk_error(error) from error
        self._chunks.append(chunk)

    def _disk_error(self, error: OSError) -> StoreError:
        kept = f"rows 0 to {self._rows_on_disk()} are kept in {str(self.folder)!r}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskSpaceError(
                f"disk must have room for the cache, got {error.strerror!r}; {kept}, "
                "free some space and run again to continue"
            )
        return StoreError(f"cache must be writable, got {error}; {kept}")


def check_disk(folder: Path, need_bytes: int) -> None:
    """Raises DiskSpaceError where the disk has less than `need_bytes` free."""
    free = shutil.disk_usage(folder).free
    if need_bytes > free:
        raise DiskSpaceError(
            f"disk must have {format_bytes(need_bytes)} free for the feature cache, "
            f"got {format_bytes(free)} in {str(folder)!r}; choose another --cache-dir or remove "
            "old caches ('thinsection cache ls')"
        )


def lock_folder(folder: Path) -> int:
    """Takes the folder for this process; the descriptor to close when done.

    Raises:
        LockedError: another one has it.
    """
    descriptor = os.open(folder / layout.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LockedError(
            f"cache must have one writer, got another process in {str(folder)!r}; wait for it"
        ) from None
    return descriptor


def _write_all(file: int, data: Bytes, offset: int) -> None:
    view = data.data
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _whole_chunks(file: int, chunks: list[Chunk], shape: Shape) -> list[Chunk]:
    """The leading chunks whose rows have their checksums. Memory: one row."""
    whole: list[Chunk] = []
    row = np.empty(layout.row_values(shape) * 4, dtype=np.uint8)
    for chunk in chunks:
        if chunk.first_row + chunk.rows > shape[0]:
            return whole
        stride = layout.row_values(shape) * ITEM_BYTES[chunk.dtype]
        place = row[:stride]
        for i in range(chunk.rows):
            if os.preadv(file, [place.data], chunk.offset + i * stride) != stride:
                return whole
            if f"{layout.row_checksum(place):08x}" != chunk.crc32[8 * i : 8 * i + 8]:
                return whole
        whole.append(chunk)
    return whole
