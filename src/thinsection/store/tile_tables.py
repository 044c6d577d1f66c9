"""Reads stored per-tile values on demand: columns, rows of embeddings, rows that exist already."""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import StoreError
from thinsection.store.hdf5 import (
    CHECKSUM,
    Values,
    check_finite,
    check_recorded,
    dataset_checksum,
    open_h5,
    read_blocks,
    read_values,
    stored_dataset,
)
from thinsection.store.tiles_h5 import (
    Embeddings,
    TilesFile,
    column_names,
    read_tiles,
    stored_categories,
)
from thinsection.tiles.categories import Categories
from thinsection.types import MIB, CoordsL0

if TYPE_CHECKING:
    import h5py


TILES = "tiles"
MEASURED = "measures"
# Folders whose columns keep their plain names.
_PLAIN_FOLDERS = (TILES, MEASURED)
# Beginning of the folder of a column that the caller has stored; its name follows.
OWN_COLUMN = "column_"

# Bytes of a file that a check reads at a time.
_BLOCK_BYTES = 8 * MIB

# Files whose values this process has compared with their checksums, and what told them from others
# then: device, number, size, and times of the last changes. All are forgotten when there are
# _MOST_CHECKED: these take 60 MiB.
_CHECKED: dict[Path, tuple[int, ...]] = {}
_MOST_CHECKED = 100_000
# Time stamps are coarse: a file that has just been written may be written again with the same ones.
_SETTLED_NS = 5 * 10**9

RowIndex = slice | int | Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class TileTableFile:
    """A file `GRID/FOLDER/ID.h5` with `coords`, and a dataset below `tiles/` for each column."""

    address: str  # 'GRID/FOLDER'
    path: Path
    columns: tuple[str, ...]  # names in the file

    def label(self, column: str) -> str:
        """Name of a column that is unique over all tables: 'px_focus', 'heatmap_x:attention'."""
        folder = self.address.rpartition("/")[2]
        is_plain = folder in _PLAIN_FOLDERS or folder == f"{OWN_COLUMN}{column}"
        return column if is_plain else f"{folder}:{column}"

    def categories(self) -> dict[str, Categories]:
        """Names and colours of the columns that hold categories; no values are read.

        Raises:
            StoreError: the file is damaged.
        """
        found = {}
        with open_h5(self.path) as file:
            for column in self.columns:
                named = stored_categories(file, column, self.path)
                if named is not None:
                    found[column] = named
        return found

    def empty_columns(self) -> set[str]:
        """Columns whose values are all 0 or NaN, or that give no tile a category.

        Memory:
            One column at a time.

        Raises:
            StoreError: the file is damaged.
        """
        empty = set()
        with open_h5(self.path) as file:
            for column in self.columns:
                values = read_values(file, f"tiles/{column}", self.path)
                if stored_categories(file, column, self.path) is not None:
                    is_empty = not (values >= 0).any()
                else:
                    is_empty = not np.nan_to_num(values).any()
                if is_empty:
                    empty.add(column)
        return empty

    def read(self) -> TilesFile:
        """Reads coordinates and columns.

        Memory: for each tile 16 bytes, and 4 for each column.
        """
        return read_tiles(self.path)


def tile_table_files(
    folder: Path, grid: str, slide_id: str, recorded: Mapping[str, Path]
) -> Iterator[TileTableFile]:
    """Lists the per-tile tables of a slide on a grid; the tile table comes first.

    Tables in `recorded` (address -> file) are the ones in the ledger. Another folder, such as a
    heatmap's, counts if its file has `coords` and a group `tiles`.
    """
    plain = [f"{grid}/{name}" for name in _PLAIN_FOLDERS]
    paths: dict[str, Path] = {}
    for address, path in recorded.items():
        if not address.startswith(f"{grid}/") or path.suffix != ".h5":
            continue
        # any other table without a local file is at a URL, and left out
        if address in plain or path.is_file():
            paths[address] = path
    for subfolder in sorted((folder / grid).glob("*/")):
        address = f"{grid}/{subfolder.name}"
        path = subfolder / f"{slide_id}.h5"
        if address not in recorded and address not in plain and path.is_file():
            paths[address] = path
    first = [address for address in plain if address in paths]
    others = sorted(paths.keys() - set(plain))
    for address in (*first, *others):
        columns = column_names(paths[address])
        # older versions imported tiles without this group
        if columns is None and address == plain[0]:
            columns = ()
        if columns is not None:
            yield TileTableFile(address=address, path=paths[address], columns=columns)


