"""What others drew: each format, classes, holes; hostile files are refused by file and feature."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from PIL import Image

from thinsection.errors import InvalidInputError
from thinsection.slide.annotations import Regions, read_regions

SIZE = (1000, 700)
SQUARE = [[100, 100], [300, 100], [300, 300], [100, 300], [100, 100]]
HOLE = [[150, 150], [250, 150], [250, 250], [150, 250], [150, 150]]
ISLAND = [[190, 190], [210, 190], [210, 210], [190, 210], [190, 190]]


def polygon(
    *rings: Any, name: str | None = "Tumor", **properties: Any
) -> dict[str, Any]:
    of_class = (
        {} if name is None else {"classification": {"name": name, "color": [200, 0, 0]}}
    )
    geometry = {"type": "Polygon", "coordinates": list(rings)}
    return {
        "type": "Feature",
        "geometry": geometry,
        "properties": {**of_class, **properties},
    }


def geometry(kind: str, coordinates: Any, **properties: Any) -> dict[str, Any]:
    shape = {"type": kind, "coordinates": coordinates}
    return {"type": "Feature", "geometry": shape, "properties": properties}


def of_geojson(folder: Path, *features: Any, **how: Any) -> Regions:
    path = folder / "drawn.geojson"
    path.write_text(
        json.dumps({"type": "FeatureCollection", "features": list(features)})
    )
    return read_regions(path, SIZE, **how)


def of_text(folder: Path, name: str, text: str, **how: Any) -> Regions:
    (folder / name).write_text(text)
    return read_regions(folder / name, SIZE, **how)


def test_holes_and_an_island_in_a_hole_are_kept_by_class(tmp_path: Path) -> None:
    found = of_geojson(
        tmp_path, polygon(SQUARE, HOLE), polygon(ISLAND), polygon(HOLE, name="Fat")
    )
    assert list(found.classes) == ["Tumor", "Fat"]
    assert found.classes["Tumor"].area == 200**2 - 100**2 + 20**2
    assert found.area().area == 200**2
    assert found.area(exclude=("Fat",)).area == 200**2 - 100**2
    assert found.area(include=("Fat",)).area == 100**2
    assert found.notes == ()


def test_a_derived_class_is_of_its_base_class(tmp_path: Path) -> None:
    found = of_geojson(
        tmp_path, polygon(SQUARE, name="Tumor: Positive"), polygon(HOLE, name="T")
    )
    assert found.area(include=("Tumor",)).area == 200**2
    assert found.area(include=("Tumor: Positive",)).area == 200**2
    assert found.area(exclude=("Tumor",)).is_empty
    with pytest.raises(InvalidInputError, match="did you mean 'Tumor: Positive'"):
        found.area(include=("Tumor: Positiv",))


def test_an_included_class_that_no_object_has_is_an_error_with_the_classes(
    tmp_path: Path,
) -> None:
    found = of_geojson(tmp_path, polygon(SQUARE), polygon(HOLE, name="Fat"))
    with pytest.raises(
        InvalidInputError, match=r"got 'Tumour'; did you mean 'Tumor'\? .* 'Fat', 'Tum"
    ):
        found.area(include=("Fat", "Tumour"))
    with pytest.raises(InvalidInputError, match="have no class"):
        of_geojson(tmp_path, polygon(SQUARE, name=None)).area(include=("T",))


def test_a_class_is_named_in_any_capitals_where_nothing_contradicts(
    tmp_path: Path,
) -> None:
    found = of_geojson(
        tmp_path,
        polygon(SQUARE),
        polygon(HOLE, name="tumor"),
        polygon(ISLAND, name="Tumor: EXCLUSION"),
    )
    assert found.area(include=("TUMOR",)).area == 200**2
    assert found.area(include=("tumor",), exclude=("Tumor",)).is_empty
    contradiction = found.area(include=("Tumor",), exclude=("tumor",))
    assert contradiction.area == 200**2 - 100**2
    assert found.area(exclude=("exclusion",)).area == 200**2 - 20**2
    assert found.area(include=("Exclusion",), exclude=("exclusion",)).area == 20**2


def test_a_pair_that_touches_and_one_that_overlaps_is_one_area(tmp_path: Path) -> None:
    beside = np.add(SQUARE, [200, 0]).tolist()
    over = np.add(SQUARE, [100, 0]).tolist()
    assert (
        of_geojson(tmp_path, polygon(SQUARE), polygon(beside)).area().area == 2 * 200**2
    )
    assert (
        of_geojson(tmp_path, polygon(SQUARE), polygon(over)).area().area == 1.5 * 200**2
    )


def test_points_lines_detections_and_what_is_off_the_slide_are_left_out_with_a_word(
    tmp_path: Path,
) -> None:
    off = (np.array(SQUARE) + 5000).tolist()
    found = of_geojson(
        tmp_path,
        polygon(SQUARE, name=None),
        polygon(off),
        polygon(HOLE, objectType="detection"),
        geometry("Point", [5, 5]),
        geometry("MultiPoint", [[5, 5], [6, 6]]),
        geometry("LineString", [[5, 5], [6, 6]]),
    )
    assert list(found.classes) == [""]
    assert set(found.notes) == {
        "1 annotation outside the slide ignored in drawn.geojson",
        "1 detection ignored in drawn.geojson",
        "2 points ignored in drawn.geojson",
        "1 line ignored in drawn.geojson",
    }


def test_bare_geometries_lists_collections_and_children_are_read(
    tmp_path: Path,
) -> None:
    bare = {"type": "Polygon", "coordinates": [SQUARE]}
    assert of_text(tmp_path, "a.json", json.dumps(bare)).area().area == 200**2
    assert (
        of_text(tmp_path, "b.json", json.dumps([polygon(SQUARE)])).area().area == 200**2
    )
    both = {
        "type": "GeometryCollection",
        "geometries": [bare, geometry("Point", [1, 1])],
    }
    both["geometries"][1] = {"type": "Point", "coordinates": [1, 1]}
    found = of_geojson(
        tmp_path, {"type": "Feature", "geometry": both, "properties": {}}
    )
    assert (found.area().area, len(found.notes)) == (200**2, 1)
    child = polygon(HOLE, name="Fat")
    assert len(of_geojson(tmp_path, polygon(SQUARE, childObjects=[child])).classes) == 2


ASAP = """<?xml version="1.0"?><ASAP_Annotations><Annotations>
<Annotation Name="a0" Type="Polygon" PartOfGroup="Invasive" Color="#F4FA58"><Coordinates>
<Coordinate Order="1" X="300" Y="100"/><Coordinate Order="0" X="100" Y="100"/>
<Coordinate Order="2" X="300,0" Y="300"/><Coordinate Order="3" X="100" Y="300"/></Coordinates>
</Annotation><Annotation Name="a1" Type="Dot" PartOfGroup="None"><Coordinates>
<Coordinate Order="0" X="3" Y="4"/></Coordinates></Annotation></Annotations>
<AnnotationGroups><Group Name="Tumor" PartOfGroup="None"/>
<Group Name="Invasive" PartOfGroup="Tumor"/></AnnotationGroups></ASAP_Annotations>"""


def test_asaps_groups_in_groups_are_classes_and_dots_are_left_out(
    tmp_path: Path,
) -> None:
    found = of_text(tmp_path, "a.xml", ASAP.replace("300,0", "300"))
    assert list(found.classes) == ["Tumor: Invasive"]
    assert found.area(include=("Tumor",)).area == 200**2
    assert found.notes == ("1 dot ignored in a.xml",)


def imagescope(*regions: str) -> str:
    layer = f'<Annotation Id="1" Name="T"><Regions>{"".join(regions)}</Regions></Annotation>'
    return f"<Annotations>{layer}</Annotations>"


def region(points: Any, kind: int = 0, negative: int = 0) -> str:
    inner = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in points)
    head = f'<Region Id="7" Type="{kind}" NegativeROA="{negative}">'
    return f"{head}<Vertices>{inner}</Vertices></Region>"


def test_imagescopes_negative_regions_are_holes_and_ellipses_lie_in_their_box(
    tmp_path: Path,
) -> None:
    text = imagescope(
        region(SQUARE[:4]), region(HOLE[:4], negative=1), region(ISLAND[:2], kind=3)
    )
    found = of_text(tmp_path, "a.xml", text)
    assert found.classes["T"].area == 200**2 - 100**2
    assert found.notes == ("1 arrow ignored in a.xml",)
    round_one = of_text(
        tmp_path, "e.xml", imagescope(region([[100, 100], [300, 200]], kind=2))
    )
    assert round_one.area().bounds == pytest.approx((100, 100, 300, 200))
    assert round_one.area().area == pytest.approx(np.pi * 100 * 50, rel=0.001)


def test_boxes_of_a_csv_are_taken_for_their_slide(tmp_path: Path) -> None:
    rows = (
        "slide_id,x,y,width,height,label\na,10,20,30,40,T\nb,0,0,5,5,T\na,0,0,5,5,S\n"
    )
    found = of_text(tmp_path, "b.csv", rows, slide_id="a")
    assert {name: area.bounds for name, area in found.classes.items()} == {
        "T": (10, 20, 40, 60),
        "S": (0, 0, 5, 5),
    }
    corners = "x_min,y_min,x_max,y_max\n10,20,40,60\n"
    assert of_text(tmp_path, "c.csv", corners).area().bounds == (10, 20, 40, 60)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_px_of_a_mask_are_its_classes_in_level_0_px(
    tmp_path: Path, suffix: str
) -> None:
    values = np.zeros((70, 100), dtype=np.uint8)
    values[10:30, 20:50], values[40:60, 50:90] = 1, 3
    Image.fromarray(values).save(tmp_path / f"m{suffix}")
    found = read_regions(tmp_path / f"m{suffix}", SIZE)
    assert list(found.classes) == ["1", "3"]
    assert found.classes["1"].bounds == pytest.approx((200, 100, 500, 300), abs=1)
    Image.fromarray(values > 0).save(tmp_path / f"b{suffix}")
    assert list(read_regions(tmp_path / f"b{suffix}", SIZE).classes) == [""]


BOMB = '<!DOCTYPE l [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]><Annotations>&b;</Annotations>'
CROSSED = [[100, 100], [300, 300], [300, 100], [100, 300]]


def drawn(feature: Any) -> str:
    return json.dumps([feature])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.xml", BOMB, r"no document type, got one in '.*a\.xml'"),
        (
            "a.xml",
            '<!DOCTYPE x SYSTEM "file:///etc/passwd"><Annotations/>',
            "no document type",
        ),
        (
            "a.xml",
            "<Annotations><Annotation>",
            r"readable \.xml|must be XML, got '.*a\.xml'",
        ),
        ("a.xml", "<html/>", r"ASAP or ImageScope, got <html>"),
        ("a.xml", ASAP, r"numbers, got .*annotation 0 'Tumor: Invasive' of '.*a\.xml'"),
        (
            "a.xml",
            imagescope(region([[1, 1], [5, 5]])),
            r"3 different points, got 2 in region 7",
        ),
        (
            "a.json",
            drawn(polygon(CROSSED)),
            r"cross itself, got .*\[200 200\] in feature 0 'Tumor'",
        ),
        (
            "a.json",
            drawn(polygon([[0, 0], [1e9, 0], [0, 9]])),
            r"within 10,000,000 px, got .*fea",
        ),
        (
            "a.json",
            '[{"geometry": {"type": "Polygon", "coordinates": [[[NaN, 0]]]}}]',
            "finite",
        ),
        (
            "a.json",
            drawn(polygon([["a", 0], [5, 0], [0, 9]])),
            r"numbers, got .* feature 0",
        ),
        ("a.json", drawn(polygon([[0], [5, 0], [0, 9]])), r"numbers, got .*feature 0"),
        (
            "a.json",
            drawn(polygon([[10**400, 0], [5, 0], [0, 9]])),
            r"numbers, got .*feature 0",
        ),
        ("a.json", drawn(polygon(7)), r"numbers, got .*feature 0"),
        (
            "a.json",
            drawn({"geometry": {"type": "Polygon", "coordinates": 7}}),
            r"numbers, got .*0",
        ),
        (
            "a.json",
            drawn({"geometry": {"type": "Circle"}}),
            r"got 'Circle' as feature 0",
        ),
        ("a.json", drawn(7), r"must be a table, got 7 as feature 0"),
        (
            "a.json",
            drawn({"geometry": [], "properties": [1]}),
            r"properties must be a table",
        ),
        ("a.json", "7", r"list of features, got int in '.*a\.json'"),
        ("a.json", "[" * 100_000, r"readable \.json, got '.*a\.json'"),
        ("a.json", "no json", r"readable \.json, got '.*a\.json'"),
        ("a.csv", "x,y\n1,2\n", r"columns x,y,width,height or x_min"),
        ("a.csv", "x,y,width,height\n1,b,3,4\n", r"line 2 must have numbers"),
        ("a.csv", "x,y,width,height\n1,nan,3,4\n", r"finite .*line 2"),
        ("a.doc", "", r"suffix must be one of \.geojson"),
        ("a.png", "no picture", r"readable \.png, got '.*a\.png'"),
    ],
)
def test_a_hostile_file_is_refused_by_its_name_and_feature(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        of_text(tmp_path, name, text)
    assert name in str(caught.value)


def test_utf_16_hides_no_entity(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_bytes(BOMB.encode("utf-16"))
    with pytest.raises(InvalidInputError, match="no document type"):
        read_regions(tmp_path / "a.xml", SIZE)


def test_a_polygon_that_crosses_itself_is_mended_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    assert of_geojson(tmp_path, polygon(CROSSED), mend=True).area().area == 2 * 100**2


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (lambda path: Image.new("RGB", (100, 70)).save(path), "one channel, got RGB"),
        (
            lambda path: Image.new("L", (70, 100)).save(path),
            "cover the whole slide, got 70 x 100",
        ),
    ],
)
def test_a_picture_that_is_no_mask_of_the_slide_is_refused(
    tmp_path: Path, save: Callable[[Path], None], message: str
) -> None:
    save(tmp_path / "m.png")
    with pytest.raises(InvalidInputError, match=message):
        read_regions(tmp_path / "m.png", SIZE)


def test_polygons_that_leave_the_slide_in_part_are_kept(tmp_path: Path) -> None:
    found = of_geojson(tmp_path, polygon((np.array(SQUARE) - 200).tolist()))
    assert shapely.box(0, 0, 100, 100).equals(
        found.area().intersection(shapely.box(0, 0, *SIZE))
    )
