"""Cells in Chromium: outlines where the file has them, and the counts of each grid."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from tests.support.cell_files import run_with_cells, write_cells
from tests.view.test_browser import READY, WAIT_MS, canvas, settled

import thinsection as ts
from thinsection.results.folder import Results
from thinsection.testing.synthetic import write_he_slide
from thinsection.view import Viewer

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
pytestmark = pytest.mark.check  # a browser

# both have their middle in view where one is zoomed in
SIZES = {"a": (5000, 3000), "b": (4200, 3600)}
GRIDS = {"256px_0.5mpp": 256, "256px_1mpp": 512}
# the last has more cells than the viewer outlines at once; slide b has half of them
TABLES = {"nuclei": 500, "other": 700, "dense": 12_000}
# px of the screen between the points at which nothing may be drawn
STEP_PX = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides with three tables of cells and two grids."""
    root = tmp_path_factory.mktemp("cells")
    for place, (slide, size) in enumerate(SIZES.items()):
        write_he_slide(root / f"{slide}.svs", size, seed=3 + place, downsamples=(1, 4))
        for name, number in TABLES.items():
            write_cells(
                root / name / f"{slide}.geojson",
                number=number // (1 + place),
                seed=number + place,
                size=size,
            )
    run_with_cells(
        root, tuple(TABLES), slides=tuple(SIZES), tile_px=256, tile_mpp=("0.5", "1")
    )
    return root


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    return ts.open_results(root / "results")


@pytest.fixture(scope="module")
def page(results: Results, chromium: str) -> Iterator[Any]:
    """The viewer's page; at the end no script has failed."""
    pytest.importorskip("uvicorn", reason="the extra `view` is not installed")
    errors: list[str] = []
    with Viewer(results) as viewer, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(viewer.url)
        page.wait_for_function(READY)
        yield page
        browser.close()
    assert errors == []


def show_slide(page: Any, slide: str) -> None:
    """Opens a slide, unless it is shown."""
    page.evaluate(f"open({slide!r})")
    page.wait_for_function(f"() => slide && slide.id === {slide!r}")
    page.wait_for_function(READY)


def turn_on(page: Any, condition: str) -> dict[str, Any]:
    """Shows only the layer for which a condition holds; what the page knows of it."""
    page.evaluate("Promise.all(slide.layers.map(layer => turn(layer, false)))")
    number = page.evaluate(f"slide.layers.findIndex(layer => {condition})")
    assert number >= 0
    page.evaluate(f"turn(slide.layers[{number}], true)")
    page.wait_for_function(f"() => slide.layers[{number}].data")
    facts: dict[str, Any] = page.evaluate(
        f"(({{names, colors, opacity}}) => ({{names, colors, opacity}}))"
        f"(slide.layers[{number}])"
    )
    return facts | {"layer": f"slide.layers[{number}]"}


def zoom_in(page: Any) -> None:
    """One px of the screen for one of level 0, around the middle of the slide."""
    page.evaluate(
        "viewer.viewport.zoomTo(viewer.viewport.imageToViewportZoom(1), null, true)"
    )
    page.evaluate(
        "viewer.viewport.panTo(viewer.viewport.imageToViewportCoordinates("
        "slide.size[0] / 2, slide.size[1] / 2), true)"
    )
    settled(page)


def outlined(page: Any, layer: str) -> np.ndarray:
    """The layer's px, (H, W, 4), when all outlines in the view are drawn."""
    page.evaluate("draw()")
    page.wait_for_function(
        f"() => {{ const shot = {layer}.data.shot;"
        " return shot && !shot.isPartial && !shot.isStale && shot.k === frame().k; }"
    )
    page.evaluate("draw()")
    return canvas(page, "over")


def cells_of(root: Path, name: str, slide: str) -> tuple[np.ndarray, list[str]]:
    """Polygons of a file, by shapely, and their classes."""
    features = json.loads((root / name / f"{slide}.geojson").read_text())["features"]
    shapes = [shapely.geometry.shape(feature["geometry"]) for feature in features]
    names = [feature["properties"]["classification"]["name"] for feature in features]
    return np.array(shapes), names


def color_of(text: str) -> np.ndarray:
    """Red, green and blue of a text such as '#ff8000'."""
    return np.array([int(text[start : start + 2], 16) for start in (1, 3, 5)])


