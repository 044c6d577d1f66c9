"""Files of columns of the caller: written under the lock of their slide, and listed in its ledger.

A column is a stage, made from the tile grid: a run that makes the grid again with other tiles
removes the column too. Its key is a hash of the tiles and their values.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import (
    InvalidInputError,
    OutputError,
    OverwriteError,
    StoreError,
)
from thinsection.files.atomic import atomic_path
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.results.columns import OwnColumn
from thinsection.store.hdf5 import CHECKSUM, DATASETS
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, load_ledger
from thinsection.store.outcome import COLUMN_FACT
from thinsection.store.tile_tables import OWN_COLUMN, TILES
from thinsection.store.tiles_h5 import TilesFile, TilesWriter


def column_address(grid: str, name: str) -> str:
    """Address of a column's stage: 'GRID/column_NAME'."""
    return f"{grid}/{OWN_COLUMN}{name}"


def used_colors(ledgers: Iterable[SlideLedger], address: str) -> dict[str, str]:
    """Colours by category that the slides of a folder have in a column."""
    colors: dict[str, str] = {}
    for ledger in ledgers:
        record = ledger.stages.get(address)
        described = {} if record is None else record.facts.get(COLUMN_FACT, {})
        pairs = zip(described.get("categories", ()), described.get("colors", ()))
        for word, color in pairs:
            colors.setdefault(str(word), str(color))
    return colors


@dataclass(frozen=True, kw_only=True)
class ColumnToStore:
    """A checked column of one slide, and the tiles that it was checked against."""

    out: Path  # results folder
    slide_id: str
    grid: str
    column: OwnColumn
    tiles: TilesFile
    tiles_key: str  # key of the tiles in the ledger

    @property
    def address(self) -> str:
        """Address of the column's stage."""
        return column_address(self.grid, self.column.name)

    @property
    def file(self) -> str:
        """Name of the column's file in the results folder."""
        return f"{self.address}/{self.slide_id}.h5"

    @property
    def key(self) -> str:
        """Key of the column in the ledger."""
        return self.column.key(self.tiles.coords_l0)

    def is_stored(self, ledger: SlideLedger) -> bool:
        """True if the ledger has the column with these values."""
        return ledger.done(self.address, self.key)

    def check_free(self, ledger: SlideLedger, *, overwrite: bool) -> None:
        """Raises OverwriteError: other values are stored under this name."""
        is_taken = self.address in ledger.stages or (self.out / self.file).exists()
        if is_taken and not overwrite and not self.is_stored(ledger):
            raise OverwriteError(
                f"column {self.column.name!r} must be new or have the same values, got other "
                f"values in {self.address} of {self.slide_id!r}; pass overwrite=True to replace "
                "them, or choose another name"
            )


def store_column(
    item: ColumnToStore, *, overwrite: bool, on_wait: Callable[[str], None]
) -> SlideLedger:
    """Writes a column of one slide and records it; nothing is written for equal values.

    Returns the new ledger.

    Raises:
        OverwriteError: other values are stored, and `overwrite` is False.
        StoreError: the tiles were made again since the column was checked.
        OutputError: the folder cannot be written.
    """
    out = item.out
    lock = out / SLIDES / item.slide_id / LOCK_NAME
    with _writable(out), hold(lock, on_wait=on_wait):
        ledger = load_ledger(out, item.slide_id)
        ledger.check()
        tiles = ledger.stages.get(f"{item.grid}/{TILES}")
        if tiles is None or tiles.key != item.tiles_key:
            raise StoreError(
                f"tiles of {item.slide_id!r} must stay the same while a column is written, got "
                "tiles of another run; open the folder again"
            )
        if item.is_stored(ledger):
            return ledger
        item.check_free(ledger, overwrite=overwrite)
        path = out / item.file
        # a process that is killed from here on leaves no column, and no old file as a new one
        path.unlink(missing_ok=True)
        if item.address in ledger.stages:
            removed = (item.address, *ledger.addresses_made_from(item.address))
            ledger = ledger.without(removed)
            ledger.save()
        _write_file(path, item)
        record = StageRecord(
            key=item.key,
            files={item.file: path.stat().st_size},
            needs=(f"{item.grid}/{TILES}",),
            facts=item.column.facts(),
            sums={item.file: file_sum(path)},
        )
        ledger = ledger.with_stage(item.address, record)
        ledger.save()
        return ledger


def _write_file(path: Path, item: ColumnToStore) -> None:
    """Writes the file of a column, with the attributes of its tiles."""
    attributes = {
        name: value
        for name, value in item.tiles.attributes.items()
        if name not in (CHECKSUM, DATASETS)
    }
    column = item.column
    with (
        atomic_path(path) as tmp,
        TilesWriter(tmp, dim=0, attributes=attributes) as writer,
    ):
        writer.append(item.tiles.coords_l0, None)
        writer.add_column(column.name, column.values, column.categories)


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    """Turns the errors of a folder that cannot be written into one that names the remedy."""
    try:
        yield
    except (OverwriteError, InvalidInputError):
        raise
    except (StoreError, OSError) as error:
        cause = error.__cause__ if isinstance(error, StoreError) else error
        if (
            not isinstance(cause, PermissionError)
            and getattr(cause, "errno", 0) != errno.EROFS
        ):
            raise
        raise OutputError(
            f"results folder must be writable, got {str(out)!r}, which only its owner may "
            "change; join it into a folder of yours, thinsection.run.merge.merge_results("
            f'[{str(out)!r}], out="mine") or `thinsection merge {out} --out mine`, and write '
            "the column there"
        ) from error
