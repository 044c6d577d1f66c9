"""What do cells of other tools cost: from a file to counts in tiles, their check and export?

Nuclei of a Parquet file (`--nuclei FILE`; without it, generated ones) are written as GeoParquet and
as GeoJSON of QuPath, once and, with `--copies 1,4`, four times on the same slide: each copy is
moved a little. Ellipses are drawn in a label image. Each step runs in a fresh process. The sum over
tiles is compared with the number of cells before times are. Beside each figure stands the limit
that it must not exceed.
"""

import json
import shutil
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
from thinsection.cells.count import COUNTED, count_cells
from thinsection.cells.place import CellSlide
from thinsection.cells.sources import import_cells
from thinsection.testing import run_and_measure
from thinsection.types import CoordsL0, Size

SHIFT_PX = (37, 23)  # of each further copy
MAX_COPIES = 10  # for which a slide has room
TILE_PX = 512
LABEL_PITCH_PX = 40
# CPU-seconds for the 592,349 nuclei of histolytics 0.3.0, and MB for any number of copies
LIMITS = {
    "parquet to counts": (3, 300),
    "geojson to counts": (25, 250),
    "anndata": (20, 500),
    "anndata with 6 neighbours": (20, 500),
}
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
    # imported here, as in the next functions: a count does not need it, and has its own peak
    from thinsection.cells.check import check_cells

    findings, _ = check_cells(Path(path))
    return {"cells": findings.num_cells, "pairs": findings.num_doubled_pairs}


def export(*, folder: str, neighbors: int, **_: Any) -> dict[str, int]:
    """Exports the cells of a results folder as AnnData."""
    from thinsection.exchange.cells import export_cells_anndata

    export_cells_anndata(folder, f"{folder}-h5ad", neighbors=neighbors)
    import h5py

    with h5py.File(f"{folder}-h5ad/a.h5ad") as file:
        return {"cells": len(file["X"])}


def results_with(table: Path, folder: Path) -> Path:
    """Results folder of a small drawn slide, in which the table of its cells is another one.

    The tiles are those of the small slide, so nearly all cells lie in none.
    """
    # imported here: these modules would count in the peak memory of the other steps
    from thinsection.run.run import run
    from thinsection.stages.config import RunConfig
    from thinsection.testing.synthetic import write_he_slide

    size = (1700, 1300)
    write_he_slide(folder / "a.svs", size, seed=7)
    small = folder / "small" / "a.parquet"
    small.parent.mkdir()
    generated(small, 500, extent=1200)
    out = folder / "results"
    config = RunConfig()
    run(
        [folder / "a.svs"],
        out=out,
        config=config,
        until="tiles",
        cells=[str(small.parent)],
    )
    shutil.copyfile(table, out / "cells" / "small" / "a.parquet")
    return out


