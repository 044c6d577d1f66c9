"""What is stored per tile and read when it is asked for: tables of columns, rows of embeddings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.store.tiles_h5 import TilesFile, column_names, open_h5, read_tiles, stored_dataset

TILES, MEASURED = _FIRST = ("tiles", "measures")  # folders whose columns need no other name


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
    there = {a: p for a, p in recorded.items() if a.startswith(f"{grid}/") and p.suffix == ".h5"}
    found = {a: p for a, p in there.items() if a in first or p.is_file()}  # else it lies at a URL
    for path in sorted((folder / grid).glob("*/")):
        address, file = f"{grid}/{path.name}", path / f"{slide_id}.h5"
        if address not in recorded and address not in first and file.is_file():
            found[address] = file
    for address in [*filter(found.get, first), *sorted(found.keys() - {*first})]:
        if (columns := column_names(found[address])) is not None:
            yield TileTableFile(address=address, path=found[address], columns=columns)


class EmbeddingRows:
    """Tile embeddings (N, D) on disk; rows are asked for as of an array and read then.

    Memory: the rows that were asked for, and 8 N bytes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_h5(path) as file:
            data = stored_dataset(file, "features", path)
            self.shape: tuple[int, int] = data.shape
            self.dtype: np.dtype[Any] = data.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | int | Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
        wanted = np.arange(len(self))[rows]  # slices, masks and negative numbers as NumPy has them
        with open_h5(self._path) as file:
            data = stored_dataset(file, "features", self._path)
            if isinstance(rows, slice) and rows.step in (None, 1):
                return np.asarray(data[rows])
            order, back = np.unique(wanted, return_inverse=True)  # h5py reads in rising order
            return np.asarray(data[order])[back.reshape(wanted.shape)]

    def __repr__(self) -> str:
        return f"<EmbeddingRows {self.shape} {self.dtype} in {self._path.name!r}>"
