"""Features whose exact dtype is known, and small caches of them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from thinsection.store.cache import CacheKey, CacheWriter
from thinsection.store.cache.format import Manifest

SHAPE = (37, 5, 24)  # no multiple of a batch or a chunk


def key(**changes: str) -> CacheKey:
    values = {
        "encoder": "stub",
        "weights_hash": "w",
        "preprocessing": "p",
        "data_hash": "d",
    }
    return CacheKey(**(values | changes))  # type: ignore[arg-type]


def features(kind: str, shape: tuple[int, ...] = SHAPE, *, seed: int = 0) -> np.ndarray:
    """fp32: full mantissas; bf16 and fp16: exact in that dtype and in no narrower one."""
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    x.reshape(len(x), -1)[:, 0] = -0.0
    if kind == "bf16":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
        x.reshape(len(x), -1)[:, 1] = 1e-30  # fp16 has no such number
        return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return x.astype(np.float16).astype(np.float32) if kind == "fp16" else x


def in_pieces(x: np.ndarray, size: int = 4) -> Iterator[np.ndarray]:
    for start in range(0, len(x), size):
        yield x[start : start + size]


def write(
    root: Path, x: np.ndarray, *, budget_bytes: int = 1 << 20, **changes: str
) -> tuple[Path, Manifest]:
    with CacheWriter(
        root, key(**changes), x.shape, budget_bytes=budget_bytes
    ) as writer:
        for piece in in_pieces(x[writer.rows_kept :]):
            writer.append(piece)
        manifest = writer.finish()
    return writer.folder, manifest


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)
