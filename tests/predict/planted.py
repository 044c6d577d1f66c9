"""Cohorts of embeddings whose class 1 % of the tiles carries; and others."""

from pathlib import Path

import numpy as np

from thinsection.store.tiles_h5 import TilesWriter


def write_embeddings(path: Path, x: np.ndarray) -> None:
    """A file as `embed` writes it: tiles of 256 px in rows of ten."""
    n = len(x)
    coords = (
        np.stack([np.arange(n) % 10, np.arange(n) // 10], axis=1).astype(np.int64) * 256
    )
    attributes = {"patch_size": 256, "patch_size_level0": 256}
    with TilesWriter(path, dim=x.shape[1], attributes=attributes) as writer:
        writer.append(coords, x.astype(np.float32))


def planted(
    root: Path, *, cases: int, tiles: tuple[int, int] = (200, 400), dim: int = 16, seed: int = 0,
    shift: float = 8.0, permuted: bool = False,
) -> Path:  # fmt: skip
    """A folder of s000.h5, ... and labels.csv; 1 % of a tumour's tiles lie `shift` off."""
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    way = rng.normal(size=dim)
    way /= np.linalg.norm(way)
    labels = np.arange(cases) % 2
    for i in range(cases):
        size = int(np.exp(rng.uniform(*np.log(tiles))))
        x = rng.normal(size=(size, dim))
        if labels[i]:
            x[rng.choice(size, max(1, size // 100), replace=False)] += shift * way
        write_embeddings(root / f"s{i:03}.h5", x)
    told = rng.permutation(labels) if permuted else labels
    rows = [f"s{i:03},{'tumour' if told[i] else 'normal'}" for i in range(cases)]
    (root / "labels.csv").write_text("\n".join(["slide_id,label", *rows]) + "\n")
    return root
