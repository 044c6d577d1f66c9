"""The feature cache: float32 arrays [N, ...] on disk, lossless, read back in bounded memory."""

from thinsection.store.cache.format import CacheKey, Storage
from thinsection.store.cache.reader import FeatureCache
from thinsection.store.cache.writer import (
    CacheWriter,
    default_root,
    list_caches,
    open_or_write,
    remove_cache,
    verify_cache,
)

__all__ = [
    "CacheKey",
    "CacheWriter",
    "FeatureCache",
    "Storage",
    "default_root",
    "list_caches",
]
__all__ += ["open_or_write", "remove_cache", "verify_cache"]
