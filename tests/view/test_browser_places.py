"""The viewer's address, first sight and marks in Chromium."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import shapely
from shapely.geometry import shape
from tests.view.conftest import A, B
from tests.view.test_browser import READY, WAIT_MS, canvas, place_of, settled

from thinsection.results.folder import Results
from thinsection.slide.annotation_files import read_shapes
from thinsection.view import Viewer
from thinsection.view.layers import outline_layers

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
pytestmark = pytest.mark.check  # a browser


@pytest.fixture(scope="module")
def context(chromium: str) -> Iterator[Any]:
    """A browser that lets pages write to the clipboard."""
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        yield running.new_context(
            viewport={"width": 1280, "height": 800},
            permissions=["clipboard-read", "clipboard-write"],
        )
        running.close()


@pytest.fixture
def page(context: Any, viewer: Viewer) -> Iterator[Any]:
    """On the first slide; at the end no script has failed."""
    page = context.new_page()
    errors: list[str] = []
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(viewer.url)
    page.wait_for_function(READY)
    yield page
    assert errors == []
    page.close()


def shown(page: Any) -> dict[str, Any]:
    """Slide, middle in level-0 px and visible layers, from the page's drawing."""
    settled(page)
    frame = page.evaluate("frame()")
    return {
        "slide": page.evaluate("slide.id"),
        "x": (frame["width"] / 2 - frame["x"]) / frame["k"],
        "y": (frame["height"] / 2 - frame["y"]) / frame["k"],
        "downsample": 1 / frame["k"],
        "layers": page.evaluate("slide.layers.filter(l => l.on).map(l => l.key)"),
    }


def go(page: Any, x: int, y: int, downsample: float) -> None:
    page.evaluate(
        "([x, y, d]) => { const v = viewer.viewport;"
        " v.zoomTo(v.imageToViewportZoom(1 / d), null, true);"
        " v.panTo(v.imageToViewportCoordinates(x, y), true); }",
        [x, y, downsample],
    )
    settled(page)


def test_a_copied_link_opens_the_same_place_with_the_same_layers(
    page: Any, context: Any, view_results: Results
) -> None:
    (grid,) = view_results.grids
    go(page, 700, 500, 2)
    page.evaluate("turn(slide.layers.find(l => l.name === 'px_focus'), true)")
    page.click("#copy-link")
    page.wait_for_function("() => $('said').textContent === 'Copied the link'")
    link = page.evaluate("navigator.clipboard.readText()")
    place = parse_qs(urlsplit(link).fragment)
    assert place == {
        "slide": [A],
        "x": ["700"],
        "y": ["500"],
        "downsample": ["2"],
        "layer": ["qc_auto/Usable tissue", f"{grid}/px_focus"],
    }
    before = shown(page)
    page.click("#list li:nth-child(2) button")
    page.wait_for_function(f"() => slide && slide.id === {B!r}")
    page.evaluate("link => { location.hash = new URL(link).hash; }", link)
    page.wait_for_function(f"() => slide && slide.id !== {B!r}")
    other = context.new_page()
    other.goto(link)
    for opened in (page, other):
        opened.wait_for_function(READY)
        opened.wait_for_function("() => slide.layers.filter(l => l.data).length > 1")
        after = shown(opened)
        assert after["layers"] == before["layers"]
        for name in ("x", "y", "downsample"):
            assert after[name] == pytest.approx(before[name], abs=1), name
    other.close()


def test_the_address_is_that_of_the_slide_that_is_being_opened(page: Any) -> None:
    hash_ = page.evaluate(
        """async id => {
          const wait = ms => new Promise(done => setTimeout(done, ms));
          const fetched = fetch;
          window.fetch = async (...query) => { await wait(1000); return fetched(...query); };
          note();
          open(id);
          await wait(500);
          window.fetch = fetched;
          return location.hash;
        }""",
        B,
    )
    assert parse_qs(hash_[1:])["slide"] == [B]
    page.wait_for_function(f"() => slide && slide.id === {B!r}")


def test_the_address_follows_what_is_seen(page: Any) -> None:
    go(page, 1200, 800, 1)
    page.wait_for_function("() => location.hash.includes('x=1200&y=800&downsample=1')")
    page.evaluate("Promise.all(slide.layers.map(layer => turn(layer, false)))")
    page.wait_for_function("() => location.hash.endsWith('&layer=')")
    page.reload()
    page.wait_for_function(READY)
    assert shown(page)["layers"] == []
    page.evaluate(
        "location.hash = `slide=${encodeURIComponent(slide.id)}&layer=leiden&layer=own`"
    )
    page.wait_for_function(
        "() => $('message').textContent.includes('layer leiden, own, which')"
    )
    page.evaluate("location.hash = 'slide=nobody'")
    page.wait_for_function("() => $('message').textContent.includes('nobody')")


