"""Caches in a root folder: opens or writes, lists, verifies and removes them."""

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from thinsection.config import user_cache_dir
from thinsection.errors import InvalidInputError, StoreError
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
    data_bytes: int
    # state according to manifest and file size; the data are not read
    state: Literal["whole", "unfinished", "damaged"]
    manifest: Manifest | None = None
    rows_kept: int = 0  # rows of an unfinished cache that the next run keeps
    problem: str = ""  # what is wrong with a damaged cache


def open_or_write(
    root: Path,
    key: CacheKey,
    shape: Shape,
    produce: "Callable[[int], Iterable[Rows]]",
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> FeatureCache:
    """Opens the cache of a key; computes it first if it does not exist.

    Args:
        root: folder of all caches.
        key: identity of the features.
        shape: (N, ...) of the features.
        produce: yields features (B, ...), beginning at the given row.
        budget_bytes: memory for reading and for writing.

    Raises:
        InvalidInputError: the cache has another shape.
        StoreError: as for `CacheWriter`, which may also raise its other errors.
    """
    cache = FeatureCache.find(root, key, budget_bytes=budget_bytes)
    if cache is None:
        with CacheWriter(root, key, shape, budget_bytes=budget_bytes) as writer:
            for rows in produce(writer.rows_kept):
                writer.append(rows)
            writer.finish()
        cache = FeatureCache(writer.folder, budget_bytes=budget_bytes)
    if cache.shape != tuple(shape):
        cache.close()
        raise InvalidInputError(
            f"cached features must be of shape {shape}, got {cache.shape}"
        )
    return cache


def default_root() -> Path:
    """Folder of caches: $XDG_CACHE_HOME/thinsection/features, or ~/.cache/..."""
    return user_cache_dir() / "features"


def list_caches(root: Path) -> list[CacheEntry]:
    """Every cache below the root, by name; an empty list if there is no root folder."""
    return [_describe(path.parent) for path in sorted(root.glob(f"*/{fmt.DATA}"))]


def _describe(folder: Path) -> CacheEntry:
    data_bytes = (folder / fmt.DATA).stat().st_size
    if not (folder / fmt.MANIFEST).exists():
        return CacheEntry(
            name=folder.name,
            data_bytes=data_bytes,
            state="unfinished",
            rows_kept=sum(chunk.rows for chunk in fmt.read_journal(folder)),
        )
    try:
        with FeatureCache(folder) as cache:
            return CacheEntry(
                name=folder.name,
                data_bytes=data_bytes,
                state="whole",
                manifest=cache.manifest,
            )
    except StoreError as error:
        return CacheEntry(
            name=folder.name,
            data_bytes=data_bytes,
            state="damaged",
            problem=str(error),
        )


def verify_cache(root: Path, name: str) -> list[int]:
    """Reads every byte; returns the rows whose checksum is wrong.

    Raises:
        StoreError: there is no such cache, or it has other damage.
    """
    with FeatureCache(_cache_folder(root, name)) as cache:
        return cache.damaged_rows()


def remove_cache(root: Path, name: str) -> int:
    """Removes a cache; returns the size of its data in bytes.

    Raises:
        LockedError: a process is writing it.
        StoreError: there is no such cache.
    """
    folder = _cache_folder(root, name)
    size = (folder / fmt.DATA).stat().st_size
    with ExitStack() as stack:
        stack.callback(os.close, lock_folder(folder))
        # without a manifest it is no longer a cache, even if the next step fails
        (folder / fmt.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return size


def _cache_folder(root: Path, name: str) -> Path:
    names = [path.parent.name for path in sorted(root.glob(f"*/{fmt.DATA}"))]
    if name not in names:
        raise StoreError(
            f"cache must be one of those in {str(root)!r}, got {name!r}; there are: "
            f"{', '.join(names) or 'none'}"
        )
    return root / name
