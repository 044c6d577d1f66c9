"""Rows of a cache's data file as float32: read from disk, or held in RAM."""

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, StoreError
from thinsection.store.cache import format as fmt
from thinsection.store.cache.dtypes import F32, Bytes, widen_into
from thinsection.store.cache.format import Chunk, Shape
from thinsection.types import MIB, Closing

# Bytes of one read while the file is taken into RAM.
LOAD_BYTES = 64 * MIB
# Neighbouring rows are read together up to so many bytes of float32; a row may be more.
RUN_BYTES = 1 * MIB

RowNumbers = npt.NDArray[np.int64]  # (B,)


class StoredRows(Closing):
    """Rows of features.bin, read by `preadv` (no page counts as RSS), or held in RAM.

    Any thread may read, several at once. StoreError where the file is not as the manifest
    says.

    Memory: the file's size while it is held; in `fill` `scratch_bytes`.
    """

    def __init__(
        self, folder: Path, chunks: Sequence[Chunk], shape: Shape, *, size: int
    ) -> None:
        self._folder = folder
        self._path = folder / fmt.DATA
        self._size = size
        self._chunks = chunks
        self._starts = [chunk.first_row for chunk in chunks]
        self._row_values = math.prod(shape[1:])
        self._run_rows = max(1, RUN_BYTES // (4 * self._row_values))
        self._all_fp32 = all(chunk.dtype == "fp32" for chunk in chunks)
        self._num_rows = sum(chunk.rows for chunk in chunks)
        # 1 for a row whose checksum was compared
        self._checked = bytearray(self._num_rows)
        # the whole file, while it is in RAM
        self.held: Bytes | None = None
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        stored_size = os.fstat(self._file).st_size
        if stored_size != size:
            os.close(self._file)
            raise StoreError(
                f"cache data must have {size} bytes, got {stored_size} in "
                f"{str(self._path)!r}; {fmt.remedy(folder)}"
            )

    def scratch_bytes(self, num_rows: int) -> int:
        """Bytes that `fill` takes: a run in two bytes a value, if not all is float32."""
        if self._all_fp32:
            return 0
        return 2 * self._row_values * min(num_rows, self._run_rows)

    def hold(self, wanted: bool) -> None:
        """Takes the file into RAM, or lets go of it; its rows are checked again then."""
        if wanted == (self.held is not None):
            return
        self.held = None
        self._checked = bytearray(self._num_rows)
        if wanted:
            data = np.empty(self._size, dtype=np.uint8)
            for start in range(0, self._size, LOAD_BYTES):
                self._read(start, data[start : start + LOAD_BYTES])
            self.held = data

    def fill(self, rows: RowNumbers, out: F32) -> None:
        """Writes rows to `out`, (B, ...) in their order; raises as `FeatureCache.read`."""
        if rows.size and not 0 <= rows.min() <= rows.max() < self._num_rows:
            raise InvalidInputError(
                f"rows must be in 0..{self._num_rows - 1}, "
                f"got {rows.min()}..{rows.max()}"
            )
        is_held = self.held is not None
        scratch = np.empty(0 if is_held else self.scratch_bytes(len(rows)), np.uint8)
        values = out.reshape(-1)
        numbers = rows.tolist()
        for start, stop in self._runs(rows):
            first = numbers[start]
            chunk = self._chunk_of(first)
            target = values[start * self._row_values : stop * self._row_values]
            # float32 is read straight into its place
            is_exact = chunk.dtype == "fp32"
            buffer = target.view(np.uint8) if is_exact else scratch
            stored = self._stored(chunk, first, stop - start, buffer)
            if 0 in self._checked[first : first + stop - start]:
                self._check(chunk, first, stored.reshape(stop - start, -1))
            if is_held or not is_exact:
                widen_into(stored, chunk.dtype, target)

    def damaged(self) -> list[int]:
        """Rows whose checksum does not hold."""
        scratch = np.empty(4 * self._row_values, dtype=np.uint8)
        damaged = []
        for row in range(self._num_rows):
            chunk = self._chunk_of(row)
            if not chunk.has(row, self._stored(chunk, row, 1, scratch)):
                damaged.append(row)
        return damaged

    def close(self) -> None:
        self.held = None
        os.close(self._file)

    def _chunk_of(self, row: int) -> Chunk:
        return self._chunks[bisect_right(self._starts, row) - 1]

    def _runs(self, rows: RowNumbers) -> Iterator[tuple[int, int]]:
        """First and last + 1 position of rows that follow each other in one chunk."""
        chunk = np.searchsorted(self._starts, rows, side="right")
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(chunk) != 0)) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(rows)]):
            for start in range(begin, end, self._run_rows):
                yield start, min(end, start + self._run_rows)

    def _stored(self, chunk: Chunk, row: int, num_rows: int, scratch: Bytes) -> Bytes:
        """Bytes of rows from `row` on: read into `scratch`, or a view of the held file."""
        offset, row_bytes = chunk.place(row, self._row_values)
        count = num_rows * row_bytes
        if self.held is not None:
            return self.held[offset : offset + count]
        self._read(offset, scratch[:count])
        return scratch[:count]

    def _check(self, chunk: Chunk, first: int, stored: Bytes) -> None:
        """Compares checksums of rows that are read for the first time."""
        for row, row_bytes in enumerate(stored, first):
            if not self._checked[row] and not chunk.has(row, row_bytes):
                raise StoreError(
                    f"cache row must match its checksum, got other bytes in row {row} in "
                    f"{self._folder.name!r}; {fmt.remedy(self._folder)}"
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
                raise StoreError(
                    f"cache data must reach byte {offset + len(view)}, got a shorter file "
                    f"{str(self._path)!r}; it was truncated while open"
                )
            view = view[count:]
            offset += count

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(
            f"cache data must be readable, got {error} in {str(self._path)!r}"
        )