class EmbeddingRows:
    """Tile embeddings (N, D) on disk, indexed like an array; rows are read when they are indexed.

    Before the first rows are returned, the whole file is checked: its checksums, its coordinates,
    the slide's ledger, and that all values are finite. A file of another tool without checksums
    is read without this check. Values that this process has checked are not checked again, as long
    as the file is the same by its number, size and times, and these were older than five seconds
    when the check began. In a network folder a change by another machine may be seen late.

    Scattered rows are read directly from their offsets. A compressed file is read completely (files
    of ours, TRIDENT and CLAM are not compressed). A single vector has the shape (1, D).

    Args:
        path: path of the file.
        verify: False if the caller has checked the file.

    Memory: the requested rows, 8 MiB, and `index_bytes`.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self._path = path
        self._is_checked = not verify
        with open_h5(path) as file:
            data = self._dataset(file)
            shape = data.shape
            is_batch_of_one = len(shape) == 3 and shape[0] == 1
            is_matrix = len(shape) in (1, 2) or is_batch_of_one
            if not is_matrix or data.dtype.kind != "f":
                raise StoreError(
                    f"embeddings must be floats (N, D), "
                    f"got {data.dtype} {shape} in {str(path)!r}"
                )
            self.shape: tuple[int, int] = (1, *shape)[-2:]
            self.dtype: np.dtype[np.generic] = data.dtype
            self.is_signed = CHECKSUM in data.attrs
            self._chunk_starts: npt.NDArray[np.int64] | None = None
            self._chunk_rows = len(self)
            if len(shape) > 1:
                self._chunk_starts = _find_chunks(data)
                if data.chunks:
                    self._chunk_rows = data.chunks[-2]

    @property
    def index_bytes(self) -> int:
        """Memory of the object: 8 bytes per stored chunk."""
        return 0 if self._chunk_starts is None else self._chunk_starts.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def tiles(self) -> TilesFile:
        """The tiles of these rows, without their embeddings."""
        return read_tiles(self._path, embeddings=False)

    def __getitem__(self, rows: RowIndex) -> Values:
        if isinstance(rows, slice) and rows == slice(None):
            return self._read_whole()
        self.check()
        if isinstance(rows, slice) or self._chunk_starts is None:
            with open_h5(self._path) as file:
                data = self._dataset(file)
                is_run = isinstance(rows, slice) and rows.step in (None, 1)
                if is_run and len(data.shape) == 2:
                    return np.asarray(data[rows])
                if is_run and len(data.shape) == 3:
                    return np.asarray(data[0, rows])
                return np.asarray(data[...]).reshape(self.shape)[rows]
        # this applies NumPy's rules and errors for masks and negative numbers
        wanted = np.arange(len(self))[rows]
        flat = self._read_scattered(wanted.ravel(), self._chunk_starts)
        return flat.reshape(*wanted.shape, self.shape[1])

    def check(self) -> None:
        """Checks the whole file, once.

        Memory: 8 MiB, or what is larger: one row, or the rows of one compressed chunk.

        Raises:
            StoreError: the file is damaged, or not the one that the slide's ledger lists.
            InvalidInputError: a value is not finite.
        """
        if self._is_checked:
            return
        if _is_known(self._path):
            with open_h5(self._path) as file:
                self._check_beside(file, self._dataset(file))
            self._is_checked = True
            return
        row_bytes = self.dtype.itemsize * self.shape[1]
        for _ in self.checked_blocks(max(1, _BLOCK_BYTES // max(1, row_bytes))):
            pass

    def checked_blocks(self, num_rows: int) -> Iterator[Embeddings]:
        """Yields all rows in blocks of at most `num_rows`, and checks the file while it is read.

        An error may come after the last block: before it, nothing is certain. Values that this
        process has checked are not checked again.

        Memory: one block; the rows of one compressed chunk, twice, if these are more; the whole
        slide if it is stored with an axis for batches.

        Raises:
            StoreError, InvalidInputError: see `check`.
        """
        stamp = _settled_stamp(self._path)
        with open_h5(self._path) as file:
            data = self._dataset(file)
            if not self._is_checked:
                self._check_beside(file, data)
            verify = not (self._is_checked or _is_known(self._path))
            step = self._rows_per_read(data, num_rows)
            first_row = 0
            for block in read_blocks(data, self._path, step, verify=verify):
                values = block.reshape(-1, self.shape[1])
                if verify:
                    check_finite(values, self._path, first_row=first_row)
                first_row += len(values)
                for start in range(0, len(values), num_rows):
                    yield values[start : start + num_rows]
        self._is_checked = True
        if verify:
            _note_checked(self._path, stamp)

    def _rows_per_read(self, data: "h5py.Dataset", num_rows: int) -> int:
        """Number of entries of the first axis to read at a time for blocks of `num_rows` rows.

        Compressed chunks are read whole, so that each is decompressed once.
        """
        if data.shape != self.shape:
            return len(data)  # a vector, or a batch of one slide
        if not _has_filters(data):
            return num_rows
        chunk_rows = int(data.chunks[0])
        return chunk_rows * max(1, num_rows // chunk_rows)

    def blocks(self, num_rows: int) -> Iterator[Embeddings]:
        """Yields all rows in blocks of `num_rows`; the last one may be smaller.

        Memory: one block, and 8 MiB for the check of the file.
        """
        for start in range(0, len(self), num_rows):
            yield self[start : start + num_rows]

    def _check_beside(self, file: "h5py.File", data: "h5py.Dataset") -> None:
        """Compares the coordinates and the ledger with the embeddings."""
        attributes = {**file.attrs, **data.attrs}
        if self.is_signed and len(data.shape) > 1:
            coords = read_values(file, "coords", self._path)
            if len(coords) != len(self):
                raise StoreError(
                    f"coords must have one row for each of {len(self)} embeddings, got "
                    f"{len(coords)} in {str(self._path)!r}; remove the file and run the same "
                    "command again"
                )
            attributes |= file["coords"].attrs
        check_recorded(
            self._path,
            attributes,
            num_tiles=len(self) if len(data.shape) > 1 else None,
            channels=data.shape[-1],
        )

    def _read_whole(self) -> Values:
        stamp = _settled_stamp(self._path)
        with open_h5(self._path) as file:
            data = self._dataset(file)
            if not self._is_checked:
                self._check_beside(file, data)
            if self._is_checked or _is_known(self._path):
                self._is_checked = True
                return np.asarray(data[...]).reshape(self.shape)
            values = read_values(file, self._name(file), self._path)
        values = values.reshape(self.shape)
        check_finite(values, self._path)
        self._is_checked = True
        _note_checked(self._path, stamp)
        return values

    def _read_scattered(
        self, rows: npt.NDArray[np.int64], chunk_starts: npt.NDArray[np.int64]
    ) -> Values:
        out = np.empty((len(rows), self.shape[1]), self.dtype)
        chunk, row_in_chunk = np.divmod(rows, self._chunk_rows)
        offsets = (chunk_starts[chunk] + out.strides[0] * row_in_chunk).tolist()
        handle = os.open(self._path, os.O_RDONLY)
        try:
            for row, offset in zip(out, offsets, strict=True):
                if os.preadv(handle, [row], offset) != row.nbytes:
                    raise StoreError(
                        f"embeddings must be complete, got {str(self._path)!r}, which is "
                        "truncated"
                    )
        finally:
            os.close(handle)
        return out

    def _dataset(self, file: "h5py.File") -> "h5py.Dataset":
        return stored_dataset(file, self._name(file), self._path)

    def _name(self, file: "h5py.File") -> str:
        # STAMP names its embeddings feats
        return "feats" if "feats" in file and "features" not in file else "features"

    def __repr__(self) -> str:
        return f"<EmbeddingRows {self.shape} {self.dtype} in {self._path.name!r}>"


def _stamp(path: Path) -> tuple[int, ...]:
    """Device, number, size and two times of a file; () if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _settled_stamp(path: Path) -> tuple[int, ...]:
    """Stamp of a file that last changed more than five seconds ago; otherwise ().

    A caller asks before it opens the file. A change after this moment then gives another stamp,
    however long the check lasts.
    """
    now_ns = time.time_ns()
    stamp = _stamp(path)
    is_settled = now_ns - max(stamp[-2:], default=now_ns) > _SETTLED_NS
    return stamp if is_settled else ()


