"""Random shapes in each form of annotations give the areas that shapely makes of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

import numpy as np
import openpyxl
import pytest
import shapely
import shapely.affinity

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.slide.annotations import Regions, RegionsConfig, read_regions
from thinsection.slide.cohort import SlideEntry

SIZE = (3000, 2100)
SEEDS = range(12)
CLASSES = ("Tumor", "Stroma", "Fat & skin")


class Drawn(NamedTuple):
    """One drawn area: its kind, its points as a program stores them, and its truth."""

    kind: str
    points: list[list[float]]
    area: shapely.Polygon


def draw(rng: np.random.Generator, middle: Sequence[float], radius: float) -> Drawn:
    """Returns a random polygon, rectangle or ellipse about a place."""
    kind = str(rng.choice(["polygon", "rectangle", "ellipse"]))
    x, y = middle
    width, height = radius * rng.uniform(0.5, 1, 2)
    corners = [[x - width, y - height], [x + width, y + height]]
    if kind == "polygon":
        angles = np.sort(rng.uniform(0, 2 * np.pi, 9))
        angles = np.concatenate([angles, np.linspace(0, 2 * np.pi, 7)[:-1]])
        angles.sort()
        radii = radius * rng.uniform(0.4, 1, len(angles))
        ring = np.stack([x + radii * np.cos(angles), y + radii * np.sin(angles)], 1)
        return Drawn(kind, ring.tolist(), shapely.Polygon(ring))
    box = shapely.box(*corners[0], *corners[1])
    if kind == "rectangle":
        return Drawn(kind, corners, box)
    circle = shapely.Point(x, y).buffer(1, quad_segs=64)
    return Drawn(kind, corners, shapely.affinity.scale(circle, width, height))


def assert_areas(found: Regions, truth: dict[str, list[Any]]) -> None:
    """Each class covers what was drawn; an ellipse's outline is worth a part in a thousand."""
    assert set(found.classes) == set(truth)
    for name, parts in truth.items():
        area = shapely.union_all(parts)
        difference = shapely.symmetric_difference(found.classes[name], area)
        assert difference.area <= 0.002 * shapely.union_all(parts).envelope.area


def xml_points(points: list[list[float]], tag: str) -> str:
    return "".join(f'<{tag} X="{x}" Y="{y}" Z="0"/>' for x, y in points)


NUMBERS = {"polygon": 0, "rectangle": 1, "ellipse": 2}
LEFT_OUT = {"imagescope": ("3", "4", "5"), "halo": ("Ruler", "Pin", "Arrow")}


def xml_region(drawn: Drawn, program: str, *, negative: bool, text: str) -> str:
    points = drawn.points
    kind = drawn.kind.capitalize()
    tag = "V"
    if program == "imagescope":
        kind = str(NUMBERS[drawn.kind])
        tag = "Vertex"
        if drawn.kind == "rectangle":
            points = [list(point) for point in drawn.area.exterior.coords[:4]]
    head = f'Type="{kind}" Text={quoteattr(text)} NegativeROA="{int(negative)}"'
    return f"<Region {head}><Vertices>{xml_points(points, tag)}</Vertices></Region>"


