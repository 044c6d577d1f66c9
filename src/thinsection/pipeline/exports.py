"""Further formats of a slide's embeddings, written from its tiles.h5 when asked for."""

import csv
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from thinsection.errors import MissingDependencyError
from thinsection.files.atomic import atomic_path
from thinsection.slide.cohort import SlideEntry
from thinsection.stages import naming
from thinsection.store.tiles_h5 import TilesFile, read_tiles


def check_formats(formats: Sequence[str]) -> None:
    """Refuses formats whose package is not here.

    Raises:
        MissingDependencyError: says what to install.
    """
    for name in formats:
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"--write {name} needs {package}; pip install 'thinsection[export]'"
            )


def write_extra(entry: SlideEntry, folder: Path, formats: Sequence[str]) -> list[str]:
    """Writes the formats and returns the names of the files.

    Memory: the slide's embeddings, 4 N D bytes.
    """
    if not formats:
        return []
    tiles = read_tiles(folder / naming.TILES)
    names = []
    for name in formats:
        suffix, write = _WRITERS[name]
        file_name = f"tiles{suffix}"
        with atomic_path(folder / file_name) as tmp:
            write(entry, tiles, tmp)
        names.append(file_name)
    return names


def write_tsv(entry: SlideEntry, tiles: TilesFile, path: Path) -> None:
    """A row per tile: embedding values, submitter id, cancer type, `{x}x_{y}y`; with a header.

    Values are the shortest decimals that read back to the same float32.
    """
    assert tiles.features is not None
    features = tiles.features.astype(np.float32, copy=False)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        names = [f"f{i}" for i in range(features.shape[1])]
        writer.writerow([*names, "submitter_id", "cancer_type", "tile"])
        submitter, kind = entry.patient_id or entry.slide_id, entry.label or ""
        for row, (x, y) in zip(features, tiles.coords_l0.tolist()):
            # str of a NumPy float32 is its shortest exact decimal
            writer.writerow([*map(str, row), submitter, kind, f"{x}x_{y}y"])


def write_parquet(entry: SlideEntry, tiles: TilesFile, path: Path) -> None:
    """Columns slide_id, x_l0, y_l0, per-tile columns, and `embedding` (a fixed-size list)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert tiles.features is not None
    flat = pa.array(np.ascontiguousarray(tiles.features, dtype=np.float32).ravel())
    columns = {
        "slide_id": pa.array([entry.slide_id] * len(tiles.coords_l0)),
        "x_l0": pa.array(tiles.coords_l0[:, 0]),
        "y_l0": pa.array(tiles.coords_l0[:, 1]),
        **{name: pa.array(values) for name, values in tiles.columns.items()},
        "embedding": pa.FixedSizeListArray.from_arrays(flat, tiles.features.shape[1]),
    }
    pq.write_table(pa.table(columns), path)


def write_zarr(entry: SlideEntry, tiles: TilesFile, path: Path) -> None:
    """A zipped zarr v3 group with arrays `coords` and `features`."""
    import zarr

    assert tiles.features is not None
    store = zarr.storage.ZipStore(path, mode="w")
    try:
        group = zarr.create_group(store, attributes={"slide_id": entry.slide_id})
        group.create_array("coords", data=tiles.coords_l0)
        group.create_array("features", data=tiles.features)
    finally:
        store.close()


_WRITERS: dict[str, tuple[str, Callable[[SlideEntry, TilesFile, Path], None]]] = {
    "tsv": (".tsv", write_tsv),
    "parquet": (".parquet", write_parquet),
    "zarr": (".zarr.zip", write_zarr),
}
_PACKAGES = {"parquet": "pyarrow", "zarr": "zarr"}
