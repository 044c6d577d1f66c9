"""Labels by region: which tile gets which class, and every way to draw them wrong."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.probe.make import (
    FEATURES,
    rectangle,
    split_tiles,
    two_regions,
    write_tiles_h5,
)

from thinsection.errors import DatasetError
from thinsection.probe.data.regions import inside, load_regions, read_regions
from thinsection.probe.data.sets import check_tile_set
from thinsection.slide.annotations import read_regions as read_annotations


def collection(path: Path, *features: dict[str, Any]) -> Path:
    path.write_text(
        json.dumps({"type": "FeatureCollection", "features": list(features)})
    )
    return path


def test_tiles_take_the_class_of_the_region_that_holds_their_centre(
    tmp_path: Path,
) -> None:
    run, labels = two_regions(tmp_path)
    data = split_tiles(load_regions([run / FEATURES / "slide-1.h5"], labels))
    assert data.class_names == ("stroma", "tumour")
    assert (
        len(data.train) + len(data.val) == 13 * 9
    )  # the last column lies in no region
    for split in (data.train, data.val):
        for name, label in zip(split.ids, split.labels, strict=True):
            slide, place = name.split(":")
            assert slide == "slide-1"
            assert label == (int(place.split("x")[0]) >= 7 * 512)
    with pytest.raises(
        DatasetError,
        match=r"must not share a patient, slide or row, got 1 slides \('slide-1'\)",
    ):
        check_tile_set(data)


def test_holes_and_pieces_follow_the_even_odd_rule() -> None:
    square = np.array([[0, 0], [10, 0], [10, 10], [0, 10], [0, 0]], float)
    hole = np.array([[4, 4], [6, 4], [6, 6], [4, 6]], float)
    island = square + 100
    points = np.array([[1, 1], [5, 5], [105, 105], [50, 50], [9.9, 0.1]])
    np.testing.assert_array_equal(
        inside((square, hole, island), points), [True, False, True, False, True]
    )


def test_a_diagonal_edge_cuts_as_its_line_does() -> None:
    rings = (np.array([[0, 0], [100, 0], [0, 50]], float),)
    points = np.random.default_rng(0).uniform(0, 100, (500, 2))
    below = points[:, 0] / 100 + points[:, 1] / 50 < 1
    np.testing.assert_array_equal(inside(rings, points), below)


def test_a_split_of_the_regions_is_kept_and_test_left_out(tmp_path: Path) -> None:
    run, _ = two_regions(tmp_path)
    labels = collection(
        tmp_path / "l.geojson",
        rectangle((0, 0, 1536, 5000), "a", split="train"),
        rectangle((1536, 0, 3072, 5000), "b", split="train"),
        rectangle((3072, 0, 3584, 5000), "a", split="val"),
        rectangle((3584, 0, 4096, 5000), "b", split="val"),
        rectangle((4096, 0, 5120, 5000), "b", split="test"),
    )
    data = split_tiles(load_regions([run / FEATURES / "slide-1.h5"], labels))
    assert (len(data.train), len(data.val)) == (6 * 9, 2 * 9)


def test_three_slides_are_split_by_slide(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    coords = np.stack([np.arange(8) * 512, np.zeros(8)], axis=1)
    files = [
        write_tiles_h5(
            tmp_path / f"s{i}.h5", coords, rng.normal(size=(8, 4)).astype("f4")
        )
        for i in range(4)
    ]
    rows = [f"s{i},{x * 512},0,{'ab'[x % 2]}" for i in range(4) for x in range(8)]
    (tmp_path / "l.csv").write_text("\n".join(["slide_id,x,y,label", *rows]))
    data = split_tiles(load_regions(files, tmp_path / "l.csv"))
    train, val = (
        {name.split(":")[0] for name in s.ids} for s in (data.train, data.val)
    )
    assert train | val == {"s0", "s1", "s2", "s3"}
    assert not train & val
    assert data.facts["slides"] == 4


def test_a_tile_in_two_classes_is_refused(tmp_path: Path) -> None:
    run, _ = two_regions(tmp_path)
    labels = collection(
        tmp_path / "l.geojson",
        rectangle((0, 0, 1500, 1500), "a"),
        rectangle((1000, 0, 3000, 1500), "b"),
    )
    with pytest.raises(
        DatasetError, match=r"one class and split, got 'a' and 'b' at \[1024, 0\]"
    ):
        load_regions([run / FEATURES / "slide-1.h5"], labels)


def test_regions_of_an_unknown_slide_are_refused(tmp_path: Path) -> None:
    run, _ = two_regions(tmp_path)
    labels = collection(
        tmp_path / "l.geojson", rectangle((0, 0, 9, 9), "a", slide_id="other")
    )
    with pytest.raises(
        DatasetError,
        match=r"slide_id must be a slide of the data \(slide-1\), got 'other'",
    ):
        load_regions([run / FEATURES / "slide-1.h5"], labels)


def test_regions_without_slide_among_several_slides_are_refused(tmp_path: Path) -> None:
    run, labels = two_regions(tmp_path)
    files = [run / FEATURES / "slide-1.h5"] * 2
    with pytest.raises(DatasetError, match="must have the property 'slide_id'"):
        load_regions(files, labels)


def test_regions_of_one_class_are_refused(tmp_path: Path) -> None:
    run, _ = two_regions(tmp_path)
    labels = collection(tmp_path / "l.geojson", rectangle((0, 0, 2000, 2000), "a"))
    with pytest.raises(
        DatasetError, match=r"at least two classes, got \['a'\] for 16 tiles"
    ):
        load_regions([run / FEATURES / "slide-1.h5"], labels)


def test_slides_of_two_encoders_are_refused(tmp_path: Path) -> None:
    coords = np.stack([np.arange(8) * 512, np.zeros(8)], axis=1)
    files = [
        write_tiles_h5(
            tmp_path / f"s{i}.h5", coords, np.ones((8, 3 + i), "f4"), encoder="uni"
        )
        for i in range(2)
    ]
    labels = tmp_path / "l.csv"
    labels.write_text("slide_id,x,y,label\ns0,0,0,a\ns1,0,0,b\n")
    with pytest.raises(
        DatasetError, match=r"of one encoder, got uni \(3-d\), uni \(4-d\)"
    ):
        load_regions(files, labels)


def test_a_csv_row_without_its_tile_is_refused(tmp_path: Path) -> None:
    run, _ = two_regions(tmp_path)
    labels = tmp_path / "l.csv"
    labels.write_text("slide_id,x,y,label\nslide-1,0,0,a\nslide-1,1,0,b\n")
    with pytest.raises(DatasetError, match=r"none at 1, 0 \(1 missing\) in 'slide-1'"):
        load_regions([run / FEATURES / "slide-1.h5"], labels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "labels must be GeoJSON"),
        (
            '{"type": "FeatureCollection", "features": []}',
            "must contain a labelled area, got none",
        ),
        (
            '[{"geometry": {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9]]]}}]',
            "must have a label, got none as feature 0",
        ),
        (
            '[{"geometry": {"type": "Point"}, "properties": {"name": "a"}}]',
            "got only shapes of kind point",
        ),
        (
            '[{"geometry": {"type": "Polygon", "coordinates": [[7]]}, "properties": '
            '{"name": "a"}}]',
            "rings must be points, got 'feature 0 of",
        ),
    ],
)
def test_a_file_that_is_no_labelled_geojson_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "l.geojson").write_text(text)
    with pytest.raises(DatasetError, match=message):
        read_regions(tmp_path / "l.geojson")


def test_labels_are_read_as_annotations_of_a_run_are(tmp_path: Path) -> None:
    """Collections nest, a byte order mark is none of the text, and cells label no tile."""
    square = rectangle((0, 0, 90, 90), "a", split="val", patient_id="p")
    square["properties"]["classification"] = {"names": ["Tumor", "Positive"]}
    child = rectangle((0, 0, 9, 9), "child")
    parent = rectangle((100, 0, 190, 90), "parent")
    parent["properties"]["childObjects"] = [child]
    cell = rectangle((0, 0, 5, 5), "cell", objectType="cell")
    point = {"geometry": {"type": "Point", "coordinates": [1, 2]}, "properties": {}}
    nested = [{"type": "FeatureCollection", "features": [square, cell]}, parent, point]
    path = tmp_path / "l.geojson"
    path.write_text(json.dumps(nested), encoding="utf-8-sig")
    ignored: Counter[str] = Counter()
    regions = read_regions(path, ignored)
    assert ignored == {"cell": 1, "point": 1}
    assert [region.row for region in regions] == [
        {"label": "Tumor: Positive", "split": "val", "case_id": "p"},
        {"label": "parent"},
        {"label": "child"},
    ]
    of_run = read_annotations(path, (1000, 700))
    assert sorted(of_run.classes) == sorted(region.row["label"] for region in regions)


def test_the_result_says_which_shapes_labelled_no_tile(tmp_path: Path) -> None:
    run, labels = two_regions(tmp_path)
    document = json.loads(labels.read_text())
    point = {"type": "Point", "coordinates": [1, 2]}
    document["features"] += [{"geometry": point, "properties": {}}] * 2
    labels.write_text(json.dumps(document))
    data = load_regions([run / FEATURES / "slide-1.h5"], labels)
    assert data.facts["labels_without_area"] == "2 points"