def _is_known(path: Path) -> bool:
    """True if this process has checked the values of the file, which has not changed since."""
    stamp = _CHECKED.get(path)
    return stamp is not None and stamp == _stamp(path)


def _note_checked(path: Path, stamp: tuple[int, ...]) -> None:
    """Remembers a file without damage, which had this settled stamp before the check."""
    if stamp and stamp == _stamp(path):
        if len(_CHECKED) >= _MOST_CHECKED:
            _CHECKED.clear()
        _CHECKED[path] = stamp


def add_rows(file: "h5py.File", name: str, rows: EmbeddingRows, num_rows: int) -> None:
    """Writes rows as a dataset with its checksum, in blocks of `num_rows`.

    Memory: one block.
    """
    dataset = file.create_dataset(name, rows.shape, rows.dtype)
    digest = hashlib.sha256()
    start = 0
    for block in rows.blocks(num_rows):
        dataset[start : start + len(block)] = block
        digest.update(np.ascontiguousarray(block).data)
        start += len(block)
    dataset.attrs[CHECKSUM] = dataset_checksum(dataset, digest)


def _has_filters(data: "h5py.Dataset") -> bool:
    """True if chunks are compressed, or changed in another way, when they are written."""
    return bool(data.id.get_create_plist().get_nfilters())


