"""What do cells of other tools cost: from a file to counts in tiles, and their check?

Nuclei of a Parquet file (`--nuclei FILE`; without it, generated ones) are written as GeoParquet and
as GeoJSON of QuPath, once and four times below each other. Each step runs in a fresh process. The
sum over tiles is compared with the number of cells before times are.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import shapely

from benchmarks.harness import arguments, finish
from thinsection.cells.check import check_cells
from thinsection.cells.count import COUNTED, count_cells
from thinsection.cells.place import CellSlide
from thinsection.cells.sources import import_cells
from thinsection.testing import run_and_measure
from thinsection.types import CoordsL0, Size

COPIES = (1, 4)
TILE_PX = 512
_BATCH = 16_384


@dataclass(frozen=True)
class Grid:
    """Tiles side by side over a slide."""

    coords_l0: CoordsL0
    size_l0: Size = (TILE_PX, TILE_PX)


def count(*, path: str, table: str, size: Size) -> dict[str, int]:
    """Imports the cells and counts them in tiles; returns cells, and cells in tiles."""
    slide = CellSlide(slide_id="a", size_l0=size, slide_mpp=(0.5, 0.5))
    cells = import_cells(Path(path), Path(table), name="bench", slide=slide)
    columns, rows = np.meshgrid(
        np.arange(0, size[0], TILE_PX), np.arange(0, size[1], TILE_PX)
    )
    corners = np.stack([columns.ravel(), rows.ravel()], axis=1).astype(np.int64)
    counts = count_cells(cells.batches(COUNTED), Grid(corners), cells.classes)
    return {"cells": cells.num_cells, "in_tiles": int(counts.count.sum())}


def check(*, path: str, **_: Any) -> dict[str, int]:
    """Checks the cells; returns them and the doubled pairs."""
    findings, _ = check_cells(Path(path))
    return {"cells": findings.num_cells, "pairs": findings.num_doubled_pairs}


def generated(path: Path, number: int) -> None:
    """Writes nuclei of 16 points at random places."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(50, 20_000, (number, 1, 2))
    angles = np.linspace(0, 2 * np.pi, 17)[:-1]
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    rings = centers + circle * rng.uniform(4, 12, (number, 1, 1))
    wkb = shapely.to_wkb(shapely.polygons(rings))
    names = rng.choice(["a", "b", "c"], number).tolist()
    table = pa.table({"geometry": pa.array(wkb, pa.binary()), "class_name": names})
    pq.write_table(table, path)


def write_copies(source: Path, folder: Path, copies: int) -> tuple[Size, int]:
    """Writes cells.parquet and cells.geojson with copies below each other; size and number."""
    table = pq.read_table(source, columns=["geometry", "class_name"])
    bounds = shapely.total_bounds(shapely.from_wkb(table["geometry"].to_numpy()))
    height = float(np.ceil(bounds[3] / TILE_PX + 1) * TILE_PX)
    size = (int(bounds[2]) + TILE_PX, int(height * copies))
    writer = pq.ParquetWriter(folder / "cells.parquet", table.schema)
    number = 0
    with writer, (folder / "cells.geojson").open("w") as file:
        file.write('{"type": "FeatureCollection", "features": [')
        for copy in range(copies):
            for batch in table.to_batches(_BATCH):
                polygons = shapely.from_wkb(
                    batch["geometry"].to_numpy(zero_copy_only=False)
                )
                shift = np.array([0, copy * height])
                polygons = shapely.transform(polygons, lambda xy, by=shift: xy + by)
                wkb = pa.array(shapely.to_wkb(polygons), type=pa.binary())
                columns = [wkb, batch["class_name"]]
                writer.write_batch(pa.record_batch(columns, schema=table.schema))
                for polygon, name in zip(polygons, columns[1].to_pylist(), strict=True):
                    feature = {
                        "type": "Feature",
                        "id": str(number),
                        "geometry": shapely.geometry.mapping(polygon),
                        "properties": {
                            "objectType": "detection",
                            "classification": {"name": name, "color": [200, 0, 0]},
                        },
                    }
                    file.write(("," if number else "") + json.dumps(feature))
                    number += 1
        file.write("]}")
    return size, number


def measure(function: str, times: int, **kwargs: Any) -> dict[str, Any]:
    """Least CPU-seconds and median peak of some runs, each in a fresh process."""
    runs = [
        run_and_measure("benchmarks.bench_cells", function, **kwargs)
        for _ in range(times)
    ]
    return {
        **runs[0].result,
        "cpu_s": round(min(run.cpu_seconds for run in runs), 2),
        "peak_rss_mb": round(statistics.median(run.peak_bytes for run in runs) / 1e6),
    }


def main() -> None:
    """All steps for each number of copies; `--smoke`: few generated nuclei."""
    args = arguments(__doc__ or "", nuclei="Parquet file with geometry and class_name")
    results: dict[str, Any] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(args.nuclei) if args.nuclei else folder / "nuclei.parquet"
        if not args.nuclei:
            generated(source, 2000 if args.smoke else 100_000)
        for copies in COPIES:
            size, number = write_copies(source, folder, copies)
            rows = {}
            for step, function, file in (
                ("parquet to counts", "count", "cells.parquet"),
                ("geojson to counts", "count", "cells.geojson"),
                ("check of parquet", "check", "cells.parquet"),
            ):
                row = measure(
                    function,
                    1 if args.smoke or copies > 1 else 3,
                    path=str(folder / file),
                    table=str(folder / "table.parquet"),
                    size=size,
                )
                if row["cells"] != number or row.get("in_tiles", number) != number:
                    raise AssertionError(
                        f"each of {number} cells must be counted once, got {row} of {file}"
                    )
                rows[step] = row
            results[f"{copies}x"] = rows
    results["nuclei"] = "of a file" if args.nuclei else "generated"
    finish("bench_cells", results, args)


if __name__ == "__main__":
    main()
