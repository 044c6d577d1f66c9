"""Features of tiles from their cells, alone or beside an embedding, for heads that are trained.

    GRID/features_cells_NAME/ID.h5             densities, areas and shares of the cells in each tile
    GRID/features_ENCODER+cells_NAME/ID.h5     the embedding, then the same

Every slide of a folder gets the same channels: those of all classes of the folder, in alphabetical
order. The numbers are log10(1 + x) of densities and areas, and the shares themselves. No value of a
cohort enters, so training and test sets stay apart. A tile without cells has 0.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.cells.table import PREFIX
from thinsection.errors import StoreError
from thinsection.files.atomic import atomic_path
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.results.choice import say_choice
from thinsection.store.hdf5 import CHECKSUM, DATASETS
from thinsection.store.identity import file_sum
from thinsection.store.ledger import (
    SLIDES,
    SlideLedger,
    StageRecord,
    load_ledger,
    stage_key,
)
from thinsection.store.tile_tables import TILES, EmbeddingRows
from thinsection.store.tiles_h5 import TilesWriter, column_names, read_tiles
from thinsection.tiles.table import Columns

_LOGARITHMIC = ("per_mm2", "area_um2")
_USED = (*_LOGARITHMIC, "share_")
_BLOCK_ROWS = 4096
# attributes of embeddings that do not hold for the joined ones
_LEFT_OUT = (CHECKSUM, DATASETS, "weights_hash", "revision", "encoder")


@dataclass(frozen=True)
class CellFeatures:
    """Features of the cells of a folder: which cells, on which grid, beside which embeddings."""

    out: Path  # results folder
    grid: str
    name: str  # name of the cells
    embedding: str | None  # address of the embeddings; None for the cells alone

    @property
    def counts(self) -> str:
        """Address of the cells in the tiles."""
        return f"{self.grid}/{PREFIX}{self.name}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Addresses of what the features are made from."""
        first = (f"{self.grid}/{TILES}", self.counts)
        return first if self.embedding is None else (*first, self.embedding)

    @property
    def address(self) -> str:
        """Address of the features."""
        label = f"{PREFIX}{self.name}"
        if self.embedding is not None:
            encoder = self.embedding.split("/")[1].removeprefix("features_")
            label = f"{encoder}+{label}"
        return f"{self.grid}/features_{label}"

    def store(self, ledgers: Mapping[str, SlideLedger]) -> dict[str, SlideLedger]:
        """Writes the features of each slide that has the cells; returns the new ledgers.

        Memory: a block of embeddings, and the columns of one slide.

        Raises:
            StoreError: no slide has these cells on this grid.
        """
        slides = [
            slide
            for slide, ledger in ledgers.items()
            if all(need in ledger.stages for need in self.needs)
        ]
        if not slides:
            raise StoreError(
                f"slides must have cells {self.name!r} on the grid {self.grid}, got none; run "
                "again with cells=..."
            )
        channels: set[str] = set()
        for slide in slides:
            stored = column_names(self._file(ledgers[slide], self.counts)) or ()
            channels.update(column for column in stored if column.startswith(_USED))
        return {slide: self._store_one(slide, sorted(channels)) for slide in slides}

    def _file(self, ledger: SlideLedger, address: str) -> Path:
        return self.out / next(iter(ledger.stages[address].files))

    def _store_one(self, slide_id: str, names: Sequence[str]) -> SlideLedger:
        """Writes the features of one slide under its lock, and records them."""
        with hold(self.out / SLIDES / slide_id / LOCK_NAME, on_wait=say_choice):
            ledger = load_ledger(self.out, slide_id)
            ledger.check()
            keys = [ledger.stages[need].key for need in self.needs]
            key = stage_key(of=keys, channels=list(names))
            if ledger.done(self.address, key):
                return ledger
            if self.address in ledger.stages:
                made = ledger.addresses_made_from(self.address)
                ledger = ledger.without((self.address, *made))
                ledger.save()
            name = f"{self.address}/{slide_id}.h5"
            rows = None
            if self.embedding is not None:
                rows = EmbeddingRows(self._file(ledger, self.embedding))
            with atomic_path(self.out / name) as tmp:
                facts = _write_file(tmp, self._file(ledger, self.counts), rows, names)
            record = StageRecord(
                key=key,
                files={name: (self.out / name).stat().st_size},
                needs=self.needs,
                facts=facts,
                sums={name: file_sum(self.out / name)},
            )
            ledger = ledger.with_stage(self.address, record)
            ledger.save()
            return ledger


def cell_channels(
    columns: Columns, names: Sequence[str], num_tiles: int
) -> npt.NDArray[np.float32]:
    """Channels (N, C) of the tiles; 0 for a column that the slide lacks, and without cells."""
    channels = np.zeros((num_tiles, len(names)), dtype=np.float32)
    for place, name in enumerate(names):
        if name not in columns:
            continue
        values = np.nan_to_num(np.asarray(columns[name], dtype=np.float64))
        if name.startswith(_LOGARITHMIC):
            values = np.log10(1 + values)
        channels[:, place] = values
    return channels


def _write_file(
    path: Path, counts: Path, rows: EmbeddingRows | None, names: Sequence[str]
) -> dict[str, object]:
    """Writes the file of one slide; returns its facts."""
    table = read_tiles(counts)
    num_tiles = len(table.coords_l0)
    channels = cell_channels(table.columns, names, num_tiles)
    attributes = dict(table.attributes)
    # another set of channels is another encoder
    digest = hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:8]
    encoder = f"cells-{digest}"
    dim = len(names)
    if rows is not None:
        if not np.array_equal(rows.tiles.coords_l0, table.coords_l0):
            raise StoreError(
                f"cells and embeddings must have the same tiles, got others in {str(counts)!r}; "
                "run again with cells=..."
            )
        stored = rows.tiles.attributes
        encoder = f"{stored.get('encoder', 'unknown')}-{stored.get('weights_hash', '')}+{encoder}"
        attributes = {**stored, **attributes}
        dim += rows.shape[1]
    attributes = {n: value for n, value in attributes.items() if n not in _LEFT_OUT}
    attributes["encoder"] = encoder
    attributes["channels_of_cells"] = list(names)
    with TilesWriter(path, dim=dim, attributes=attributes) as writer:
        for start in range(0, num_tiles, _BLOCK_ROWS):
            part = slice(start, start + _BLOCK_ROWS)
            values = channels[part]
            if rows is not None:
                block = np.asarray(rows[part], dtype=np.float32)
                values = np.concatenate((block, values), axis=1)
            writer.append(table.coords_l0[part], values)
    return {"encoder": encoder, "dim": dim, "num_tiles": num_tiles}
