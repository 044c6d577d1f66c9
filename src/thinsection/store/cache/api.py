"""Caches as a whole: computed where they are not there yet, listed, verified, removed."""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from thinsection.config import user_cache_dir
from thinsection.errors import InvalidInputError, StoreError, require
from thinsection.store.cache import format as fmt
from thinsection.store.cache.format import CacheKey, Manifest, Shape
from thinsection.store.cache.reader import DEFAULT_BUDGET_BYTES, FeatureCache
from thinsection.store.cache.writer import CacheWriter, lock_folder

if TYPE_CHECKING:
    from thinsection.store.cache.writer import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One folder of a cache root."""

    name: str
    state: Literal["whole", "unfinished", "damaged"]  # of manifest and size: bytes are not read
    data_bytes: int
    manifest: Manifest | None = None
    rows_kept: int = 0  # of an unfinished cache: what a next run need not compute
    problem: str = ""  # of a damaged one


def open_or_write(
    root: Path,
    key: CacheKey,
    shape: Shape,
    produce: "Callable[[int], Iterable[Rows]]",
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> FeatureCache:
    """The cache of that key, computed first where it does not exist.

    Given the first row that is missing, `produce` yields the features from there on, (B, ...);
    `budget_bytes` is for writing, then for reading. Raises what `CacheWriter` does, and
    InvalidInputError where the cache is of another shape.
    """
    found = FeatureCache.find(root, key, budget_bytes=budget_bytes)
    if found is None:
        with CacheWriter(root, key, shape, budget_bytes=budget_bytes) as writer:
            for rows in produce(writer.rows_kept):
                writer.append(rows)
            writer.finish()
        found = FeatureCache(writer.folder, budget_bytes=budget_bytes)
    if found.shape != tuple(shape):
        found.close()
        raise InvalidInputError(f"cached features must be of shape {shape}, got {found.shape}")
    return found


def default_root() -> Path:
    """Where caches lie when nobody says: $XDG_CACHE_HOME/thinsection/features, or ~/.cache/..."""
    return user_cache_dir() / "features"


def list_caches(root: Path) -> list[CacheEntry]:
    """Every cache below the root, by name; an absent root has none."""
    return [_entry(path.parent) for path in sorted(root.glob(f"*/{fmt.DATA}"))]


def verify_cache(root: Path, name: str) -> list[int]:
    """Reads every byte: the rows whose checksum does not hold. Memory: one row.

    StoreError where there is no such cache, it is not finished, or more than rows is damaged.
    """
    with FeatureCache(_folder(root, name)) as cache:
        return cache.damaged_rows()


def remove_cache(root: Path, name: str) -> int:
    """Removes the cache; how many bytes its data had. LockedError while a process writes it."""
    folder = _folder(root, name)
    size = (folder / fmt.DATA).stat().st_size
    lock = lock_folder(folder)
    try:
        # without its manifest it is no cache any more, should the rest fail
        (folder / fmt.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
        return size
    finally:
        os.close(lock)


def _folder(root: Path, name: str) -> Path:
    known = [entry.name for entry in list_caches(root)]
    got = f"{name!r}; there: {', '.join(known) or 'none'}"
    require(name in known, f"cache must be one in {str(root)!r}", got, error=StoreError)
    return root / name


def _entry(folder: Path) -> CacheEntry:
    name, size = folder.name, (folder / fmt.DATA).stat().st_size
    if not (folder / fmt.MANIFEST).exists():
        kept = sum(chunk.rows for chunk in fmt.read_journal(folder))
        return CacheEntry(name=name, state="unfinished", data_bytes=size, rows_kept=kept)
    try:
        with FeatureCache(folder) as cache:
            return CacheEntry(name=name, state="whole", data_bytes=size, manifest=cache.manifest)
    except StoreError as error:
        return CacheEntry(name=name, state="damaged", data_bytes=size, problem=str(error))
