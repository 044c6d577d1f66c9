"""Rows of a cache to float32, with their checksums: what one reader thread does for one batch."""

import threading

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, StoreError
from thinsection.store.cache.dtypes import F32, ITEM_BYTES, STORED, Bytes, widen_into
from thinsection.store.cache.layout import RowIndex, Run, plan_reads, row_checksum
from thinsection.store.cache.source import Source
from thinsection.types import MIB

RUN_BYTES = 1 * MIB  # neighbouring rows are read together up to here; a row may be larger


class RowReader:
    """Fills buffers with rows in any order. Safe to use from several threads.

    Memory: per thread one run of narrow rows, max(1 MiB, one row in two bytes a value).
    """

    def __init__(self, source: Source, index: RowIndex, *, name: str) -> None:
        self._source, self._index, self._name = source, index, name
        self._checked = np.zeros(len(index.offset), dtype=np.bool_)
        self._local = threading.local()

    def fill(self, rows: npt.NDArray[np.int64], out: F32) -> None:
        """Writes the rows to `out`, (B, ...) in their order.

        Raises:
            InvalidInputError: a row that is not there.
            StoreError: the file is truncated, or a row does not have its checksum.
        """
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self._checked):
            raise InvalidInputError(
                f"rows must be in 0..{len(self._checked) - 1}, got {rows.min()}..{rows.max()}"
            )
        flat = out.reshape(len(rows), -1)
        for run in plan_reads(rows, self._index, most_bytes=RUN_BYTES):
            target = flat[run.position : run.position + run.count]
            these = rows[run.position : run.position + run.count]
            if run.dtype == "fp32":
                stored = target.reshape(-1).view(np.uint8)
                self._source.read_into(run.offset, stored)
            else:
                stored = self._source.bytes_at(run.offset, self._scratch(run))
            self._check(these, stored)
            if run.dtype != "fp32":
                widen_into(stored, run.dtype, target)

    def damaged(self) -> list[int]:
        """Every row whose checksum does not hold, in order. Memory: a run, or one row."""
        rows = np.arange(len(self._checked))
        bad: list[int] = []
        for run in plan_reads(rows, self._index, most_bytes=RUN_BYTES):
            size = run.count * self._index.row_values * ITEM_BYTES[run.dtype]
            stored = self._source.bytes_at(run.offset, np.empty(size, dtype=np.uint8))
            sums = [row_checksum(r) for r in stored.reshape(run.count, -1)]
            want = self._index.crc32[run.position : run.position + run.count]
            bad += (run.position + np.flatnonzero(np.array(sums) != want)).tolist()
        return bad

    def _scratch(self, run: Run) -> Bytes:
        size = run.count * self._index.row_values * ITEM_BYTES[run.dtype]
        if getattr(self._local, "bytes", np.empty(0)).size < size:
            self._local.bytes = np.empty(size, dtype=np.uint8)
        held: Bytes = self._local.bytes
        return held[:size]

    def _check(self, rows: npt.NDArray[np.int64], stored: Bytes) -> None:
        """Checksums of rows that come for the first time."""
        for row, place in zip(rows.tolist(), stored.reshape(len(rows), -1), strict=True):
            if self._checked[row]:
                continue
            if row_checksum(place) != self._index.crc32[row]:
                raise StoreError(
                    f"cache row must have its checksum, got other bytes in row {row} in "
                    f"{self._name!r}; remove it ('thinsection cache rm {self._name}') and "
                    "compute it again"
                )
            self._checked[row] = True


def scratch_bytes(index: RowIndex, batch_size: int) -> int:
    """What a thread needs besides the batch: 0 where every row is float32."""
    if (index.dtype == STORED.index("fp32")).all():
        return 0
    row_bytes = index.row_values * 2
    return min(max(RUN_BYTES, row_bytes), batch_size * row_bytes)
