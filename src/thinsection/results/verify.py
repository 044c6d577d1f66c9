"""Compares files with the checksums that were written beside them."""

from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import StoreError
from thinsection.results.folder import open_results
from thinsection.store.hdf5 import damaged_datasets
from thinsection.store.identity import file_sum
from thinsection.store.ledger import LEDGER_NAME, SLIDES


@dataclass(frozen=True, slots=True)
class Damage:
    """File that is damaged or missing."""

    file: str  # name, relative to the folder
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def verify(folder: Path) -> tuple[int, list[Damage]]:
    """Number of compared checksums, and the files that are damaged or missing.

    For a results folder, every file in a ledger is compared; for another folder, each dataset of
    its .h5 files. For files of earlier versions only the size is compared.

    Memory: 256 KiB, or one dataset.

    Raises StoreError: the folder has neither.
    """
    if not folder.is_dir():
        raise StoreError(f"folder must exist, got {str(folder)!r}; check the path")
    if not (folder / SLIDES).is_dir():
        return _verify_datasets(folder)
    count = 0
    damaged = []
    for slide_id, ledger in open_results(folder).ledgers.items():
        if ledger.damage:
            name = f"{SLIDES}/{slide_id}/{LEDGER_NAME}"
            damaged.append(Damage(name, ledger.damage))
        for record in ledger.stages.values():
            count += len(record.sums)
            for name, size in record.files.items():
                path = folder / name
                if path.is_file():
                    num_bytes = path.stat().st_size
                    if num_bytes != size:
                        problem = f"has {num_bytes} bytes, but {size} were written"
                        damaged.append(Damage(name, problem))
                    elif name in record.sums and file_sum(path) != record.sums[name]:
                        problem = "the bytes differ from those that were written"
                        damaged.append(Damage(name, problem))
                elif name not in ledger.elsewhere.files:
                    damaged.append(Damage(name, "missing"))
    return count, damaged


def _verify_datasets(folder: Path) -> tuple[int, list[Damage]]:
    """Compares the datasets in a folder of HDF5 files from other tools, see `verify`."""
    paths = sorted(folder.rglob("*.h5"))
    if not paths:
        raise StoreError(
            f"folder must contain results or .h5 files, got none in {str(folder)!r}"
        )
    count = 0
    damaged = []
    for path in paths:
        num_compared, problems = damaged_datasets(path)
        count += num_compared
        name = str(path.relative_to(folder))
        damaged += [Damage(name, problem) for problem in problems]
    return count, damaged
