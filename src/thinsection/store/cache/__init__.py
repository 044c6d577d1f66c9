"""The feature cache: float32 arrays [N, ...] on disk, lossless, read back in bounded memory."""

from thinsection.store.cache.admin import (
    CacheEntry,
    default_root,
    list_caches,
    remove_cache,
    verify_cache,
)
from thinsection.store.cache.feature_cache import FeatureCache, open_or_write
from thinsection.store.cache.key import CacheKey, hash_files
from thinsection.store.cache.writer import CacheWriter

__all__ = [
    "CacheEntry",
    "CacheKey",
    "CacheWriter",
    "FeatureCache",
    "default_root",
    "hash_files",
    "list_caches",
    "open_or_write",
    "remove_cache",
    "verify_cache",
]
