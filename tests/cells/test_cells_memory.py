"""From a file of cells to counts in tiles takes the same memory for ten times the cells."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shapely
from benchmarks.bench_cells import count
from tests.support.cells import feature

from thinsection.testing import run_and_measure
from thinsection.types import MIB

pytestmark = pytest.mark.check  # a process for each size and format

SIZE = (8000, 16_000)  # two blocks
BATCH = 8192
# number of points of an outline: those of GeoJSON cost more time
POINTS = {"parquet": 24, "geojson": 4}
NUM_CELLS = 60_000
# the ids of the cells alone would take 45 MiB more for ten times the cells
MAX_GROWTH_BYTES = 20 * MIB


def rings(number: int, num_points: int, seed: int) -> np.ndarray:
    """Closed outlines anywhere on the slide, (number, num_points + 1, 2)."""
    rng = np.random.default_rng(seed)
    centers = rng.uniform(20, np.array(SIZE) - 20, (number, 1, 2))
    angles = np.linspace(0, 2 * np.pi, num_points + 1)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    circle[-1] = circle[0]
    return np.asarray(centers + circle * rng.uniform(4, 12, (number, 1, 1)))


def write_parquet(path: Path, number: int) -> None:
    """Writes polygons with ids of 36 characters and a class, in row groups."""
    schema = pa.schema(
        {"id": pa.string(), "geometry": pa.binary(), "class": pa.string()}
    )
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, number, BATCH):
            size = min(BATCH, number - first)
            polygons = shapely.polygons(rings(size, POINTS["parquet"], first))
            ids = [f"{first + row:036}" for row in range(size)]
            names = [("Tumour", "Stroma")[row % 2] for row in range(size)]
            columns = [ids, shapely.to_wkb(polygons).tolist(), names]
            writer.write_table(pa.table(columns, schema=schema))


def write_geojson(path: Path, number: int) -> None:
    """Writes detections of QuPath with a class and two measurements."""
    with path.open("w") as file:
        file.write('{"type": "FeatureCollection", "features": [')
        for first in range(0, number, BATCH):
            size = min(BATCH, number - first)
            outlines = rings(size, POINTS["geojson"], first).round(2)
            for row, ring in enumerate(outlines[:, :-1], start=first):
                cell = feature(ring, row, id=f"{row:036}")
                file.write(("," if row else "") + json.dumps(cell))
        file.write("]}")


WRITERS = {"parquet": write_parquet, "geojson": write_geojson}


@pytest.mark.parametrize("suffix", WRITERS)
def test_ten_times_the_cells_take_the_same_memory(suffix: str, tmp_path: Path) -> None:
    peaks = []
    for times in (1, 10):
        number = times * NUM_CELLS
        path = tmp_path / f"{times}.{suffix}"
        WRITERS[suffix](path, number)
        measured = run_and_measure(
            "benchmarks.bench_cells",
            count.__name__,
            path=str(path),
            table=str(tmp_path / f"table{times}.parquet"),
            size=SIZE,
        )
        assert measured.result == {"cells": number, "in_tiles": number}
        peaks.append(measured.peak_bytes)
    assert peaks[1] - peaks[0] < MAX_GROWTH_BYTES, [peak >> 20 for peak in peaks]
