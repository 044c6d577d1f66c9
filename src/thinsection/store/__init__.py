"""Results on disk: names, dtypes, chunks, atomic writes, the feature cache, the resume ledger."""

from thinsection.store.atomic import atomic_path, write_bytes, write_json, write_text
from thinsection.store.cache import CacheKey, FeatureCache

__all__ = [
    "CacheKey",
    "FeatureCache",
    "atomic_path",
    "write_bytes",
    "write_json",
    "write_text",
]
