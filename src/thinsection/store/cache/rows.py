"""Rows of a cache's data file as float32, read from disk or from RAM."""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.sources import Descriptor
from thinsection.store.cache import format as fmt
from thinsection.store.cache.dtypes import (
    BLOCK,
    F32,
    ITEM_BYTES,
    Bytes,
    StoredDtype,
    widen_into,
)
from thinsection.store.cache.format import Chunk, Shape
from thinsection.types import MIB, Closing, Uncopied

# Bytes per read while the file is loaded into RAM.
LOAD_BYTES = 64 * MIB
# Neighbouring rows are read together up to this size as float32; a single row may be larger.
RUN_BYTES = 1 * MIB

# If rows are so large that fewer fit into a call, they are copied one by one.
_LEAST_AT_ONCE = 4

RowNumbers = npt.NDArray[np.int64]  # (B,)


class StoredRows(Uncopied, Closing):
    """Rows of features.bin, read with `preadv` (which adds no pages to the RSS), or kept in RAM.

    Several threads may read at once. Raises StoreError if the file differs from the manifest.

    Memory: the file's size while it is in RAM; `scratch_bytes` during `fill`; 5 bytes per row.
    """

    def __init__(
        self, folder: Path, chunks: Sequence[Chunk], shape: Shape, *, size: int
    ) -> None:
        self._folder = folder
        self._path = folder / fmt.DATA
        self._size = size
        self._chunks = chunks
        self._row_values = math.prod(shape[1:])
        self._run_rows = max(1, RUN_BYTES // (4 * self._row_values))
        self._first_rows = np.array([chunk.first_row for chunk in chunks], np.int64)
        self._chunk_offsets = np.array([chunk.offset for chunk in chunks], np.int64)
        item_bytes = [ITEM_BYTES[chunk.dtype] for chunk in chunks]
        self._row_bytes = np.array(item_bytes, np.int64) * self._row_values
        self._dtypes = [chunk.dtype for chunk in chunks]
        self._num_rows = sum(chunk.rows for chunk in chunks)
        checksums = bytes.fromhex("".join(chunk.crc32 for chunk in chunks))
        self._checksums = np.frombuffer(checksums, ">u4")
        # True for rows whose checksum has been compared
        self._checked = np.zeros(self._num_rows, np.bool_)
        # the whole file, if it is in RAM
        self.held: Bytes | None = None
        # None after `close`
        self._descriptor: Descriptor | None = None
        try:
            self._descriptor = Descriptor(
                os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            )
        except OSError as error:
            raise self._unreadable(error) from error
        stored_size = os.fstat(self._descriptor).st_size
        if stored_size != size:
            self._descriptor = None
            raise StoreError(
                f"cache data must have {size} bytes, got {stored_size} in "
                f"{str(self._path)!r}; {fmt.remedy(folder)}"
            )

    def scratch_bytes(self, num_rows: int) -> int:
        """Bytes that `fill` allocates: 2 per value of rows read together; 0 if all are float32."""
        if set(self._dtypes) <= {"fp32"}:
            return 0
        return 2 * self._row_values * min(num_rows, self._run_rows)

    def hold(self, wanted: bool) -> None:
        """Loads the file into RAM, or releases it; afterwards its rows are checked again."""
        if wanted == (self.held is not None):
            return
        self.held = None
        self._checked[:] = False
        if wanted:
            data = np.empty(self._size, dtype=np.uint8)
            for start in range(0, self._size, LOAD_BYTES):
                self._read(start, data[start : start + LOAD_BYTES])
            self.held = data

    def fill(self, rows: RowNumbers, out: F32) -> None:
        """Writes rows to `out` (B, ...), in their order; raises as `FeatureCache.read`."""
        if rows.size and not 0 <= rows.min() <= rows.max() < self._num_rows:
            raise InvalidInputError(
                f"rows must be in 0..{self._num_rows - 1}, "
                f"got {rows.min()}..{rows.max()}"
            )
        values = out.reshape(len(rows), self._row_values)
        scratch = np.empty(self.scratch_bytes(len(rows)), np.uint8)
        for dtype, start, stop in self._runs(rows):
            target = values[start:stop]
            if dtype == "fp32":
                # float32 rows are read directly into the result
                self._fetch(rows[start:stop], target.view(np.uint8))
                continue
            row_bytes = 2 * self._row_values
            stored = scratch[: (stop - start) * row_bytes].reshape(-1, row_bytes)
            self._fetch(rows[start:stop], stored)
            widen_into(stored.reshape(-1), dtype, target)

    def damaged(self) -> list[int]:
        """Rows whose checksum is wrong."""
        damaged = []
        for row in range(self._num_rows):
            offsets, row_bytes = self._places(np.array([row]))
            stored = np.empty((1, row_bytes), dtype=np.uint8)
            self._copy(offsets, stored)
            if fmt.row_checksum(stored[0]) != self._checksums[row]:
                damaged.append(row)
        return damaged

    def close(self) -> None:
        """Closes the file when no thread reads from it; a second call does nothing."""
        self.held = None
        self._descriptor = None

    @property
    def is_open(self) -> bool:
        """False after `close`."""
        return self._descriptor is not None

    def _opened(self) -> Descriptor:
        """Open file; whoever holds it keeps it open. Raises StoreError: it was closed."""
        if self._descriptor is None:
            raise StoreError(
                f"cache must be open, got a closed one in {str(self._folder)!r}; open it again"
            )
        return self._descriptor

    def _runs(self, rows: RowNumbers) -> Iterator[tuple[StoredDtype, int, int]]:
        """Yields dtype, first position and end position of rows that are fetched together.

        They have one dtype. Rows other than float32 go through a buffer, which limits their number.
        """
        if not len(rows):
            return
        if len(set(self._dtypes)) == 1:
            edges = [0, len(rows)]
            dtypes = self._dtypes[:1]
        else:
            chunks = self._chunks_of(rows).tolist()
            dtypes = [self._dtypes[chunks[0]]]
            edges = [0]
            for place, chunk in enumerate(chunks):
                if self._dtypes[chunk] != dtypes[-1]:
                    dtypes.append(self._dtypes[chunk])
                    edges.append(place)
            edges.append(len(rows))
        for dtype, (begin, end) in zip(dtypes, pairwise(edges), strict=True):
            step = end - begin if dtype == "fp32" else self._run_rows
            for start in range(begin, end, step):
                yield dtype, start, min(end, start + step)

    def _chunks_of(self, rows: RowNumbers) -> RowNumbers:
        """Number of the chunk that holds each row."""
        return np.searchsorted(self._first_rows, rows, side="right") - 1

    def _places(self, rows: RowNumbers) -> tuple[RowNumbers, int]:
        """Offset of each row in the file, and bytes per row; all rows must have one dtype."""
        chunks = self._chunks_of(rows)
        row_bytes = int(self._row_bytes[chunks[0]])
        within = row_bytes * (rows - self._first_rows[chunks])
        return self._chunk_offsets[chunks] + within, row_bytes

    def _fetch(self, rows: RowNumbers, out: Bytes) -> None:
        """Copies rows of one dtype as they are stored; checks rows not checked before."""
        offsets, _ = self._places(rows)
        self._copy(offsets, out)
        for place in np.flatnonzero(~self._checked[rows]).tolist():
            row = int(rows[place])
            if fmt.row_checksum(out[place]) != self._checksums[row]:
                raise StoreError(
                    f"cache row must match its checksum, got other bytes in row {row} in "
                    f"{self._folder.name!r}; {fmt.remedy(self._folder)}"
                )
            self._checked[row] = True

    def _copy(self, offsets: RowNumbers, out: Bytes) -> None:
        """Copies bytes of the file, beginning at each offset, to (B, row bytes)."""
        if self.held is None:
            self._read_rows(offsets, out)
        else:
            _gather(self.held, offsets, out)

    def _read_rows(self, offsets: RowNumbers, out: Bytes) -> None:
        """Reads rows from the file; neighbouring rows in one system call."""
        row_bytes = out.shape[1]
        breaks = np.flatnonzero(np.diff(offsets) != row_bytes) + 1
        firsts = [0, *breaks.tolist()]
        target = out.reshape(-1).data
        places = offsets.tolist()
        descriptor = self._opened()
        for first, last in pairwise([*firsts, len(places)]):
            view = target[first * row_bytes : last * row_bytes]
            try:
                count = os.preadv(descriptor, [view], places[first])
            except OSError as error:
                raise self._unreadable(error) from error
            if count != len(view):
                rest = out.reshape(-1)[first * row_bytes + count : last * row_bytes]
                self._read(places[first] + count, rest)

    def _read(self, offset: int, out: Bytes) -> None:
        """Fills `out`, with as many system calls as the kernel needs."""
        view = out.data
        descriptor = self._opened()
        while view:
            try:
                count = os.preadv(descriptor, [view], offset)
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


def _gather(data: Bytes, offsets: RowNumbers, out: Bytes) -> None:
    """Copies bytes of `data`, beginning at each offset, to (B, row bytes); offsets are even."""
    import torch

    row_values = out.shape[1] // 2
    rows_at_once = BLOCK // row_values
    if rows_at_once < _LEAST_AT_ONCE:
        for offset, row in zip(offsets.tolist(), out, strict=True):
            row[:] = data[offset : offset + len(row)]
        return
    values = torch.from_numpy(data[: len(data) // 2 * 2].view(np.int16))
    # a view with a row of values beginning at each value; the rows overlap
    shape = (len(values) - row_values + 1, row_values)
    windows = values.as_strided(shape, (1, 1))
    starts = torch.from_numpy(offsets // 2)
    target = torch.from_numpy(out.view(np.int16))
    for first in range(0, len(starts), rows_at_once):
        part = slice(first, first + rows_at_once)
        torch.index_select(windows, 0, starts[part], out=target[part])
