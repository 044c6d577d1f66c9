"""Cells of GeoJSON files: QuPath's detections and cells, and what is no cell."""

import gzip
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.support.cells import closed, feature, random_rings, write_geojson

from thinsection.cells.batch import MAX_CELLS, CellBatch
from thinsection.cells.geojson import read_geojson_cells
from thinsection.cells.json_stream import MAX_VALUE_CHARS, JsonStream
from thinsection.types import Json


def counts_of(batches: list[CellBatch], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for batch in batches:
        total.update(getattr(batch, name))
    return total


def read_one(path: Path) -> CellBatch:
    (batch,) = read_geojson_cells(path)
    return batch


@pytest.mark.parametrize("suffix", [".geojson", ".geojson.gz"])
def test_detections_come_with_outline_class_and_measurements(
    tmp_path: Path, suffix: str
) -> None:
    rings = random_rings(7)
    features = [feature(ring, number) for number, ring in enumerate(rings)]
    path = write_geojson(tmp_path / "a.geojson", features)
    if suffix.endswith(".gz"):
        packed = tmp_path / "a.geojson.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    batch = read_one(path)
    assert batch.ids == [f"id-{number}" for number in range(7)]
    assert batch.classes == ["Tumor", "Stroma", None] * 2 + ["Tumor"]
    np.testing.assert_array_equal(batch.outlines.points, np.concatenate(rings))
    np.testing.assert_array_equal(batch.measurements["Nucleus: Area"], np.arange(7))
    np.testing.assert_array_equal(batch.probability, np.full(7, 0.5, np.float32))


def test_a_bare_list_and_a_collection_in_a_list_are_read_too(tmp_path: Path) -> None:
    features = [feature(ring, number) for number, ring in enumerate(random_rings(3))]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(features))
    assert len(read_one(path)) == 3
    path.write_text(json.dumps([{"type": "FeatureCollection", "features": features}]))
    assert len(read_one(path)) == 3
    path.write_text(json.dumps(features[0]))
    assert len(read_one(path)) == 1


def test_cells_have_their_nucleus(tmp_path: Path) -> None:
    outer, inner = random_rings(2)
    cell = feature(outer, 0)
    cell["properties"]["objectType"] = "cell"
    cell["nucleusGeometry"] = {"type": "Polygon", "coordinates": [closed(inner)]}
    without = feature(inner, 1)
    batch = read_one(write_geojson(tmp_path / "a.geojson", [cell, without]))
    assert batch.nuclei is not None
    assert batch.nuclei.num_points.tolist() == [len(inner), 0]
    np.testing.assert_array_equal(batch.nuclei.points, inner)


def test_annotations_beside_detections_are_no_cells(tmp_path: Path) -> None:
    rings = random_rings(4)
    features = [feature(ring, number) for number, ring in enumerate(rings)]
    features[0]["properties"]["objectType"] = "annotation"
    features[1]["properties"]["objectType"] = "tile"
    batch = read_one(write_geojson(tmp_path / "a.geojson", features))
    assert batch.ids == ["id-2", "id-3"]
    assert batch.refused == {
        "that are annotation objects": 1,
        "that are tile objects": 1,
    }


def test_each_polygon_of_an_annotation_is_a_cell_where_a_file_has_no_detections(
    tmp_path: Path,
) -> None:
    """CellViT writes one annotation for a class, with all its cells as a MultiPolygon."""
    rings = random_rings(5)
    annotation = {
        "type": "Feature",
        "geometry": {
            "type": "MultiPolygon",
            "coordinates": [[closed(ring)] for ring in rings],
        },
        "properties": {
            "objectType": "annotation",
            "classification": {"name": "Neoplastic", "color": [255, 0, 0]},
        },
    }
    path = tmp_path / "cells.geojson"
    path.write_text(json.dumps([annotation]))
    batch = read_one(path)
    assert len(batch) == 5
    assert batch.classes == ["Neoplastic"] * 5