def _find_chunks(data: "h5py.Dataset") -> npt.NDArray[np.int64] | None:
    """Offset of each chunk in the file; None if chunks are compressed or do not hold whole rows."""
    if _has_filters(data) or data.file.userblock_size:
        return None
    if data.chunks is None:
        start = data.id.get_offset()
        return None if start is None else np.array([start])
    if data.chunks[-1] != data.shape[-1]:
        return None
    chunk_rows = data.chunks[-2]
    starts = np.zeros(-(-data.shape[-2] // chunk_rows), np.int64)

    def note_start(chunk: Any) -> None:
        starts[chunk.chunk_offset[-2] // chunk_rows] = chunk.byte_offset

    data.id.chunk_iter(note_start)
    return starts if starts.all() else None


_BLOCK = 1024  # rows of embeddings that are copied in one step

# (coordinates, embeddings) of consecutive tiles
Block = tuple[CoordsL0, Embeddings]


class RowMerger:
    """Merges stored rows of embeddings with new rows of the encoder, in the order of a tile table.

    Args:
        path: file of embeddings.
        coords_l0: corners of all N tiles of the table.

    Attributes:
        row_in_file: int64 (N,), row of each tile in the file; -1 for tiles that must be encoded.

    Memory: 200 bytes per tile while rows are matched, then 48; `_BLOCK` rows at a time.

    Raises:
        StoreError: the file is damaged.
    """

    def __init__(self, path: Path, coords_l0: CoordsL0) -> None:
        self._stored = EmbeddingRows(path)
        self._stored.check()
        self._coords_l0 = coords_l0
        corners = self._stored.tiles.coords_l0.tolist()
        row_of = {tuple(corner): row for row, corner in enumerate(corners)}
        rows = [row_of.get(tuple(corner), -1) for corner in coords_l0.tolist()]
        self.row_in_file = np.array(rows, dtype=np.int64)
        self._num_encoded = 0  # tiles received from the encoder so far
        self._num_merged = 0  # tiles of the table merged so far

    def add(self, coords_l0: CoordsL0, values: Embeddings) -> Iterator[Block]:
        """Yields the encoder's next rows, with the stored rows before and between them."""
        stop = self._num_encoded + len(values)
        table_rows = np.flatnonzero(self.row_in_file < 0)[self._num_encoded : stop]
        self._num_encoded = stop
        starts = np.flatnonzero(np.diff(table_rows) > 1) + 1
        for run in np.split(np.arange(len(values)), starts):
            yield from self._stored_until(int(table_rows[run[0]]))
            yield coords_l0[run], values[run]
            self._num_merged = int(table_rows[run[-1]]) + 1

    def remaining(self) -> Iterator[Block]:
        """Yields the stored rows that follow the encoder's last row."""
        yield from self._stored_until(len(self.row_in_file))

    def _stored_until(self, table_row: int) -> Iterator[Block]:
        """Yields the stored rows before a row of the tile table."""
        for first in range(self._num_merged, table_row, _BLOCK):
            part = slice(first, min(table_row, first + _BLOCK))
            yield self._coords_l0[part], self._stored[self.row_in_file[part]]
        self._num_merged = max(self._num_merged, table_row)

    @property
    def num_to_encode(self) -> int:
        """Number of tiles that have no stored row."""
        return int((self.row_in_file < 0).sum())
