"""`FeatureCache`: features of N images on disk, read back as float32 batches in bounded memory."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from thinsection.errors import BudgetError, InvalidInputError
from thinsection.store.cache import layout
from thinsection.store.cache.dtypes import F32
from thinsection.store.cache.key import CacheKey
from thinsection.store.cache.layout import Manifest, Shape
from thinsection.store.cache.prefetch import BufferRing, prefetched
from thinsection.store.cache.rows import RowReader, scratch_bytes
from thinsection.store.cache.source import FileSource, RamSource
from thinsection.store.cache.writer import CacheWriter
from thinsection.types import GIB, Closing
from thinsection.units import format_bytes

if TYPE_CHECKING:
    import torch

    from thinsection.store.cache.writer import Rows

DEFAULT_BUDGET_BYTES = 1 * GIB
PREFETCH = 2  # batches ahead, where the budget holds them


class FeatureCache(Closing):
    """A finished cache. Use as a context manager, or close it.

    Where the file and two batches fit into the budget, the file is read once into RAM and stays;
    else a batch is read from disk into one of a few reused buffers while the one before is in use.
    Every value comes back as the float32 that was written (unless a lossy dtype was forced).

    Memory:
        budget_bytes, whatever N; besides, 14 N bytes say where rows lie.
    """

    def __init__(self, folder: Path, *, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = layout.read_manifest(self.folder)
        self._budget = budget_bytes
        self._index = layout.row_index(self.manifest)
        self._source: FileSource | RamSource = FileSource(
            self.folder / layout.DATA, size=self.manifest.data_bytes
        )
        self._rows = RowReader(self._source, self._index, name=self.folder.name)
        self._ring: BufferRing | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._busy = False

    @classmethod
    def create(
        cls, root: Path, key: CacheKey, shape: Shape, *, budget_bytes: int = DEFAULT_BUDGET_BYTES
    ) -> CacheWriter:
        """A writer of that key's cache; it continues an unfinished one.

        Raises:
            DiskSpaceError: the disk cannot hold the whole in the widest dtype it may need.
            BudgetError: the budget does not hold a few rows.
            LockedError: another process writes it.
            StoreError: it exists already.
        """
        return CacheWriter(root, key, shape, budget_bytes=budget_bytes)

    @classmethod
    def find(
        cls, root: Path, key: CacheKey, *, budget_bytes: int = DEFAULT_BUDGET_BYTES
    ) -> Self | None:
        """The finished cache of that key, or None.

        Raises:
            StoreError: it is there and damaged.
        """
        folder = Path(root) / key.folder_name
        if not (folder / layout.MANIFEST).exists():
            return None
        return cls(folder, budget_bytes=budget_bytes)

    @property
    def shape(self) -> Shape:
        """(N, ...)."""
        return self.manifest.shape

    @property
    def in_ram(self) -> bool:
        """Whether the whole file is held; decided when batches are first asked for."""
        return isinstance(self._source, RamSource)

    @property
    def prefetch(self) -> int:
        """Batches that are read ahead; 0 before batches are asked for."""
        return 0 if self._ring is None else self._ring.depth - 1

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: npt.ArrayLike) -> F32:
        """Those rows as a new float32 array (B, ...), in the given order.

        Memory: the result, beyond the budget.

        Raises:
            InvalidInputError: a row that is not there.
            StoreError: the file is truncated or damaged.
        """
        wanted = _as_rows(rows)
        out = np.empty((len(wanted), *self.shape[1:]), dtype=np.float32)
        self._rows.fill(wanted, out)
        return out

    def batches(
        self, order: npt.ArrayLike, batch_size: int, *, device: "str | torch.device" = "cpu"
    ) -> Iterator["torch.Tensor"]:
        """Rows in that order as float32 tensors (B, ...); the last batch may be smaller.

        A tensor on the CPU is valid until the next one is asked for: its buffer is used again.

        Raises:
            BudgetError: the budget does not hold one batch.
            InvalidInputError: a row that is not there, or another iteration is not over.
            StoreError: the file is truncated or damaged.
        """
        import torch

        rows = _as_rows(order)
        if batch_size < 1:
            raise InvalidInputError(f"batch_size must be >= 1, got {batch_size}")
        if self._busy:
            raise InvalidInputError(
                "batches must be read one iteration at a time, got a second one; close the first"
            )
        ring = self._prepare(min(batch_size, len(self)), torch.device(device))
        parts = [rows[i : i + ring.shape[0]] for i in range(0, len(rows), ring.shape[0])]
        self._busy = True
        try:
            yield from prefetched(parts, ring, self._threads, self._rows.fill)
        finally:
            self._busy = False

    def damaged_rows(self) -> list[int]:
        """Every row whose checksum does not hold. Memory: one row."""
        return self._rows.damaged()

    def close(self) -> None:
        """Stops the threads, lets go of buffers and file."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._threads = self._ring = None
        self._source.close()

    def _prepare(self, batch_size: int, device: "torch.device") -> BufferRing:
        """Buffers and threads for this batch size, within the budget; kept between iterations."""
        shape = (batch_size, *self.shape[1:])
        if self._ring is not None and (self._ring.shape, self._ring.device) == (shape, device):
            return self._ring
        batch_bytes = int(np.prod(shape)) * 4
        scratch = scratch_bytes(self._index, batch_size)
        data = self.manifest.data_bytes
        self._ring = None  # before the file or new buffers take its place: never both
        self._place(data + 2 * batch_bytes + scratch <= self._budget)
        free = self._budget - scratch - (data if self.in_ram else 0)
        depth = min(1 + PREFETCH, free // batch_bytes)
        if depth < 1:
            raise BudgetError(
                f"cache_memory must hold a batch of {batch_size} rows "
                f"({format_bytes(batch_bytes + scratch)}), got {format_bytes(self._budget)}; "
                f"raise --cache-memory (twice that reads ahead)"
            )
        self._ring = BufferRing(shape, depth, device)
        if depth > 1 and self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="cache-reader")
        elif depth == 1 and self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        return self._ring

    def _place(self, in_ram: bool) -> None:
        """The source in RAM, or on disk; rows that were read before are checked again."""
        if in_ram == self.in_ram:
            return
        if isinstance(self._source, FileSource):
            self._source = RamSource(self._source)
        else:
            self._source.close()
            self._source = FileSource(self.folder / layout.DATA, size=self.manifest.data_bytes)
        self._rows = RowReader(self._source, self._index, name=self.folder.name)