def test_of_a_detection_in_pieces_the_largest_is_the_outline(tmp_path: Path) -> None:
    small = np.array([[0.0, 0], [2, 0], [2, 2], [0, 2]])
    large = small * 5 + 10
    cell = feature(small, 0)
    cell["geometry"] = {
        "type": "MultiPolygon",
        "coordinates": [[closed(large), closed(small + 11)], [closed(small)]],
    }
    batch = read_one(write_geojson(tmp_path / "a.geojson", [cell]))
    np.testing.assert_array_equal(batch.outlines.points, large)
    assert batch.changed == {
        "of several pieces: the largest is kept": 1,
        "with holes, which are filled": 1,
    }


def test_what_is_no_outline_is_counted(tmp_path: Path) -> None:
    rings = random_rings(6)
    features: list[Json] = [feature(ring, number) for number, ring in enumerate(rings)]
    features[0]["geometry"] = None
    features[1]["geometry"] = {"type": "LineString", "coordinates": [[0, 0], [1, 1]]}
    features[2]["geometry"]["coordinates"] = [[["1", "2"], ["3", "4"], ["5", "6"]]]
    features[3]["geometry"]["coordinates"] = [[[1, 2], [3], [5, 6]]]
    features.append("no feature")
    batch = read_one(write_geojson(tmp_path / "a.geojson", features))
    assert batch.ids == ["id-4", "id-5"]
    assert batch.refused == {
        "without an outline": 1,
        "with a LineString as outline": 1,
        "with coordinates that are no numbers": 2,
        "that are no features": 1,
    }


def test_measurements_of_old_files_and_of_other_tools(tmp_path: Path) -> None:
    first, second, third = (
        feature(ring, number) for number, ring in enumerate(random_rings(3))
    )
    first["id"] = "PathDetectionObject"
    del first["properties"]["objectType"]
    first["properties"]["measurements"] = [{"name": "DAB", "value": 2.5}]
    del second["properties"]["measurements"]
    second["properties"] |= {"score": 3, "locked": True}
    third["properties"]["measurements"] = {"DAB": "NaN", "n": None}
    batch = read_one(write_geojson(tmp_path / "a.geojson", [first, second, third]))
    assert batch.ids == [None, "id-1", "id-2"]
    np.testing.assert_array_equal(batch.measurements["DAB"], [2.5, np.nan, np.nan])
    np.testing.assert_array_equal(batch.measurements["score"], [np.nan, 3, np.nan])
    assert "locked" not in batch.measurements


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"features": [{"type": "Feature"}, {"type": "Fea', "Unterminated string"),
        ('{"features": [{"type": "Feature"}', "JSON must have ',' at character 33"),
        ('{"features": [{"a": 1}, nonsense]}', "Expecting value at character 24"),
        ('{"features": []} {"features": []}', "JSON must end at character 17"),
        ("", "must be a list or a table of features at character 0, got the end"),
    ],
)
def test_a_damaged_text_is_refused_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "a.geojson"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_geojson_cells(path))


