"""Sorts rows of any number by blocks of space, in bounded memory, by a temporary file."""

import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.types import MIB, Closing, Floats

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_PX = 8192  # edge of a block, level-0 px
_HELD_BYTES = 8 * MIB  # rows that wait for their place in the file
# bounds of one returned table: its rows, and their bytes unless it is one piece of the file
_MAX_ROWS = 65_536
_MAX_BYTES = 8 * MIB
_MIN_ROWS = 8192  # blocks with fewer rows are joined with the next one of their line
_PLACE_VALUES = 4  # numbers of one place in the file

BlockKeys = npt.NDArray[np.int64]  # (N, 2): row and column of a block
# where the rows of a piece begin in the file, bytes, number of rows, number of schema
Place = tuple[int, int, int, int]


def block_keys(centers: Floats) -> BlockKeys:
    """Row and column, (N, 2), of the block in which each centre (N, 2) lies."""
    return np.floor(centers[:, ::-1] / BLOCK_PX).astype(np.int64)


class BlockSpill(Closing):
    """Takes rows in any order and gives them back block by block.

    The file has no name, so that nothing is left of it after a kill.

    Memory: some 32 MiB, and 32 bytes per piece of a block in the file. In each 8 MiB of rows, which
    are some 20,000 cells, a block has one piece.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        self._size = 0
        self._schemas: list[pa.Schema] = []
        self._held: list[pa.RecordBatch] = []
        self._held_keys: list[BlockKeys] = []
        self._held_bytes = 0
        # block -> the numbers of its places, one after another
        self._pieces: dict[tuple[int, int], array[int]] = {}

    def add(self, rows: "pa.RecordBatch", keys: BlockKeys) -> None:
        """Takes rows and the block of each."""
        if self._held and self._held[0].schema != rows.schema:
            self._write_held()
        self._held.append(rows)
        self._held_keys.append(keys)
        self._held_bytes += rows.nbytes
        if self._held_bytes > _HELD_BYTES:
            self._write_held()

    def _write_held(self) -> None:
        """Writes the held rows, sorted by block; rows of a block keep their order."""
        import pyarrow as pa

        if not self._held:
            return
        keys = np.concatenate(self._held_keys)
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        keys = keys[order]
        rows = pa.concat_batches(self._held).take(pa.array(order))
        self._held = []
        self._held_keys = []
        self._held_bytes = 0
        if rows.schema not in self._schemas:
            self._schemas.append(rows.schema)
        schema_number = self._schemas.index(rows.schema)
        is_first = np.ones(len(keys), dtype=bool)
        is_first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        starts = np.flatnonzero(is_first).tolist()
        for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
            for first in range(start, end, _MAX_ROWS):
                piece = rows.slice(first, min(_MAX_ROWS, end - first))
                block = (int(keys[start, 0]), int(keys[start, 1]))
                self._write_piece(piece, block, schema_number)

    def _write_piece(
        self, piece: "pa.RecordBatch", block: tuple[int, int], schema_number: int
    ) -> None:
        data = piece.serialize()
        self._file.write(data)
        place = (self._size, data.size, len(piece), schema_number)
        self._pieces.setdefault(block, array("q")).extend(place)
        self._size += data.size

    def batches(self) -> Iterator["pa.Table"]:
        """Yields all rows, block by block: line by line, from left to right within a line.

        A table has rows of one block or of neighbours in its line, at most 65,536, with some 8 MiB.
        Columns that a piece lacks are null.
        """
        import pyarrow as pa

        self._write_held()
        waiting: list[pa.Table] = []
        num_waiting = 0
        num_bytes = 0
        line = None
        for block in sorted(self._pieces):
            is_new_line = block[0] != line
            line = block[0]
            may_end = is_new_line or num_waiting >= _MIN_ROWS
            for place in self._places(block):
                is_full = num_waiting + place[2] > _MAX_ROWS
                is_full |= num_bytes + place[1] > _MAX_BYTES
                if waiting and (may_end or is_full):
                    yield _joined(waiting)
                    waiting = []
                    num_waiting = 0
                    num_bytes = 0
                may_end = False
                waiting.append(self._read(place))
                num_waiting += place[2]
                num_bytes += place[1]
        if waiting:
            yield _joined(waiting)

    def _places(self, block: tuple[int, int]) -> Iterator[Place]:
        """Yields the places of a block's rows in the file."""
        values = iter(self._pieces[block])
        yield from zip(*[values] * _PLACE_VALUES, strict=True)

    def _read(self, place: Place) -> "pa.Table":
        import pyarrow as pa

        start, num_bytes, _, schema_number = place
        self._file.seek(start)
        data = pa.py_buffer(self._file.read(num_bytes))
        rows = pa.ipc.read_record_batch(data, self._schemas[schema_number])
        return pa.Table.from_batches([rows])

    @property
    def schemas(self) -> list["pa.Schema"]:
        """Schemas of all rows taken."""
        self._write_held()
        return list(self._schemas)

    def close(self) -> None:
        """Removes the file."""
        self._file.close()


def _joined(tables: "list[pa.Table]") -> "pa.Table":
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="default").combine_chunks()
