"""`slide_embedding.h5`: one vector per slide, under the name that TRIDENT's slide features have."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from thinsection.errors import StoreError
from thinsection.files.atomic import atomic_path
from thinsection.store.tiles_h5 import open_h5


@dataclass(frozen=True, kw_only=True)
class SlideEmbeddingFile:
    """The content of the file.

    Attributes:
        slide_embedding: float32 (D,).
        attributes: name, slide_encoder, weights_hash, num_tiles, key.
    """

    slide_embedding: npt.NDArray[np.float32]
    attributes: Mapping[str, Any]


def write_slide_embedding(
    path: Path, slide_embedding: npt.NDArray[np.floating], attributes: Mapping[str, Any]
) -> None:
    """Writes /features (D,) float32 with its attributes, atomically."""
    with atomic_path(path) as tmp, h5py.File(tmp, "w") as file:
        data = file.create_dataset("features", data=slide_embedding.astype(np.float32))
        for name, value in attributes.items():
            data.attrs[name] = value


def read_slide_embedding(path: Path) -> SlideEmbeddingFile:
    """A slide embedding of ours or of TRIDENT's.

    Raises:
        StoreError: missing, not HDF5, or without a vector `features`.
    """
    with open_h5(path) as file:
        if "features" not in file or file["features"].size != max(file["features"].shape):
            raise StoreError(f"slide embedding must hold a vector 'features' in {str(path)!r}")
        vector = np.ravel(file["features"][...]).astype(np.float32, copy=False)
        return SlideEmbeddingFile(slide_embedding=vector, attributes=dict(file["features"].attrs))
