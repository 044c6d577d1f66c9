"""Compares files with the checksums that were written beside them."""

from collections.abc import Iterator
from pathlib import Path

from thinsection.errors import StoreError
from thinsection.pipeline.folder import open_results
from thinsection.store.hdf5 import damaged_datasets
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord


def verify(folder: Path) -> tuple[int, list[str]]:
    """Number of compared checksums, and a line for each file that is damaged or missing.

    For a results folder, every file in a ledger is compared; for another folder, each dataset of
    its .h5 files. For files of earlier versions only the size is compared.

    Memory: 256 KiB, or one dataset.

    Raises StoreError: the folder has neither.
    """
    if not (folder / SLIDES).is_dir():
        return _verify_datasets(folder)
    count = 0
    lines = []
    for slide_id, ledger in open_results(folder).ledgers.items():
        if ledger.damage:
            lines.append(f"{slide_id}: {ledger.damage}")
        for record in ledger.stages.values():
            count += len(record.sums)
            lines += _damaged_files(folder, ledger, record)
    return count, lines


def _verify_datasets(folder: Path) -> tuple[int, list[str]]:
    """Compares the datasets in a folder of HDF5 files from other tools, see `verify`."""
    paths = sorted(folder.rglob("*.h5"))
    if not paths:
        raise StoreError(
            f"folder must contain results or .h5 files, got none in {str(folder)!r}"
        )
    count = 0
    lines = []
    for path in paths:
        num_compared, damaged = damaged_datasets(path)
        count += num_compared
        lines += damaged
    return count, lines


def _damaged_files(
    folder: Path, ledger: SlideLedger, record: StageRecord
) -> Iterator[str]:
    """One line for each file of a stage that differs from its checksum."""
    for name, size in record.files.items():
        path = folder / name
        if not path.is_file():
            if name not in ledger.elsewhere.files:
                yield f"{name}: missing"
        elif path.stat().st_size != size:
            yield f"{name}: has {path.stat().st_size} bytes, but {size} were written"
        elif name in record.sums and file_sum(path) != record.sums[name]:
            yield f"{name}: the bytes differ from those that were written"
