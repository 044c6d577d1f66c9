"""What is stored per tile and read when it is asked for: tables of columns, rows of embeddings."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import StoreError, require
from thinsection.store.tiles_h5 import (
    TilesFile,
    column_names,
    open_h5,
    read_tiles,
    stored_dataset,
)

if TYPE_CHECKING:
    import h5py

TILES, MEASURED = _FIRST = (
    "tiles",
    "measures",
)  # folders whose columns need no other name


@dataclass(frozen=True, kw_only=True)
class TileTableFile:
    """A file `GRID/FOLDER/ID.h5`: `coords`, and a value per tile in each dataset under `tiles/`."""

    address: str  # 'GRID/FOLDER'
    path: Path
    columns: tuple[str, ...]  # as the file names them

    def label(self, column: str) -> str:
        """The name of a column among those of all tables: 'px_focus', 'heatmap_x:attention'."""
        folder = self.address.rpartition("/")[2]
        return column if folder in _FIRST else f"{folder}:{column}"

    def read(self) -> TilesFile:
        """Coordinates and columns. Memory: per tile 16 bytes and 4 of each column."""
        return read_tiles(self.path)


def tile_table_files(
    folder: Path, grid: str, slide_id: str, recorded: Mapping[str, Path]
) -> Iterator[TileTableFile]:
    """The per-tile tables of a slide in a grid, its tile table first.

    Those of `recorded` (address -> file) count as the ledger says; a folder that it does not name,
    such as a heatmap's, counts where its file has `coords` and a group `tiles`.
    """
    first = [f"{grid}/{name}" for name in _FIRST]
    there = {
        a: p
        for a, p in recorded.items()
        if a.startswith(f"{grid}/") and p.suffix == ".h5"
    }
    found = {
        a: p for a, p in there.items() if a in first or p.is_file()
    }  # else it lies at a URL
    for path in sorted((folder / grid).glob("*/")):
        address, file = f"{grid}/{path.name}", path / f"{slide_id}.h5"
        if address not in recorded and address not in first and file.is_file():
            found[address] = file
    for address in [*filter(found.get, first), *sorted(found.keys() - {*first})]:
        if (columns := column_names(found[address])) is not None:
            yield TileTableFile(address=address, path=found[address], columns=columns)


class EmbeddingRows:
    """Tile embeddings (N, D) on disk; rows are asked for as of an array and read then.

    Scattered rows are read from their places, of a packed file (as ours, TRIDENT's, CLAM's are
    not) the whole. One vector is (1, D). Memory: the rows that were asked for, and `index_bytes`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_h5(path) as file:
            data = self._data(file)
            stored = data.shape
            fits = len(stored) in (1, 2) or (
                len(stored) == 3 and stored[0] == 1
            )  # a batch of one
            found = f"{data.dtype} {stored} in {str(path)!r}"
            rule = "embeddings must be floats (N, D)"
            require(fits and data.dtype.kind == "f", rule, found, error=StoreError)
            self.shape: tuple[int, int] = (1, *stored)[-2:]
            self.dtype: np.dtype[Any] = data.dtype
            self._starts = _starts(data) if len(stored) > 1 else None
            chunked = data.chunks and len(stored) > 1
            self._chunk_rows: int = data.chunks[-2] if chunked else len(self)

    @property
    def index_bytes(self) -> int:
        """Memory that the object takes: 8 bytes a stored chunk."""
        return 0 if self._starts is None else self._starts.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def tiles(self) -> TilesFile:
        """The tiles that the rows are of, without their embeddings."""
        return read_tiles(self._path, embeddings=False)

    def __getitem__(
        self, rows: slice | int | Sequence[int] | npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        wanted = np.arange(len(self))[
            rows
        ]  # slices, masks and negative numbers as NumPy has them
        if isinstance(rows, slice) or self._starts is None:
            with open_h5(self._path) as file:
                data = self._data(file)
                if (
                    len(data.shape) == 2
                    and isinstance(rows, slice)
                    and rows.step in (None, 1)
                ):
                    return np.asarray(data[rows])
                return np.asarray(data[...]).reshape(self.shape)[rows]
        out = np.empty((wanted.size, self.shape[1]), self.dtype)
        handle = os.open(self._path, os.O_RDONLY)
        try:
            chunk, row_of = np.divmod(wanted.ravel(), self._chunk_rows)
            places = (self._starts[chunk] + out.strides[0] * row_of).tolist()
            for row, place in zip(out, places, strict=True):
                got = f"{str(self._path)!r}, which is cut"
                whole = os.preadv(handle, [row], place) == row.nbytes
                require(whole, "embeddings must be whole", got, error=StoreError)
        finally:
            os.close(handle)
        return out.reshape(*wanted.shape, self.shape[1])

    def _data(self, file: "h5py.File") -> "h5py.Dataset":
        name = (
            "feats" if "feats" in file and "features" not in file else "features"
        )  # STAMP's
        return stored_dataset(file, name, self._path)

    def __repr__(self) -> str:
        return f"<EmbeddingRows {self.shape} {self.dtype} in {self._path.name!r}>"


def _starts(data: "h5py.Dataset") -> npt.NDArray[np.int64] | None:
    """The byte of the file at which each chunk begins; None where rows are packed or cut."""
    if data.id.get_create_plist().get_nfilters() or data.file.userblock_size:
        return None
    if data.chunks is None:
        start = data.id.get_offset()
        return None if start is None else np.array([start])
    if data.chunks[-1] != data.shape[-1]:
        return None
    size, starts = (
        data.chunks[-2],
        np.zeros(-(-data.shape[-2] // data.chunks[-2]), np.int64),
    )
    data.id.chunk_iter(
        lambda c: starts.__setitem__(c.chunk_offset[-2] // size, c.byte_offset)
    )
    return starts if starts.all() else None