def open_or_write(
    root: Path,
    key: CacheKey,
    shape: Shape,
    produce: "Callable[[int], Iterable[Rows]]",
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> FeatureCache:
    """The cache of that key, computed first where it does not exist.

    Args:
        root: folder of caches.
        key: what it is a cache of.
        shape: (N, ...).
        produce: given the first row that is missing, yields the features from there on, (B, ...).
        budget_bytes: for writing, then for reading.

    Raises:
        StoreError: an existing cache is damaged or of another shape; DiskSpaceError, LockedError.
    """
    found = FeatureCache.find(root, key, budget_bytes=budget_bytes)
    if found is None:
        with FeatureCache.create(root, key, shape, budget_bytes=budget_bytes) as writer:
            for rows in produce(writer.rows_kept):
                writer.append(rows)
            writer.finish()
        found = FeatureCache(Path(root) / key.folder_name, budget_bytes=budget_bytes)
    if found.shape != tuple(shape):
        found.close()
        raise InvalidInputError(f"cached features must be of shape {shape}, got {found.shape}")
    return found


def _as_rows(rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    wanted = np.asarray(rows)
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise InvalidInputError(
            f"rows must be integers of shape (B,), got {wanted.dtype} {wanted.shape}"
        )
    return wanted.astype(np.int64)