def write_labels(path: Path, number: int) -> tuple[Size, int]:
    """Writes a label image of ellipses of 8 to 18 px radius; returns its size and their number."""
    rng = np.random.default_rng(0)
    columns = int(np.sqrt(number))
    rows = -(-number // columns)
    size = (columns * LABEL_PITCH_PX, rows * LABEL_PITCH_PX)
    labels = np.zeros(size[::-1], dtype=np.uint32)
    y, x = np.mgrid[:LABEL_PITCH_PX, :LABEL_PITCH_PX] - LABEL_PITCH_PX / 2
    for cell in range(rows * columns):
        angle = rng.uniform(0, np.pi)
        along = (x * np.cos(angle) + y * np.sin(angle)) / rng.uniform(8, 18)
        across = (y * np.cos(angle) - x * np.sin(angle)) / rng.uniform(5, 12)
        top = cell // columns * LABEL_PITCH_PX
        left = cell % columns * LABEL_PITCH_PX
        box = labels[top : top + LABEL_PITCH_PX, left : left + LABEL_PITCH_PX]
        box[along**2 + across**2 < 1] = cell + 1
    import tifffile

    tifffile.imwrite(path, labels, tile=(512, 512), compression="zlib")
    return size, rows * columns


def generated(path: Path, number: int, *, extent: int = 20_000) -> None:
    """Writes nuclei of 16 points at random places."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(50, extent, (number, 1, 2))
    angles = np.linspace(0, 2 * np.pi, 17)[:-1]
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    rings = centers + circle * rng.uniform(4, 12, (number, 1, 1))
    wkb = shapely.to_wkb(shapely.polygons(rings))
    names = rng.choice(["a", "b", "c"], number).tolist()
    table = pa.table({"geometry": pa.array(wkb, pa.binary()), "class_name": names})
    pq.write_table(table, path)


def write_copies(source: Path, folder: Path, copies: int) -> tuple[Size, int]:
    """Writes cells.parquet and cells.geojson with copies on one slide; its size and the number."""
    table = pq.read_table(source, columns=["geometry", "class_name"])
    bounds = shapely.total_bounds(shapely.from_wkb(table["geometry"].to_numpy()))
    # the same slide for every number of copies
    reach = np.ceil(bounds[2:] + MAX_COPIES * np.array(SHIFT_PX)).astype(int)
    size = (int(reach[0]), int(reach[1]))
    writer = pq.ParquetWriter(folder / "cells.parquet", table.schema)
    number = 0
    with writer, (folder / "cells.geojson").open("w") as file:
        file.write('{"type": "FeatureCollection", "features": [')
        for copy in range(copies):
            for batch in table.to_batches(_BATCH):
                polygons = shapely.from_wkb(
                    batch["geometry"].to_numpy(zero_copy_only=False)
                )
                shift = copy * np.array(SHIFT_PX)
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


def measured_row(
    step: str,
    number: int,
    function: str,
    times: int,
    *,
    several: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Figures of one step with their limits, after a look at its result."""
    row = measure(function, times, **kwargs)
    if row["cells"] != number or row.get("in_tiles", number) != number:
        raise AssertionError(f"{step} must have each of {number} cells once, got {row}")
    if step in LIMITS:
        limit_cpu_s, row["limit_peak_rss_mb"] = LIMITS[step]
        if not several:
            row["limit_cpu_s"] = limit_cpu_s
    return row


def main() -> None:
    """All steps for each number of copies; `--smoke`: few generated nuclei."""
    args = arguments(
        __doc__ or "",
        nuclei="Parquet file with geometry and class_name",
        copies="numbers of copies, such as 1,4",
    )
    copied = args.copies or ("1,2" if args.smoke else "1")
    results: dict[str, Any] = {"nuclei": "of a file" if args.nuclei else "generated"}
    times = 1 if args.smoke else 2
    with TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(args.nuclei) if args.nuclei else folder / "nuclei.parquet"
        if not args.nuclei:
            generated(source, 2000 if args.smoke else 100_000)
        table = folder / "table.parquet"
        for copies in map(int, copied.split(",")):
            size, number = write_copies(source, folder, copies)
            rows = {}
            for step in ("geojson to counts", "parquet to counts"):
                rows[step] = measured_row(
                    step,
                    number,
                    "count",
                    times if copies == 1 else 1,
                    several=copies > 1,
                    path=str(folder / f"cells.{step.split()[0]}"),
                    table=str(table),
                    size=size,
                )
            results[f"{copies}x"] = rows
            if copies > 1:
                continue
            path = str(folder / "cells.parquet")
            rows["check of parquet"] = measured_row(
                "check of parquet", number, "check", times, path=path
            )
            out = str(results_with(table, folder))
            for step, neighbors in (("anndata", 0), ("anndata with 6 neighbours", 6)):
                rows[step] = measured_row(
                    step, number, "export", times, folder=out, neighbors=neighbors
                )
        size, number = write_labels(folder / "a.tif", 900 if args.smoke else 20_000)
        row = measured_row(
            "label image to counts",
            number,
            "count",
            times,
            path=str(folder / "a.tif"),
            table=str(table),
            size=size,
        )
        results["label image to counts"] = row
    finish("bench_cells", results, args)


if __name__ == "__main__":
    main()
