"""Embeddings of some of a table's tiles that files already contain."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import Embeddings
from thinsection.types import CoordsL0

_BLOCK = 1024  # rows of embeddings per copy

# (coordinates, embeddings) of consecutive tiles
Block = tuple[CoordsL0, Embeddings]


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownRows:
    """Rows in a file of embeddings for the tiles of a table; other tiles go to the encoder.

    Memory: 32 bytes per tile, and `_BLOCK` rows of embeddings at a time.
    """

    path: Path
    rows: npt.NDArray[np.int64]  # (N,) row in the file; -1 if the tile is not in it
    coords_l0: CoordsL0  # (N, 2) coordinates of all tiles

    @property
    def lacking(self) -> npt.NDArray[np.bool_]:
        """Mask (N,) of the tiles that the encoder must process."""
        return np.asarray(self.rows < 0)

    def without(self, lacking: npt.NDArray[np.bool_]) -> "KnownRows":
        """The same file, with further tiles sent to the encoder."""
        rows = np.where(lacking, -1, self.rows)
        return KnownRows(path=self.path, rows=rows, coords_l0=self.coords_l0)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Stored embeddings of the tiles from `start` to `stop`; the file must have all of them."""
        stored = EmbeddingRows(self.path, verify=False)
        for first in range(start, stop, _BLOCK):
            part = slice(first, min(stop, first + _BLOCK))
            yield self.coords_l0[part], stored[self.rows[part]]


def read_known_rows(path: Path, coords_l0: CoordsL0) -> KnownRows:
    """Finds the rows of a file of embeddings for tiles with these corners.

    Raises:
        StoreError: the file is damaged.
    """
    rows_of_file = EmbeddingRows(path)
    rows_of_file.check()
    stored = rows_of_file.tiles.coords_l0.tolist()
    row_of = {tuple(corner): row for row, corner in enumerate(stored)}
    rows = [row_of.get(tuple(corner), -1) for corner in coords_l0.tolist()]
    return KnownRows(
        path=path, rows=np.array(rows, dtype=np.int64), coords_l0=coords_l0
    )


class RowMerger:
    """Merges known rows with rows from the encoder, in the order of the table."""

    def __init__(self, known: KnownRows) -> None:
        self._known = known
        self._encoded_places = np.flatnonzero(known.lacking)
        self._num_encoded = 0  # tiles from the encoder so far
        self._num_merged = 0  # tiles of the table so far

    def add(self, coords_l0: CoordsL0, values: Embeddings) -> Iterator[Block]:
        """Yields the encoder's next rows, with the known rows before and between them."""
        stop = self._num_encoded + len(values)
        places = self._encoded_places[self._num_encoded : stop]
        self._num_encoded = stop
        starts = np.flatnonzero(np.diff(places) > 1) + 1
        for run in np.split(np.arange(len(values)), starts):
            yield from self._known_until(int(places[run[0]]))
            yield coords_l0[run], values[run]
            self._num_merged = int(places[run[-1]]) + 1

    def remaining(self) -> Iterator[Block]:
        """Yields the known rows that follow the encoder's last row."""
        yield from self._known_until(len(self._known.rows))

    def _known_until(self, place: int) -> Iterator[Block]:
        yield from self._known.blocks(self._num_merged, place)
        self._num_merged = max(self._num_merged, place)