def test_the_stream_gives_what_the_parser_gives_wherever_the_pieces_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of 1 to 40 bytes cut numbers, escapes and letters of two bytes."""
    document = {
        "cells": [{"ä": [1.25, -3e5, 1234567]}, [], "µ\\u00e9\n", None],
        "b": {},
    }
    text = json.dumps(document, ensure_ascii=False).encode()
    for num_bytes in range(1, 41):
        monkeypatch.setattr("thinsection.cells.json_stream._READ_BYTES", num_bytes)
        stream = JsonStream(io.BytesIO(text))
        read: dict[str, Json] = {}
        for name in stream.members():
            if name == "cells":
                read[name] = [stream.value() for _ in stream.items()]
            else:
                read[name] = stream.value()
        assert read == document
        assert stream.peek() == ""


def test_an_item_that_is_too_long_is_refused_before_it_is_read() -> None:
    text = b"[" + b"[0]," * 100_000
    stream = JsonStream(io.BytesIO(text), max_value_chars=10_000)
    with pytest.raises(ValueError, match="one item must have at most"):
        stream.value()


# more of these than one item of a file may have as text
LONG = 60_000


def write_long_classes(path: Path, kind: str | None = "annotation") -> Path:
    """Two long classes and a short one, as CellViT writes them; the last has properties first.

    Cell n of the class with the number c is a triangle at x = 1000 * c, y = n.
    """
    texts = []
    for number, count in enumerate((LONG, LONG + 1, 3)):
        triangles = ",".join(
            f"[[[{1000 * number}.123456789012345,{n}],[{1000 * number + 9}.5,{n}],"
            f"[{1000 * number},{n + 1}],[{1000 * number}.123456789012345,{n}]]]"
            for n in range(count)
        )
        properties: dict[str, Json] = {"classification": {"name": f"class {number}"}}
        if kind is not None:
            properties["objectType"] = kind
        shape = f'"type": "MultiPolygon", "coordinates": [{triangles}]'
        if number == 1:
            shape = f'"coordinates": [{triangles}], "type": "MultiPolygon"'
        members = [
            f'"geometry": {{{shape}}}',
            f'"properties": {json.dumps(properties)}',
        ]
        if number > 0:
            members.reverse()
        texts.append(f'{{"type": "Feature", {", ".join(members)}}}')
    assert min(map(len, texts[:2])) > MAX_VALUE_CHARS > len(texts[2])
    path.write_text(f"[{', '.join(texts)}]")
    return path


def test_a_class_with_megabytes_of_cells_is_read_in_batches(tmp_path: Path) -> None:
    path = write_long_classes(tmp_path / "cells.geojson")
    num_seen = 0
    for batch in read_geojson_cells(path):
        assert len(batch) <= MAX_CELLS
        points = batch.outlines.points[::3]
        places = num_seen + np.arange(len(batch))
        first = np.array([0, LONG, 2 * LONG + 1])
        number = np.searchsorted(first, places, side="right") - 1
        assert (points[:, 0] // 1000 == number).all()
        assert (points[:, 1] == places - first[number]).all()
        assert batch.classes == [f"class {n}" for n in number]
        num_seen += len(batch)
        assert not batch.refused
    assert num_seen == 2 * LONG + 4


def test_a_long_annotation_beside_detections_is_counted_and_passed_over(
    tmp_path: Path,
) -> None:
    path = write_long_classes(tmp_path / "a.geojson")
    cell = feature(random_rings(1)[0], 0)
    path.write_text(f"{path.read_text()[:-1]}, {json.dumps(cell)}]")
    batch = read_one(path)
    assert len(batch) == 1
    assert batch.refused == {"that are annotation objects": 3}


@pytest.mark.parametrize("kind", [None, "detection"])
def test_one_cell_with_megabytes_of_text_is_refused(
    tmp_path: Path, kind: str | None
) -> None:
    path = write_long_classes(tmp_path / "a.geojson", kind)
    rule = "of type MultiPolygon must have at most 4 MiB of text at character 1, got"
    with pytest.raises(ValueError, match=rule):
        list(read_geojson_cells(path))


def test_a_long_feature_alone_is_refused_with_a_remedy_that_helps(
    tmp_path: Path,
) -> None:
    polygons = [[closed(ring)] for ring in random_rings(300)]
    text = json.dumps(
        {
            "type": "Feature",
            "geometry": {"type": "MultiPolygon", "coordinates": polygons * 40},
            "properties": {"objectType": "annotation"},
        }
    )
    assert len(text) > MAX_VALUE_CHARS
    path = tmp_path / "a.geojson"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"alone must .*put \[ before it and \]"):
        list(read_geojson_cells(path))
    path.write_text(f"[{text}]")
    assert sum(map(len, read_geojson_cells(path))) == 12_000


def test_a_long_class_that_ends_too_soon_is_refused(tmp_path: Path) -> None:
    path = write_long_classes(tmp_path / "a.geojson")
    path.write_text(path.read_text()[: MAX_VALUE_CHARS + 1000])
    with pytest.raises(ValueError, match=r"at character [\d,]+"):
        list(read_geojson_cells(path))
