"""Small labelled data whose classes overlap, so that a wrong rule changes predictions."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from thinsection.probe.data.sets import LabelledRows, TileSet, make_split

FEATURES = Path("256px_0.5mpp") / "features_toy"  # of a results folder


def blobs(
    n_train: int = 150,
    n_val: int = 90,
    *,
    dim: int = 12,
    classes: int = 3,
    seed: int = 0,
) -> TileSet:
    """Gaussian classes, unequal in size, off the origin, far enough apart to be learnt."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, dim)) * 0.9 + 3.0
    share = np.arange(1, classes + 1) + 1.0

    def part(n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.choice(classes, n, p=share / share.sum())
        labels[:classes] = np.arange(classes)
        return (centres[labels] + rng.normal(size=(n, dim))).astype(np.float32), labels

    names = tuple(f"class {c}" for c in range(classes))
    train, val = make_split(*part(n_train)), make_split(*part(n_val))
    return TileSet(name="blobs", class_names=names, train=train, val=val)


def split_tiles(rows: LabelledRows) -> TileSet:
    """Rows of embeddings, split as a probe gets them."""
    assert rows.embeddings is not None
    train, val = rows.fold
    return rows.tile_set((rows.embeddings[train], rows.embeddings[val]))


def write_tiles_h5(
    path: Path,
    coords: np.ndarray,
    features: np.ndarray,
    *,
    leading_axis: bool = False,
    **attrs: Any,
) -> Path:
    """A feature file as TRIDENT writes it: attributes on `coords`, rows chunked one by one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["coords"] = coords.astype(np.int64)
        stored = features[None] if leading_axis else features
        file.create_dataset("features", data=stored, chunks=(1, *stored.shape[1:]))
        file["coords"].attrs.update({"patch_size_level0": 512, **attrs})
    return path


def results_folder(root: Path) -> Path:
    """What every run leaves, before any embedding."""
    for name in ("slides", "records"):
        (root / "run" / name).mkdir(parents=True)
    return root / "run"


def two_regions(root: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """(results folder with one slide's features, GeoJSON of its left and right half)."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(14) * 512, np.arange(9) * 512)
    coords = np.stack([x.ravel(), y.ravel()], axis=1)
    right = (coords[:, 0] >= 7 * 512).astype(int)
    features = rng.normal(size=(len(coords), 16)) + rng.normal(size=(2, 16))[right]
    path = results_folder(root) / FEATURES / "slide-1.h5"
    write_tiles_h5(path, coords, features.astype(np.float32))
    regions = {
        "type": "FeatureCollection",
        "features": [
            rectangle((0, 0, 7 * 512, 9 * 512), "stroma"),
            rectangle(
                (7 * 512, 0, 13 * 512, 9 * 512), "tumour"
            ),  # the last column has no label
        ],
    }
    path = root / "regions.geojson"
    path.write_text(json.dumps(regions))
    return root / "run", path


def rectangle(
    box: tuple[int, int, int, int], label: str, **properties: Any
) -> dict[str, Any]:
    """A GeoJSON annotation of x0, y0, x1, y1, as QuPath writes it."""
    x0, y0, x1, y1 = box
    ring = [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"classification": {"name": label}, **properties},
    }