def check_outlines(page: Any, root: Path, name: str, slide: str) -> int:
    """Compares what is drawn with the file; returns the number of compared cells."""
    show_slide(page, slide)
    facts = turn_on(page, f"layer.kind === 'cells' && layer.group === 'cells_{name}'")
    zoom_in(page)
    painted = outlined(page, facts["layer"]).astype(int)
    frame = page.evaluate("frame()")
    height, width = painted.shape[:2]
    shapes, names = cells_of(root, name, slide)
    centers = shapely.get_coordinates(shapely.centroid(shapes))
    places = centers * frame["k"] + (frame["x"], frame["y"])
    is_visible = ((places > 20) & (places < (width - 20, height - 20))).all(axis=1)
    tree = shapely.STRtree(shapes)
    num_compared = 0
    for row in np.flatnonzero(is_visible).tolist():
        x, y = places[row].astype(int)
        assert painted[y, x, 3] > 0
        center = shapely.points(centers[row])
        if len(tree.query(center, predicate="dwithin", distance=3)) == 1:  # no other
            color = color_of(facts["colors"][facts["names"].index(names[row])])
            assert np.abs(painted[y, x, :3] - color).max() <= 4
            assert painted[y, x, 3] == pytest.approx(255 * facts["opacity"] / 2, abs=3)
            num_compared += 1
    # nothing is drawn where no cell is
    columns, rows = np.meshgrid(
        np.arange(0, width, STEP_PX), np.arange(0, height, STEP_PX)
    )
    points = np.stack([columns.ravel(), rows.ravel()], axis=1)
    at_l0 = (points + 0.5 - (frame["x"], frame["y"])) / frame["k"]
    near, _ = tree.query(shapely.points(at_l0), predicate="dwithin", distance=4)
    free = np.setdiff1d(np.arange(len(points)), near)
    assert len(free) > 500
    assert not painted[points[free, 1], points[free, 0]].any()
    return num_compared


@pytest.mark.parametrize(
    ("name", "slide"), [("nuclei", "a"), ("other", "b"), ("dense", "a"), ("dense", "b")]
)
def test_outlines_of_each_table_lie_where_its_file_has_them(
    page: Any, root: Path, name: str, slide: str
) -> None:
    assert check_outlines(page, root, name, slide) > 30
    legend = page.inner_text("#legend").splitlines()
    assert legend == [f"Cells, {name}", "Immune cells", "Tumour"]


def test_many_cells_are_shown_as_their_density(page: Any, root: Path) -> None:
    show_slide(page, "a")
    facts = turn_on(page, "layer.kind === 'cells' && layer.group === 'cells_dense'")
    page.evaluate("viewer.viewport.goHome(true)")
    settled(page)
    page.evaluate("draw()")
    assert page.inner_text("#legend").startswith("Cells, dense: per mm²")
    painted = canvas(page, "over").astype(int)
    frame = page.evaluate("frame()")
    shapes, _ = cells_of(root, "dense", "a")
    centers = shapely.get_coordinates(shapely.centroid(shapes))
    squares, counts = np.unique(centers // 256, axis=0, return_counts=True)
    middles = (squares + 0.5) * 256 * frame["k"] + (frame["x"], frame["y"])
    columns, rows = middles.astype(int).T
    assert (painted[rows, columns, 3] == round(255 * facts["opacity"])).all()
    # from blue to yellow: more cells are brighter
    brightness = painted[rows, columns, :3].sum(axis=1)
    order = np.argsort(counts, kind="stable")
    assert (np.diff(brightness[order])[np.diff(counts[order]) > 0] > -12).all()
    assert brightness[order[-1]] > 2 * brightness[order[0]]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["nuclei", "dense"])
def test_each_grid_has_the_counts_of_its_tiles(
    page: Any, results: Results, root: Path, grid: str, name: str
) -> None:
    show_slide(page, "b")
    key = f"{grid}/cells_{name}:count"
    facts = turn_on(page, f"layer.key === {key!r}")
    page.evaluate("viewer.viewport.goHome(true)")
    settled(page)
    data = page.evaluate(
        f"(({{coords, values, width}}) => [[...coords], [...values], width])"
        f"({facts['layer']}.data)"
    )
    corners = np.array(data[0]).reshape(-1, 2)
    edge = GRIDS[grid]
    assert data[2] == edge
    np.testing.assert_array_equal(corners, results.tiles("b", grid).coords_l0)
    shapes, _ = cells_of(root, name, "b")
    centers = shapely.get_coordinates(shapely.centroid(shapes))
    inside = (corners[:, None] <= centers) & (centers < corners[:, None] + edge)
    assert data[1] == inside.all(axis=2).sum(axis=1).tolist()
    assert page.inner_text("#legend")
