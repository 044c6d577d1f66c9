"""Files that several tests of this folder start from."""

from pathlib import Path

import h5py
import numpy as np


def write_features(path: Path, *, num_tiles: int, seed: int) -> None:
    """Tile embeddings as TRIDENT writes them, with seeded values."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["features"] = rng.normal(size=(num_tiles, 24)).astype(np.float32)
        file["coords"] = np.stack(
            [np.arange(num_tiles) * 512, np.full(num_tiles, 512)], axis=1
        )
        file["coords"].attrs["patch_size_level0"] = 512