@pytest.mark.parametrize("program", ["imagescope", "halo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_regions_holes_and_islands_of_random_layers(
    tmp_path: Path, seed: int, program: str
) -> None:
    rng = np.random.default_rng(seed)
    layers = []
    truth: dict[str, list[Any]] = {}
    num_left_out = 0
    for class_name in rng.permutation(CLASSES)[: rng.integers(1, 4)].tolist():
        regions = []
        for place in range(rng.integers(1, 4)):
            middle = 500 + 1000 * place, rng.uniform(500, 1600)
            outer = draw(rng, middle, 450)
            hole = draw(rng, middle, 150)
            island = draw(rng, middle, 40)
            area = outer.area.difference(hole.area).union(island.area)
            truth.setdefault(class_name, []).append(area)
            # a hole has a text of its own, or none, and stands anywhere in its layer
            text = str(rng.choice(["", "hole", class_name]))
            regions += [
                xml_region(outer, program, negative=False, text=class_name),
                xml_region(hole, program, negative=True, text=text),
                xml_region(island, program, negative=False, text=class_name),
            ]
        for kind in rng.permutation(LEFT_OUT[program])[: rng.integers(0, 3)]:
            points = xml_points([[5, 5], [9, 9]], "V")
            regions.append(
                f'<Region Type="{kind}"><Vertices>{points}</Vertices></Region>'
            )
            num_left_out += 1
        rng.shuffle(regions)
        # without a name of its layer the text of a region is its class
        layer_name = class_name if rng.random() < 0.7 else ""
        body = "".join(regions)
        layers.append(
            f"<Annotation Name={quoteattr(layer_name)}><Regions>{body}</Regions></Annotation>"
        )
    path = tmp_path / ("a.annotations" if program == "halo" else "a.xml")
    path.write_text(f"<Annotations>{''.join(layers)}</Annotations>")
    found = read_regions(path, SIZE)
    assert_areas(found, truth)
    assert sum(int(note.split()[0]) for note in found.notes) == num_left_out


def test_a_hole_cuts_its_layer_alone_and_what_it_swallows_is_counted(
    tmp_path: Path,
) -> None:
    square = Drawn("rectangle", [[100, 100], [300, 300]], shapely.box(0, 0, 1, 1))
    aside = Drawn("rectangle", [[900, 900], [950, 950]], shapely.box(0, 0, 1, 1))
    both = [
        xml_region(square, "halo", negative=True, text=""),
        xml_region(aside, "halo", negative=True, text=""),
    ]
    area = xml_region(square, "halo", negative=False, text="")
    layers = [("A", area + "".join(both)), ("B", area)]
    text = "".join(
        f'<Annotation Name="{name}"><Regions>{body}</Regions></Annotation>'
        for name, body in layers
    )
    path = tmp_path / "a.xml"
    path.write_text(f"<Annotations>{text}</Annotations>")
    found = read_regions(path, SIZE)
    assert found.classes["A"].is_empty and found.classes["B"].area == 200**2
    assert set(found.notes) == {
        "1 annotation that lies in a hole ignored in a.xml",
        "1 hole that lies in no area ignored in a.xml",
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_of_asap_listed_or_not_in_any_depth(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = {"Invasive": "Tumor", "Front": "Invasive", "Tumor": "None", "Fat": "None"}
    full = {
        "Tumor": "Tumor",
        "Invasive": "Tumor: Invasive",
        "Front": "Tumor: Invasive: Front",
        "Fat": "Fat",
        "None": "",
    }
    unlisted = set(rng.permutation(["Fat", "Tumor"])[: rng.integers(0, 3)].tolist())
    truth: dict[str, list[Any]] = {}
    body = ""
    for number in range(rng.integers(1, 7)):
        group = str(rng.choice(list(full)))
        shape = draw(rng, rng.uniform(500, 1600, 2), 400)
        points = shape.points
        kind = "Polygon"
        if shape.kind == "rectangle":
            kind = "Rectangle"
            points = [list(point) for point in shape.area.exterior.coords[:4]]
        elif shape.kind == "ellipse":
            kind = "Spline"
            points = [list(point) for point in shape.area.exterior.coords[:-1]]
        truth.setdefault(full[group], []).append(shape.area)
        coordinates = [
            f'<Coordinate Order="{order}" X="{x}" Y="{y}"/>'
            for order, (x, y) in enumerate(points)
        ]
        rng.shuffle(coordinates)
        body += (
            f'<Annotation Name="a{number}" Type="{kind}" PartOfGroup="{group}"><Coordinates>'
            f"{''.join(coordinates)}</Coordinates></Annotation>"
        )
    dots = int(rng.integers(0, 3))
    body += '<Annotation Type="Dot" PartOfGroup="Fat"/>' * dots
    groups = "".join(
        f'<Group Name="{name}" PartOfGroup="{parent}"/>'
        for name, parent in parents.items()
        if name not in unlisted
    )
    path = tmp_path / "a.xml"
    path.write_text(
        f"<ASAP_Annotations><Annotations>{body}</Annotations>"
        f"<AnnotationGroups>{groups}</AnnotationGroups></ASAP_Annotations>"
    )
    found = read_regions(path, SIZE)
    assert_areas(found, truth)
    assert sum(int(note.split()[0]) for note in found.notes) == dots


def geometry(area: Any) -> dict[str, Any]:
    return dict(json.loads(shapely.to_geojson(area)))


@pytest.mark.parametrize("seed", SEEDS)
def test_geojson_nested_in_any_way(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth: dict[str, list[Any]] = {}
    features: list[Any] = []
    expected = dict.fromkeys(["point", "line", "detection", "object"], 0)
    for _ in range(rng.integers(1, 8)):
        name = str(rng.choice(CLASSES))
        middle = rng.uniform(500, 1600, 2)
        hole = draw(rng, middle, 150)
        outer = draw(rng, middle, 450).area.difference(hole.area)
        shape: Any = geometry(outer)
        truth.setdefault(name, []).append(outer)
        for _ in range(rng.integers(0, 3)):  # collections in collections
            parts = [shape, geometry(shapely.Point(3, 4))]
            rng.shuffle(parts)
            shape = {"type": "GeometryCollection", "geometries": parts}
            expected["point"] += 1
        properties = {"classification": {"name": name}}
        features.append(
            {"type": "Feature", "geometry": shape, "properties": properties}
        )
    others: list[tuple[str, dict[str, Any]]] = [
        ("object", {"type": "Feature", "geometry": None, "properties": {}}),
        ("object", {"type": "Feature", "geometry": None, "properties": None}),
        ("object", {"type": "Feature", "geometry": geometry(shapely.Polygon())}),
        ("object", {"geometry": {"type": "GeometryCollection", "geometries": []}}),
        ("line", {"geometry": geometry(shapely.LineString([(0, 0), (4, 4)]))}),
        ("point", {"geometry": geometry(shapely.MultiPoint([(0, 0), (4, 4)]))}),
        (
            "detection",
            {
                "id": "PathDetectionObject",
                "geometry": geometry(shapely.box(0, 0, 9, 9)),
            },
        ),
    ]
    for kind, feature in others:
        repeats = int(rng.integers(0, 3))
        features += [feature] * repeats
        expected[kind] += repeats
    rng.shuffle(features)
    cut = int(rng.integers(0, len(features) + 1))
    inner = {"type": "FeatureCollection", "features": features[cut:]}
    document: Any = {"type": "FeatureCollection", "features": [*features[:cut], inner]}
    if rng.random() < 0.3:
        document = [document]
    path = tmp_path / "a.geojson"
    path.write_text(json.dumps(document))
    found = read_regions(path, SIZE)
    assert_areas(found, truth)
    counts = dict.fromkeys(expected, 0)
    for note in found.notes:
        number, noun = note.split()[:2]
        counts[noun.removesuffix("s")] += int(number)
    assert counts == expected


def test_a_collection_of_geometries_may_stand_alone(tmp_path: Path) -> None:
    parts = [geometry(shapely.box(0, 0, 50, 20)), geometry(shapely.box(90, 0, 95, 10))]
    document = {"type": "GeometryCollection", "geometries": parts}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    assert read_regions(path, SIZE).area().area == 1050


@pytest.mark.parametrize("seed", SEEDS)
def test_boxes_of_several_slides_whose_ids_are_written_as_files(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    slides = ("s1", "s10", "S 2")
    written = {
        slide: str(
            rng.choice([slide, f"{slide}.svs", f"/data/x/{slide}.tif", f" {slide}"])
        )
        for slide in slides
    }
    truth: dict[str, dict[str, list[Any]]] = {slide: {} for slide in slides}
    header = str(
        rng.choice(["x,y,width,height", "x_min,y_min,x_max,y_max", "X1,Y1,X2,Y2"])
    )
    lines = [f"{rng.choice(['slide_id', 'filename', 'slide'])},{header},label"]
    for _ in range(rng.integers(3, 20)):
        slide = str(rng.choice(slides))
        class_name = str(rng.choice(["Tumor", "Stroma"]))
        x, y, width, height = rng.integers(1, 900, 4).tolist()
        box = shapely.box(x, y, x + width, y + height)
        truth[slide].setdefault(class_name, []).append(box)
        numbers = [x, y, width, height] if "width" in header else map(int, box.bounds)
        lines.append(",".join(map(str, [written[slide], *numbers, class_name])))
    path = tmp_path / "boxes.csv"
    path.write_text("\n".join(lines))
    for slide in slides:
        found = read_regions(path, SIZE, slide_id=slide)
        assert_areas(found, truth[slide])
        empty = () if truth[slide] else (f"no annotation of {slide!r} in boxes.csv",)
        assert found.notes == empty


def test_a_table_of_boxes_may_have_any_form_of_tables(tmp_path: Path) -> None:
    semicolons = tmp_path / "b.csv"
    semicolons.write_text("slide_id;x;y;width;height\ns1.svs;10,5;20;30;40\n")
    workbook = tmp_path / "b.xlsx"
    book = openpyxl.Workbook()
    book.active.append(["slide", "x_min", "y_min", "x_max", "y_max", "class"])
    book.active.append(["s1", 10.5, 20, 40.5, 60, "Tumor"])
    book.active.append(["s2", 0, 0, 9, 9, "Tumor"])
    book.save(workbook)
    for path in (semicolons, workbook):
        found = read_regions(path, SIZE, slide_id="s1")
        assert found.area().bounds == (10.5, 20, 40.5, 60)
    shifted = tmp_path / "shifted.csv"
    shifted.write_text("slide_id,x,y,width,height\ns1,1,2,3,4\ns1,A, B,1,2,3,4\n")
    with pytest.raises(InvalidInputError, match="line 3"):
        read_regions(shifted, SIZE, slide_id="s1")
    (tmp_path / "none.csv").write_text("x,y,width,height\n")
    found = read_regions(tmp_path / "none.csv", SIZE, slide_id="s1")
    assert found.area().is_empty
    assert found.notes == ("no annotation of 's1' in none.csv",)


def entries(*slide_ids: str, folder: Path = Path()) -> list[SlideEntry]:
    return [
        SlideEntry(slide_id=name, slide_path=str(folder / f"{name}.svs"))
        for name in slide_ids
    ]


def test_boxes_that_fit_no_slide_or_do_not_say_which_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "boxes.csv"
    path.write_text("slide_id,x,y,w,h\nS1,1,1,5,5\n")
    config = RegionsConfig(roi=str(path))
    with pytest.raises(ConfigError, match=r"boxes of S1 \(did you mean s1\?\)"):
        config.check(entries("s1", "s2"))
    with pytest.raises(InvalidInputError, match="got 'S1' for 's1'"):
        read_regions(path, SIZE, slide_id="s1")
    config.check(entries("another"))  # one slide that has no box
    with pytest.raises(ConfigError, match="only boxes of S1"):
        config.check(entries("another", "second"))
    path.write_text("x,y,w,h\n1,1,5,5\n")
    config.check(entries("s1"))
    with pytest.raises(ConfigError, match="must have a column slide_id"):
        config.check(entries("s1", "s2"))


def box_file(path: Path, *classes: str) -> None:
    features = [
        {
            "geometry": geometry(shapely.box(0, 0, 9, 9)),
            "properties": {"classification": {"name": name}},
        }
        for name in classes
    ]
    path.write_text(json.dumps(features))


def test_a_class_that_no_slide_has_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    box_file(tmp_path / "a.geojson", "Normal")
    box_file(tmp_path / "b.svs.GeoJSON", "normal", "Tumor")
    both = entries("a", "b")
    config = RegionsConfig(roi=str(tmp_path), include_class=("tumor", "NORMAL"))
    config.check(both)
    config = RegionsConfig(roi=str(tmp_path), include_class=("tumor", "Tumour"))
    with pytest.raises(InvalidInputError, match=r"got 'Tumour'; did you mean 'Tumor'"):
        config.check(both)


def test_of_several_files_of_a_slide_one_is_read_and_the_slide_is_none(
    tmp_path: Path,
) -> None:
    for name in ("a.xml", "a.geojson", "a.tif", "b.svs.XML", "C.json"):
        (tmp_path / name).touch()
    config = RegionsConfig(roi=str(tmp_path))
    (slide,) = entries("a")
    assert [path.name for path in config.files("roi", slide)] == [
        "a.geojson",
        "a.xml",
        "a.tif",
    ]
    slide = SlideEntry(slide_id="a", slide_path=str(tmp_path / "a.tif"))
    assert [path.suffix for path in config.files("roi", slide)] == [".geojson", ".xml"]
    (slide,) = entries("b")
    assert [path.name for path in config.files("roi", slide)] == ["b.svs.XML"]
    (slide,) = entries("c")
    with pytest.raises(InvalidInputError, match="did you mean 'C'"):
        config.files("roi", slide)
