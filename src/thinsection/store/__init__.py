"""Results on disk: names, dtypes, chunks, the feature cache, the resume ledger.

The cache is resolved on first use: most of what writes a file needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinsection.store.cache import CacheKey as CacheKey
    from thinsection.store.cache import FeatureCache as FeatureCache

__all__ = [
    "CacheKey",
    "FeatureCache",
]


def __getattr__(name: str) -> Any:
    if name in ("CacheKey", "FeatureCache"):
        return getattr(import_module("thinsection.store.cache"), name)
    raise AttributeError(f"module 'thinsection.store' has no attribute {name!r}")
