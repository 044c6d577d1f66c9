"""What caches there are, whether they are whole, and how they go away."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import user_cache_dir
from thinsection.errors import StoreError
from thinsection.store.cache import layout
from thinsection.store.cache.feature_cache import FeatureCache
from thinsection.store.cache.layout import Manifest
from thinsection.store.cache.writer import lock_folder

State = Literal["whole", "unfinished", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One folder of a cache root.

    Attributes:
        name: of the folder.
        state: 'whole' says that manifest and size fit; `verify_cache` looks at every byte.
        data_bytes: of features.bin.
        manifest: None where there is none that can be read.
        rows_kept: rows of an unfinished cache that a next run need not compute.
        problem: what is wrong with a damaged one.
    """

    name: str
    state: State
    data_bytes: int
    manifest: Manifest | None = None
    rows_kept: int = 0
    problem: str = ""


def default_root() -> Path:
    """Where caches lie when nobody says: $XDG_CACHE_HOME/thinsection/features, or ~/.cache/..."""
    return user_cache_dir() / "features"


def list_caches(root: Path) -> list[CacheEntry]:
    """Every cache below the root, by name; an absent root has none."""
    if not root.is_dir():
        return []
    return [_entry(p) for p in sorted(root.iterdir()) if (p / layout.DATA).exists()]


def verify_cache(root: Path, name: str) -> list[int]:
    """Reads every byte: the rows whose checksum does not hold. Memory: one row.

    Raises:
        StoreError: no such cache, not finished, truncated, or its manifest is damaged.
    """
    with FeatureCache(_folder(root, name)) as cache:
        return cache.damaged_rows()


def remove_cache(root: Path, name: str) -> int:
    """Removes the cache; how many bytes its data had.

    Raises:
        StoreError: no such cache.
        LockedError: a live process writes it.
    """
    folder = _folder(root, name)
    size = (folder / layout.DATA).stat().st_size
    lock = lock_folder(folder)
    try:
        # without its manifest it is no cache any more, should the rest fail
        (folder / layout.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
    return size


def _folder(root: Path, name: str) -> Path:
    known = [entry.name for entry in list_caches(root)]
    if name not in known:
        listed = ", ".join(known) or "none"
        raise StoreError(f"cache must be one in {str(root)!r}, got {name!r}; there: {listed}")
    return root / name


def _entry(folder: Path) -> CacheEntry:
    size = (folder / layout.DATA).stat().st_size
    if not (folder / layout.MANIFEST).exists():
        kept = sum(chunk.rows for chunk in layout.read_journal(folder))
        return CacheEntry(name=folder.name, state="unfinished", data_bytes=size, rows_kept=kept)
    try:
        with FeatureCache(folder) as cache:
            return CacheEntry(
                name=folder.name, state="whole", data_bytes=size, manifest=cache.manifest
            )
    except StoreError as error:
        return CacheEntry(name=folder.name, state="damaged", data_bytes=size, problem=str(error))