def test_coordinates_are_copied(page: Any) -> None:
    go(page, 640, 480, 2)
    page.click("#copy-place")
    page.wait_for_function("() => $('said').textContent.startsWith('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "640, 480"
    page.mouse.move(*place_of(page, 700, 500))
    page.keyboard.press("c")
    page.wait_for_function("() => $('said').textContent.includes('level-0 px)')")
    x, y = map(int, page.evaluate("navigator.clipboard.readText()").split(", "))
    assert abs(x - 700) <= 2 and abs(y - 500) <= 2


def test_the_first_sight_is_the_stain_with_an_outline(page: Any) -> None:
    """In the middle of each piece of tissue nothing is drawn over the slide."""
    settled(page)
    assert shown(page)["layers"] == ["qc_auto/Usable tissue"]
    page.evaluate("draw()")
    drawn = canvas(page, "over")[..., 3] > 0
    assert 0 < drawn.mean() < 0.05  # a line
    layer = page.evaluate("fetch(at(slide.id, 'layers', 0)).then(a => a.json())")
    tissue = shapely.union_all([shape(geometry) for geometry in layer])
    frame = page.evaluate("frame()")
    inside = shapely.get_coordinates(tissue.buffer(-40).representative_point())[0]
    x, y = (inside * frame["k"] + (frame["x"], frame["y"])).astype(int)
    assert not drawn[y - 3 : y + 4, x - 3 : x + 4].any()
    page.evaluate("slide.layers[0].opacity = 0.5; draw()")  # the slider fills it
    assert (canvas(page, "over")[y, x, 3]) == pytest.approx(128, abs=2)


def test_empty_layers_are_folded_away_and_names_are_words(page: Any) -> None:
    text = page.inner_text("#layers")
    assert "Quality control, auto" in text and "qc_" not in text
    assert "Ink" not in text.splitlines()  # no slide has ink
    group = page.locator("#layers details:not(.empty)", has_text="Tiles, their tissue")
    group.locator("> summary").click()
    words = group.locator("details.empty > summary").inner_text()
    assert words.endswith("empty on this slide")
    group.locator("details.empty > summary").click()
    assert group.get_by_text("Ink", exact=True).is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_marks_are_saved_as_geojson_that_other_readers_open(
    page: Any, tmp_path: Path
) -> None:
    """Read by shapely, by the reader of drawn regions, and drawn again as a layer."""
    go(page, 900, 700, 2)
    page.click("#mark-box")
    page.mouse.move(*place_of(page, 600, 500))
    page.mouse.down()
    page.mouse.move(*place_of(page, 800, 650), steps=4)
    page.mouse.up()
    page.fill("#marks input", "Tumor: invasive")
    before = shown(page)
    page.click("#mark-point")
    page.mouse.click(*place_of(page, 1000, 900))
    page.keyboard.press("Escape")
    assert page.is_hidden("#similar")  # marking asks for nothing
    assert shown(page)["x"] == pytest.approx(before["x"], abs=1)  # and moves nothing
    assert page.locator("#marks li").count() == 2
    with page.expect_download() as download:
        page.click("#save-marks")
    path = tmp_path / "marks.geojson"
    download.value.save_as(path)
    assert download.value.suggested_filename.endswith(".geojson")
    document = json.loads(path.read_text())
    box, point = document["features"]
    assert document["type"] == "FeatureCollection"
    polygon = shape(box["geometry"])
    assert polygon.is_valid and polygon.area == pytest.approx(200 * 150, rel=0.05)
    np.testing.assert_allclose(polygon.bounds, (600, 500, 800, 650), atol=3)
    np.testing.assert_allclose(shape(point["geometry"]).coords[0], (1000, 900), atol=3)
    for feature in (box, point):  # as QuPath writes and reads objects
        assert feature["type"] == "Feature" and len(feature["id"]) == 36
        assert feature["properties"]["objectType"] == "annotation"
        classification = feature["properties"]["classification"]
        assert classification["name"] == "Tumor: invasive"
        assert len(classification["color"]) == 3
    region, ignored = read_shapes(path, (2100, 1500), A)  # of --roi and --tissue
    assert (region.class_name, ignored.ignored) == ("Tumor: invasive", "point")
    (layer,) = outline_layers(path, "annotations")
    assert (layer.name, layer.color) == ("Tumor: invasive", "#c2185b")
    assert len(json.loads(layer.read())) == 2
    page.locator("#marks li").first.get_by_title("remove").click()
    assert page.locator("#marks li").count() == 1
    page.evaluate("unsaved = false")
