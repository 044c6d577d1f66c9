"""Files of cells in place of regions are named at once; regions beside cells are read."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from thinsection.errors import InvalidInputError
from thinsection.slide.annotations import read_regions

SIZE = (40_000, 30_000)


def square(x: float, y: float, edge: float, **properties: object) -> dict[str, Any]:
    ring = [[x, y], [x + edge, y], [x + edge, y + edge], [x, y + edge], [x, y]]
    geometry = {"type": "Polygon", "coordinates": [ring]}
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def squares(number: int, edge: float, **properties: object) -> list[dict[str, Any]]:
    return [
        square(100 * (i % 300), 100 * (i // 300), edge, **properties)
        for i in range(number)
    ]


def write(path: Path, features: list[dict[str, Any]], **form: Any) -> Path:
    document = {"type": "FeatureCollection", "features": features}
    path.write_text(json.dumps(document, **form))
    return path


@pytest.mark.parametrize("form", [{}, {"indent": 1}, {"separators": (",", ":")}])
@pytest.mark.parametrize("kind", ["cell", "detection"])
def test_a_file_of_detections_is_named_before_it_is_parsed(
    kind: str, form: dict[str, Any], tmp_path: Path
) -> None:
    cells = squares(60_000, 30, objectType=kind)
    path = write(tmp_path / "cells.geojson", cells, **form)
    before = time.process_time()
    with pytest.raises(
        InvalidInputError,
        match=r"got 60,000 detections and no annotation in '.*cells.geojson'; cells are no regions",
    ):
        read_regions(path, SIZE)
    assert time.process_time() - before < 0.5


@pytest.mark.parametrize(
    "region",
    [
        square(100, 200, 3000, objectType="annotation"),
        square(100, 200, 3000, objectType="unknown"),
        square(100, 200, 3000),  # of another program
    ],
    ids=["annotation", "unknown", "no kind"],
)
def test_a_region_beside_cells_is_read_wherever_it_stands(
    region: dict[str, Any], tmp_path: Path
) -> None:
    cells = squares(2_000, 30, objectType="cell")
    for name, features in (
        ("first", [region, *cells]),
        ("last", [*cells, region]),
        ("middle", [*cells[:900], region, *cells[900:]]),
    ):
        regions = read_regions(write(tmp_path / f"{name}.geojson", features), SIZE)
        (area,) = regions.classes.values()
        assert area.area == 3000**2
        assert regions.notes == (f"2000 cells ignored in {name}.geojson",)


def test_a_few_detections_are_noted_and_no_error(tmp_path: Path) -> None:
    path = write(tmp_path / "few.geojson", squares(999, 30, objectType="cell"))
    assert read_regions(path, SIZE).notes == ("999 cells ignored in few.geojson",)


@pytest.mark.parametrize("edge", [30, 70])
def test_annotations_of_the_size_of_cells_are_named(edge: int, tmp_path: Path) -> None:
    regions = [square(20_000, 20_000, 3000), square(5000, 20_000, 900)]
    path = write(tmp_path / "a.geojson", [*regions, *squares(1500, edge)])
    message = rf"got 1,502 outlines with a median of {edge**2:,} px² in '.*a.geojson'; cells are"
    with pytest.raises(InvalidInputError, match=message):
        read_regions(path, SIZE)


@pytest.mark.parametrize(("number", "edge"), [(1500, 80), (900, 30)])
def test_many_glands_and_a_few_small_regions_are_read(
    number: int, edge: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "glands.geojson", squares(number, edge))
    regions = read_regions(path, SIZE)
    assert regions.classes[""].area == number * edge**2


def test_other_formats_have_the_same_rule(tmp_path: Path) -> None:
    rows = [f"{100 * (i % 300)},{100 * (i // 300)},30,30" for i in range(1000)]
    path = tmp_path / "cells.csv"
    path.write_text("\n".join(["x,y,width,height", *rows]))
    with pytest.raises(
        InvalidInputError, match="got 1,000 outlines with a median of 900 px²"
    ):
        read_regions(path, SIZE)
