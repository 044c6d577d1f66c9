"""The feature cache: float32 arrays [N, ...] on disk, lossless, read in bounded memory."""

from thinsection.store.cache.catalogue import (
    default_root,
    list_caches,
    open_or_write,
    remove_cache,
    verify_cache,
)
from thinsection.store.cache.dtypes import Storage
from thinsection.store.cache.format import CacheKey
from thinsection.store.cache.reader import FeatureCache
from thinsection.store.cache.writer import CacheWriter

__all__ = [
    "CacheKey",
    "CacheWriter",
    "FeatureCache",
    "Storage",
    "default_root",
    "list_caches",
    "open_or_write",
    "remove_cache",
    "verify_cache",
]
