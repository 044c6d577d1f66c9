"""Caches written while the encoder runs, continued after a crash; listed, verified, removed."""

import datetime
import errno
import fcntl
import math
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from thinsection import errors
from thinsection.config import user_cache_dir
from thinsection.errors import require
from thinsection.files.atomic import write_json
from thinsection.store.cache import format as fmt
from thinsection.store.cache.format import F32, CacheKey, Chunk, Manifest, Shape
from thinsection.store.cache.reader import (
    DEFAULT_BUDGET_BYTES,
    FeatureCache,
    StoredRows,
)
from thinsection.types import GIB, MIB, Closing, format_bytes

if TYPE_CHECKING:
    import torch

    Rows: TypeAlias = "torch.Tensor | F32"

CHUNK_BYTES = (
    64 * MIB
)  # of float32 in one chunk, unless a row is larger or the budget smaller
SPARE_DISK_BYTES = 16 * MIB  # for the journal, the manifest and the file system


class CacheWriter(Closing):
    """Appends rows in order; `finish` makes the cache. Use as a context manager.

    What was appended before an error, a full disk, a kill is kept: the next starts at `rows_kept`.

    Memory: two and a half chunks of float32: 2.5 * max(min(64 MiB, budget / 4), one row).
    Raises DiskSpaceError: the disk cannot hold the whole in the widest dtype it may need;
    BudgetError: the budget does not hold a few rows; LockedError, StoreError: another process
    writes it, or it exists.
    """

    def __init__(
        self, root: Path, key: CacheKey, shape: Shape, *, budget_bytes: int = GIB
    ) -> None:
        fits = len(shape) > 1 and min(shape) > 0
        require(fits, "shape must be (N, ...) of positive sizes", shape)
        self.folder, self._key, self._shape = (
            Path(root) / key.folder_name,
            key,
            tuple(shape),
        )
        self._count_rule = f"rows must be {shape[0]} as announced"
        self._row_values = math.prod(shape[1:])
        row_bytes = self._row_values * 4
        rule = (
            f"cache_memory must hold two and a half rows of {format_bytes(row_bytes)}"
        )
        enough, got = row_bytes * 5 // 2 <= budget_bytes, format_bytes(budget_bytes)
        require(enough, rule, got, error=errors.BudgetError)
        self._chunk_rows = max(1, min(CHUNK_BYTES, budget_bytes // 4) // row_bytes)
        self._forced = key.storage in ("bf16", "fp16")
        self._loss = fmt.Loss()
        self._pending: Future[None] | None = None
        self._buffer: torch.Tensor | None = None
        self._open()
        self.rows_kept = self._queued = self._given = self._rows_on_disk

    def append(self, rows: "Rows") -> None:
        """Takes the next rows, (B, ...); float32, float16 or bfloat16, on any device.

        Raises InvalidInputError for a shape, dtype or number of rows that does not fit, and values
        that are not finite; DiskSpaceError where the disk is full: what was written stays.
        """
        import torch

        tensor = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)
        self._check(tensor)
        while len(tensor):
            if self._buffer is None:
                size = (
                    min(self._chunk_rows, self._shape[0] - self._queued),
                    *self._shape[1:],
                )
                self._buffer = torch.empty(
                    size, dtype=torch.float32, pin_memory=tensor.is_cuda
                )
            free = self._buffer[self._given - self._queued :][: len(tensor)]
            free.copy_(tensor[: len(free)])
            tensor = tensor[len(free) :]
            self._given += len(free)
            if self._given - self._queued == len(self._buffer):
                self._wait()  # the thread has one chunk at a time
                self._pending = self._thread.submit(
                    self._write, self._buffer.numpy(), self._queued
                )
                self._buffer, self._queued = None, self._given

    def finish(self) -> Manifest:
        """Writes what is left, then the manifest: from here on the cache exists.
        Raises InvalidInputError where rows are missing, and DiskSpaceError as `append`."""
        require(self._given == self._shape[0], self._count_rule, self._given)
        self._wait()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        size, loss = os.fstat(self._file).st_size, self._loss if self._forced else None
        manifest = Manifest(
            self._key, self._shape, size, loss, now, tuple(self._chunks)
        )
        try:
            os.fsync(self._file)
            write_json(self.folder / fmt.MANIFEST, manifest.as_mapping())
        except OSError as error:
            raise self._disk_error(error) from error
        (self.folder / fmt.JOURNAL).unlink()
        return manifest

    def close(self) -> None:
        """Waits for the thread and lets go of the folder; whole chunks stay for a later writer."""
        self._held.close()

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self._wait()
        finally:
            self.close()

    @property
    def _rows_on_disk(self) -> int:
        return sum(c.rows for c in self._chunks)

    @property
    def _end(self) -> int:  # of the last whole chunk
        return self._chunks[-1].end(self._row_values) if self._chunks else 0

    def _open(self) -> None:
        """Lock, files and thread; chunks of an earlier process count where they are whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / fmt.JOURNAL
        with ExitStack() as stack:  # closes again what was opened before an error
            stack.callback(os.close, lock_folder(self.folder))
            if (self.folder / fmt.MANIFEST).exists():
                got = f"the finished {str(self.folder)!r}; open it instead"
                raise errors.StoreError(f"cache must not exist yet, got {got}")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.folder / fmt.DATA, flags, 0o644)
            stack.callback(os.close, self._file)
            # the error of a forced dtype is measured over the whole: such a cache starts again
            self._chunks = (
                [] if self._forced else _whole_chunks(self.folder, self._shape)
            )
            os.ftruncate(self._file, self._end)
            self._check_disk()
            journal.write_text("".join(map(fmt.journal_line, self._chunks)))
            self._journal = stack.enter_context(journal.open("a", encoding="ascii"))
            self._thread = stack.enter_context(ThreadPoolExecutor(1, "cache-writer"))
            self._held = stack.pop_all()

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.folder).free
        missing = (self._shape[0] - self._rows_on_disk) * self._row_values
        need = missing * fmt.ITEM_BYTES[self._key.storage] + SPARE_DISK_BYTES
        rule = f"disk must have {format_bytes(need)} free for the feature cache"
        remedy = (
            "choose another --cache-dir or remove old caches ('thinsection cache ls')"
        )
        got = f"{format_bytes(free)} in {str(self.folder)!r}; {remedy}"
        require(need <= free, rule, got, error=errors.DiskSpaceError)

    def _check(self, rows: "torch.Tensor") -> None:
        import torch

        kinds = (torch.float32, torch.float16, torch.bfloat16)
        shape = ", ".join(["B", *map(str, self._shape[1:])])
        got = f"{str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape)}"
        rule = f"features must be float32, float16 or bfloat16 of shape ({shape})"
        require(
            rows.dtype in kinds and tuple(rows.shape[1:]) == self._shape[1:], rule, got
        )
        given = self._given + len(rows)
        require(given <= self._shape[0], self._count_rule, given)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, rows: F32, first_row: int) -> None:
        """One chunk: data first, then its line in the journal. Runs in the thread."""
        fmt.check_rows_finite(rows, first_row=first_row)
        storage = self._key.storage
        dtype = fmt.narrowest(rows) if storage == "lossless" else storage
        stored = fmt.narrow(rows, dtype)
        if self._forced:
            self._loss = fmt.measure_loss(rows, stored, dtype, first_row, self._loss)
        offset = -(-self._end // fmt.ALIGN) * fmt.ALIGN
        sums = "".join(map(fmt.row_checksum, stored.reshape(len(rows), -1)))
        chunk = Chunk(first_row, len(rows), dtype, offset, sums)
        try:
            view = stored.data
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
            self._journal.write(fmt.journal_line(chunk))
            self._journal.flush()
        except OSError as error:
            raise self._disk_error(error) from error
        self._chunks.append(chunk)

    def _disk_error(self, error: OSError) -> errors.StoreError:
        kept = f"rows 0 to {self._rows_on_disk} are kept in {str(self.folder)!r}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            got = (
                f"{error.strerror!r}; {kept}, free some space and run again to continue"
            )
            return errors.DiskSpaceError(
                f"disk must have room for the cache, got {got}"
            )
        return errors.StoreError(f"cache must be writable, got {error}; {kept}")


def lock_folder(folder: Path) -> int:
    """Takes the folder for this process, or LockedError; the descriptor to close when done."""
    descriptor = os.open(
        folder / fmt.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        got = f"another process in {str(folder)!r}; wait for it"
        raise errors.LockedError(f"cache must have one writer, got {got}") from None
    except OSError as error:
        os.close(descriptor)
        got = f"{error.strerror!r} in {str(folder)!r}; pass another --cache-dir"
        rule = "cache must lie on a file system with flock"
        raise errors.StoreError(f"{rule}, got {got}") from None
    return descriptor


def _whole_chunks(folder: Path, shape: Shape) -> list[Chunk]:
    """The leading chunks of the journal whose rows have their checksums. Memory: one row."""
    size, row_values = (folder / fmt.DATA).stat().st_size, math.prod(shape[1:])

    def fits(chunk: Chunk) -> bool:
        return (
            chunk.first_row + chunk.rows <= shape[0] and chunk.end(row_values) <= size
        )

    chunks = list(takewhile(fits, fmt.read_journal(folder)))
    with StoredRows(folder, chunks, shape, size=size) as rows:
        harmed = rows.damaged()
    return [c for c in chunks if not harmed or c.first_row + c.rows <= harmed[0]]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One folder of a cache root."""

    name: str
    data_bytes: int
    state: Literal[
        "whole", "unfinished", "damaged"
    ]  # of manifest and size: bytes are not read
    manifest: Manifest | None = None
    rows_kept: int = 0  # of an unfinished cache: what a next run need not compute
    problem: str = ""  # of a damaged one


def open_or_write(
    root: Path,
    key: CacheKey,
    shape: Shape,
    produce: "Callable[[int], Iterable[Rows]]",
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> FeatureCache:
    """The cache of that key, computed first where it does not exist.

    Given the first row that is missing, `produce` yields the features from there on, (B, ...).
    Raises what `CacheWriter` does, and InvalidInputError where the cache is of another shape.
    """
    found = FeatureCache.find(root, key, budget_bytes=budget_bytes)
    if found is None:
        with CacheWriter(root, key, shape, budget_bytes=budget_bytes) as writer:
            for rows in produce(writer.rows_kept):
                writer.append(rows)
            writer.finish()
        found = FeatureCache(writer.folder, budget_bytes=budget_bytes)
    if found.shape != tuple(shape):
        found.close()
        rule = f"cached features must be of shape {shape}"
        raise errors.InvalidInputError(f"{rule}, got {found.shape}")
    return found


def default_root() -> Path:
    """Where caches lie when nobody says: $XDG_CACHE_HOME/thinsection/features, or ~/.cache/..."""
    return user_cache_dir() / "features"


def list_caches(root: Path) -> list[CacheEntry]:
    """Every cache below the root, by name; an absent root has none."""
    return [_entry(path.parent) for path in sorted(root.glob(f"*/{fmt.DATA}"))]


def verify_cache(root: Path, name: str) -> list[int]:
    """Reads every byte: the rows whose checksum does not hold; StoreError for worse damage."""
    with FeatureCache(_folder(root, name)) as cache:
        return cache.damaged_rows()


def remove_cache(root: Path, name: str) -> int:
    """Removes the cache; how many bytes its data had. LockedError while a process writes it."""
    folder = _folder(root, name)
    size = (folder / fmt.DATA).stat().st_size
    with ExitStack() as stack:
        stack.callback(os.close, lock_folder(folder))
        # without its manifest it is no cache any more, should the rest fail
        (folder / fmt.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return size


def _folder(root: Path, name: str) -> Path:
    known = [entry.name for entry in list_caches(root)]
    got = f"{name!r}; there: {', '.join(known) or 'none'}"
    require(
        name in known,
        f"cache must be one in {str(root)!r}",
        got,
        error=errors.StoreError,
    )
    return root / name


def _entry(folder: Path) -> CacheEntry:
    what = folder.name, (folder / fmt.DATA).stat().st_size
    if not (folder / fmt.MANIFEST).exists():
        kept = sum(chunk.rows for chunk in fmt.read_journal(folder))
        return CacheEntry(*what, "unfinished", rows_kept=kept)
    try:
        with FeatureCache(folder) as cache:
            return CacheEntry(*what, "whole", manifest=cache.manifest)
    except errors.StoreError as error:
        return CacheEntry(*what, "damaged", problem=str(error))
