"""Files of many programs become the same table; what is damaged is refused with a reason."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shapely
from tests.support.cells import SLIDE, closed, feature, random_rings, write_geojson

from thinsection.cells.columns import read_parquet_cells
from thinsection.cells.place import CellSlide
from thinsection.cells.sources import SUFFIXES, format_of, import_cells
from thinsection.cells.table import CellTable
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.types import Floats, Json

RINGS = random_rings(300)
NAMES = ("Neoplastic", "Dead")


def imported(
    path: Path, frame: str | None = None, columns: tuple[str, ...] = ()
) -> CellTable:
    return import_cells(
        path,
        path.with_name("out") / "a.parquet",
        name="own",
        slide=SLIDE,
        frame=frame,
        columns=columns,
    )


def assert_has_all(table: CellTable, rings: list[Floats] = RINGS) -> None:
    """The table has an outline equal to each ring, whatever their order."""
    outlines = shapely.from_wkb(table.to_table()["geometry"].to_numpy())
    wanted = np.array([shapely.Polygon(ring) for ring in rings])
    assert len(outlines) == len(wanted)
    order = np.lexsort(shapely.get_coordinates(shapely.centroid(outlines)).T)
    wanted_order = np.lexsort(shapely.get_coordinates(shapely.centroid(wanted)).T)
    same = shapely.equals_exact(outlines[order], wanted[wanted_order], 1e-6)
    assert same.all()


def typed_cell(ring: Floats, number: int) -> dict[str, Json]:
    return {
        "bbox": [ring.min(axis=0)[::-1].tolist(), ring.max(axis=0)[::-1].tolist()],
        "centroid": ring.mean(axis=0).tolist(),
        "contour": ring.tolist(),
        "type_prob": 0.5 + number / 1000,
        "type": 1 + number % 2,
    }


def write_cellvit(path: Path, cells: list[Json]) -> Path:
    document = {
        "wsi_metadata": {"slide_mpp": 0.25, "magnification": 40, "levels": [[1, 2]]},
        "processed_patches": ["0_0", "0_1"],
        "type_map": {"Background": 0, "Neoplastic": 1, "Dead": 2},
        "cells": cells,
    }
    path.write_text(json.dumps(document, indent=2))
    return path


def write_hovernet(path: Path, rings: list[Floats], power: float | None) -> Path:
    nuclei = {str(7 + n): typed_cell(ring, n) for n, ring in enumerate(rings)}
    path.write_text(json.dumps({"mag": power, "nuc": nuclei}))
    return path


def test_cellvit_gives_outlines_classes_and_probabilities(tmp_path: Path) -> None:
    cells: list[Json] = [typed_cell(ring, n) for n, ring in enumerate(RINGS)]
    path = write_cellvit(tmp_path / "cells.json", cells)
    table = imported(path)
    assert format_of(path).name == table.facts["source"]["format"] == "cellvit"
    assert table.classes == ("Dead", "Neoplastic")
    assert_has_all(table)
    rows = table.to_table(["id", "class", "probability"]).to_pylist()
    for row in rows:
        assert row["class"] == NAMES[int(row["id"]) % 2]
        assert row["probability"] == pytest.approx(0.5 + int(row["id"]) / 1000)


def test_cellvits_detections_are_cells_without_an_outline(tmp_path: Path) -> None:
    cells: list[Json] = [typed_cell(ring, n) for n, ring in enumerate(RINGS)]
    for cell in cells:
        del cell["contour"]
    rows = imported(write_cellvit(tmp_path / "cell_detection.json", cells)).to_table()
    assert rows["geometry"].null_count == rows["area_um2"].null_count == len(RINGS)
    given = np.array([ring.mean(axis=0) for ring in RINGS])
    for row in rows.to_pylist():
        np.testing.assert_allclose((row["x_l0"], row["y_l0"]), given[int(row["id"])])


@pytest.mark.parametrize(("power", "scale"), [(None, 1), (40, 1), (20, 0.5)])
def test_hovernet_is_scaled_by_the_magnification_that_it_states(
    tmp_path: Path, power: float | None, scale: float
) -> None:
    rings = [ring * scale for ring in RINGS]
    path = write_hovernet(tmp_path / "a.json", rings, power)
    table = imported(path)
    assert format_of(path).name == "hovernet"
    assert_has_all(table)
    assert table.classes == ("1", "2")
    assert set(table.to_table()["id"].to_pylist()) == {str(7 + n) for n in range(300)}


def test_hoverfast_writes_a_packed_list_of_features_without_a_kind(
    tmp_path: Path,
) -> None:
    """As `save_poly` of hoverfast/utils_wsi.py does."""
    features = [
        {
            "geometry": {
                "type": "Polygon",
                "coordinates": [closed(ring)],
                "centroid": [1, 2],
            },
            "properties": {
                "object_type": "cell",
                "classification": {"name": "Nuclei", "colorRGB": -65536},
                "isLocked": False,
            },
            "type": "Feature",
        }
        for ring in RINGS
    ]
    text = "[\n" + ",\n".join(map(json.dumps, features)) + "\n]"
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    table = imported(path)
    assert_has_all(table)
    assert table.classes == ("Nuclei",)


def geo_table(rings: list[Floats]) -> pa.Table:
    wkb = shapely.to_wkb([shapely.Polygon(ring) for ring in rings])
    return pa.table(
        {
            "geometry": pa.array(wkb, type=pa.binary()),
            "class_name": [NAMES[n % 2] for n in range(len(rings))],
            "uid": np.arange(len(rings)),
            "brown": np.arange(len(rings)) / 2,
        }
    )


def test_geoparquet_gives_outlines_classes_ids_and_measurements(
    tmp_path: Path,
) -> None:
    pq.write_table(geo_table(RINGS), tmp_path / "a.parquet")
    table = imported(tmp_path / "a.parquet")
    assert_has_all(table)
    for row in table.to_table(["id", "class", "source:brown"]).to_pylist():
        assert row["class"] == NAMES[int(row["id"]) % 2]
        assert row["source:brown"] == int(row["id"]) / 2


def test_long_outlines_come_in_parts_whatever_the_lengths_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 16 * 200  # of all outlines, which have 5 to 29 points; the longest has more
    monkeypatch.setattr("thinsection.cells.columns._MAX_GEOMETRY_BYTES", limit)
    angles = np.linspace(0, 2 * np.pi, 301)[:-1]
    circle = 500 + 90 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    rings = [*RINGS[:150], circle, *RINGS[150:]]
    path = tmp_path / "a.parquet"
    struct = pa.array([{"a": 1, "b": 2.0}] * len(rings))
    pq.write_table(geo_table(rings).add_column(0, "nested", struct), path)
    batches = list(read_parquet_cells(path, {}))
    sizes = [(len(batch), len(batch.outlines.points)) for batch in batches]
    assert all(points <= 200 or number == 1 for number, points in sizes)
    assert sum(number for number, _ in sizes) == len(rings)
    # parts are filled, and not a cell each
    assert len(sizes) < len(rings) / 5
    assert_has_all(imported(path), rings)


def test_columns_of_a_table_of_centres_are_named_by_the_user(tmp_path: Path) -> None:
    centers = np.array([ring.mean(axis=0) for ring in RINGS])
    in_um = centers * SLIDE.slide_mpp
    columns = {"left": in_um[:, 0], "top": in_um[:, 1], "sort": ["a", "b"] * 150}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(InvalidInputError, match="must have a column geometry or colu"):
        imported(path)
    table = imported(path, "um", ("x=left", "y=top", "class=sort"))
    assert table.classes == ("a", "b")
    rows = table.to_table().to_pylist()
    for row in rows:
        wanted = centers[int(row["id"])]
        np.testing.assert_allclose((row["x_l0"], row["y_l0"]), wanted)
    with pytest.raises(InvalidInputError, match="must be one of left, top, sort"):
        imported(path, "um", ("x=lef", "y=top"))
    with pytest.raises(ConfigError, match="did you mean 'class'"):
        imported(path, "um", ("clas=sort",))


@pytest.mark.parametrize("binary_ids", [False, True])
def test_xenium_has_a_row_for_each_point_in_micrometres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binary_ids: bool
) -> None:
    """Batches of a few rows cut cells, which are joined again."""
    monkeypatch.setattr("thinsection.cells.columns.MAX_CELLS", 2)
    points = np.concatenate([closed(ring) for ring in RINGS]) * SLIDE.slide_mpp
    ids = np.repeat(
        [f"aaa-{n}" for n in range(300)], [len(ring) + 1 for ring in RINGS]
    ).tolist()
    values = [text.encode() for text in ids] if binary_ids else ids
    boundaries = {"cell_id": values, "vertex_x": points[:, 0], "vertex_y": points[:, 1]}
    path = tmp_path / "cell_boundaries.parquet"
    pq.write_table(pa.table(boundaries), path)
    table = imported(path)
    assert table.facts["placement"]["rule"] == "µm"
    assert_has_all(table)
    assert set(table.to_table()["id"].to_pylist()) == set(ids)


def test_half_a_file_of_each_format_is_refused_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    features: list[Json] = [feature(ring, n) for n, ring in enumerate(RINGS)]
    cells: list[Json] = [typed_cell(ring, n) for n, ring in enumerate(RINGS)]
    packed = tmp_path / "d.geojson.gz"
    whole = write_geojson(tmp_path / "a.geojson", features)
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    pq.write_table(geo_table(RINGS), tmp_path / "e.parquet")
    paths = [
        whole,
        write_cellvit(tmp_path / "b.json", cells),
        write_hovernet(tmp_path / "c.json", RINGS, 40),
        packed,
        tmp_path / "e.parquet",
    ]
    for path in paths:
        data = path.read_bytes()
        for share in (0.5, 0.99):
            path.write_bytes(data[: int(len(data) * share)])
            with pytest.raises(InvalidInputError, match="cells must be readable"):
                imported(path)
        path.write_bytes(b"")
        with pytest.raises(InvalidInputError, match="cells must be readable"):
            imported(path)
    assert not (tmp_path / "out" / "a.parquet").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == []


def test_a_missing_file_and_an_unknown_suffix_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="existing file"):
        format_of(tmp_path / "a.geojson")
    (tmp_path / "a.csv").write_text("x,y")
    with pytest.raises(InvalidInputError, match="must end in one of"):
        format_of(tmp_path / "a.csv")
    assert ".geojson.gz" in SUFFIXES


def test_a_micrometre_file_without_the_slides_resolution_is_refused(
    tmp_path: Path,
) -> None:
    pq.write_table(geo_table(RINGS), tmp_path / "a.parquet")
    slide = CellSlide(slide_id="a", size_l0=(20_000, 31_000), slide_mpp=(0.0, 0.0))
    with pytest.raises(ValueError, match="slide_mpp is missing"):
        import_cells(
            tmp_path / "a.parquet",
            tmp_path / "b.parquet",
            name="own",
            slide=slide,
            frame="um",
        )


@pytest.mark.parametrize("metadata", ["zarr.json", ".zattrs"])
def test_the_only_shapes_of_a_spatialdata_store_are_read(
    tmp_path: Path, metadata: str
) -> None:
    folder = tmp_path / "a.zarr" / "shapes" / "cells"
    folder.mkdir(parents=True)
    pq.write_table(geo_table(RINGS), folder / "shapes.parquet")
    transformation = {"type": "identity", "output": {"name": "global"}}
    for kind in ("identity", "affine"):
        transformation["type"] = kind
        attributes = {"coordinateTransformations": [transformation]}
        is_new = metadata == "zarr.json"
        document = {"attributes": attributes} if is_new else attributes
        (folder / metadata).write_text(json.dumps(document))
        if kind == "affine":
            with pytest.raises(InvalidInputError, match="transformation by affine"):
                imported(tmp_path / "a.zarr")
        else:
            assert_has_all(imported(tmp_path / "a.zarr"))
    assert_has_all(imported(tmp_path / "a.zarr", "px"))
    (folder.parent / "nuclei").mkdir()
    pq.write_table(geo_table(RINGS), folder.parent / "nuclei" / "shapes.parquet")
    with pytest.raises(InvalidInputError, match="got cells, nuclei in"):
        imported(tmp_path / "a.zarr")
    assert_has_all(imported(folder.parent / "nuclei" / "shapes.parquet"))
