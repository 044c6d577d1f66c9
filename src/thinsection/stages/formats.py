"""Formats of tile embeddings beside Thinsection's own HDF5, such as `--write tsv`.

Another package adds a format by an entry point of the group `thinsection.formats` for a function
`(EmbeddingTable, Path) -> None` with attributes `suffixes`, `needs` and `extra`, or an `Entry`.
"""

import csv
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.files.atomic import safe_cell
from thinsection.registry import Entry, Registry
from thinsection.tiles.table import Column
from thinsection.types import CoordsL0


@dataclass(frozen=True, kw_only=True)
class EmbeddingTable:
    """Embeddings of one slide, as a format receives them."""

    slide_id: str
    patient_id: str | None  # from the cohort, like the label
    label: str | None
    coords_l0: CoordsL0  # int64 (N, 2)
    tile_embeddings: npt.NDArray[np.floating]  # float32 or float16 (N, D)
    columns: Mapping[str, Column]  # name -> (N,), a value per tile


Format = Callable[[EmbeddingTable, Path], None]


def write_tsv(table: EmbeddingTable, path: Path) -> None:
    """A row per tile: embedding values, submitter id, cancer type, `{x}x_{y}y`; with a header.

    Values are the shortest decimals that read back to the same float32.
    """
    features = table.tile_embeddings.astype(np.float32, copy=False)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        names = [f"f{i}" for i in range(features.shape[1])]
        writer.writerow([*names, "submitter_id", "cancer_type", "tile"])
        submitter = safe_cell(table.patient_id or table.slide_id)
        kind = safe_cell(table.label or "")
        for row, (x, y) in zip(features, table.coords_l0.tolist()):
            # str of a NumPy float32 is its shortest exact decimal
            writer.writerow([*map(str, row), submitter, kind, f"{x}x_{y}y"])


def write_parquet(table: EmbeddingTable, path: Path) -> None:
    """Columns slide_id, x_l0, y_l0, per-tile columns, and `embedding` (a fixed-size list)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = np.ascontiguousarray(table.tile_embeddings, dtype=np.float32)
    x, y = table.coords_l0.T
    columns = {
        "slide_id": [table.slide_id] * len(x),
        "x_l0": x,
        "y_l0": y,
        **table.columns,
    }
    embedding = pa.FixedSizeListArray.from_arrays(
        pa.array(values.ravel()), values.shape[1]
    )
    arrays = {name: pa.array(column) for name, column in columns.items()}
    pq.write_table(pa.table(arrays | {"embedding": embedding}), path)


def write_zarr(table: EmbeddingTable, path: Path) -> None:
    """A zipped zarr v3 group with arrays `coords` and `features`."""
    import zarr

    with closing(zarr.storage.ZipStore(path, mode="w")) as store:
        group = zarr.create_group(store, attributes={"slide_id": table.slide_id})
        group.create_array("coords", data=table.coords_l0)
        group.create_array("features", data=table.tile_embeddings)


def _exported(name: str, help: str, target: Format, suffix: str, needs: str) -> Entry:
    """Format that needs a package of an extra."""
    return Entry(
        name=name,
        help=help,
        target=target,
        suffixes=(suffix,),
        needs=(needs,),
    )


PLAIN = ("tsv", "zarr")  # formats without columns beside the embeddings
FORMATS: Registry[Format] = Registry(
    "output format",
    "thinsection.formats",
    (
        Entry(
            name="tsv",
            help="A row per tile, as text.",
            target=write_tsv,
            suffixes=(".tsv",),
        ),
        _exported(
            "parquet", "Columns of Apache Arrow.", write_parquet, ".parquet", "pyarrow"
        ),
        _exported("zarr", "A zipped zarr v3 group.", write_zarr, ".zarr.zip", "zarr"),
    ),
)
