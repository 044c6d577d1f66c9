"""The viewer in Chromium: zoom, layers, a click for similar tiles, names as text."""

import base64
import io
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image
from tests.view.conftest import HOSTILE, OWN_CLASS, A, B
from tests.view.test_layers import brute_force

from thinsection.results.folder import Results
from thinsection.slide import open_slide
from thinsection.testing.synthetic import write_he_slide
from thinsection.view import Viewer, view

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
WAIT_MS = 60_000
# true in the viewer's page alone: after a click, the page before may still be there
READY = """() => typeof slide !== "undefined" && slide
  && viewer.world.getItemAt(0) && viewer.world.getItemAt(0).getFullyLoaded()"""


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        yield running
        running.close()


@pytest.fixture
def seen() -> dict[str, list[str]]:
    return {"requests": [], "errors": []}


def opened(browser: Any, url: str, seen: dict[str, list[str]]) -> Any:
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.set_default_timeout(WAIT_MS)
    page.on("request", lambda request: seen["requests"].append(request.url))
    page.on("pageerror", lambda error: seen["errors"].append(str(error)))
    page.on("requestfailed", lambda request: seen["errors"].append(request.url))
    page.goto(url)
    page.wait_for_function(READY)
    return page


@pytest.fixture
def page(browser: Any, viewer: Viewer, seen: dict[str, list[str]]) -> Iterator[Any]:
    """On the first slide; at the end nothing has failed, and nobody else was asked."""
    page = opened(browser, viewer.url, seen)
    yield page
    assert seen["errors"] == []
    hosts = {
        urlsplit(url).netloc
        for url in seen["requests"]
        if not url.startswith(("data:", "blob:"))
    }
    assert hosts == {urlsplit(viewer.url).netloc}
    page.close()


def place_of(page: Any, x: int, y: int) -> tuple[float, float]:
    """Where in the window a point of level 0 is."""
    box = page.evaluate(
        "() => document.getElementById('osd').getBoundingClientRect().toJSON()"
    )
    frame = page.evaluate("frame()")
    return box["x"] + frame["x"] + x * frame["k"], box["y"] + frame["y"] + y * frame[
        "k"
    ]


def settled(page: Any) -> None:
    page.evaluate("viewer.viewport.applyConstraints(true)")
    page.wait_for_function("() => !viewer.isAnimating || !viewer.isAnimating()")
    page.wait_for_function(READY)


def canvas(page: Any, name: str) -> np.ndarray:
    """The px of a canvas, (H, W, 4)."""
    data = page.evaluate(f"{name}.toDataURL('image/png')").partition(",")[2]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA"))


def screen(page: Any) -> np.ndarray:
    """The slide as it is drawn, (H, W, 4), without layers."""
    return canvas(page, "viewer.drawer.canvas")


def test_it_zooms_to_the_files_px_and_says_where(page: Any, view_slides: Path) -> None:
    """At one px of the screen for one of level 0 the canvas shows what the reader reads."""
    page.keyboard.press("0")
    page.evaluate(
        "viewer.viewport.zoomTo(viewer.viewport.imageToViewportZoom(1), null, true)"
    )
    page.evaluate(
        "viewer.viewport.panTo(viewer.viewport.imageToViewportCoordinates(1000, 700), true)"
    )
    settled(page)
    assert page.inner_text("#zoom") == "0.500 µm/px, 20x"
    assert page.inner_text("#scale") == "50 µm"
    frame = page.evaluate("frame()")
    pixels = screen(page)[8:-8, 8:-8, :3].astype(int)
    x, y = round(8 - frame["x"]), round(8 - frame["y"])
    errors = {}
    with open_slide(view_slides / f"{A}.svs") as slide:
        for dx, dy in product((-3, -1, 0, 1, 3), repeat=2):
            want = slide.read_region((x + dx, y + dy), 0, pixels.shape[1::-1])
            errors[dx, dy] = np.abs(pixels - want).mean()
    best = min(errors, key=errors.__getitem__)
    assert errors[best] < 3 and max(map(abs, best)) <= 1, errors  # it lies between px
    page.mouse.move(*place_of(page, 1000, 700))
    page.wait_for_function(
        "() => /x (999|100.), y (699|70.)/.test($('place').textContent)"
    )


def test_classes_of_a_column_have_their_colours_and_names(
    page: Any, view_results: Results
) -> None:
    page.evaluate("Promise.all(slide.layers.map(layer => turn(layer, false)))")
    stored = view_results.tiles(A)
    words = stored.values(OWN_CLASS).tolist()
    code = "name => turn(slide.layers.find(layer => layer.name === name), true)"
    page.evaluate(code, OWN_CLASS)
    page.evaluate("viewer.viewport.goHome(true)")
    settled(page)
    page.evaluate("draw()")
    lines = page.inner_text("#legend").splitlines()
    assert lines[0] == OWN_CLASS
    for name in set(words):
        count = words.count(name)
        text = f"{name or 'none'}: {count} tile{'s' * (count > 1)}"
        assert text in lines
    painted = canvas(page, "over")
    frame = page.evaluate("frame()")
    colors = {HOSTILE: (255, 0, 0), "fat": (0, 0, 255)}
    for row in range(3):
        x, y = stored.coords_l0[row] + 128
        pixel = painted[
            round(frame["y"] + y * frame["k"]), round(frame["x"] + x * frame["k"])
        ]
        if words[row]:
            assert np.abs(pixel[:3].astype(int) - colors[words[row]]).max() <= 2
            assert pixel[3] == pytest.approx(128, abs=3)
        else:
            assert pixel[3] == 0
        page.mouse.move(*place_of(page, int(x), int(y)))
        told = f"{OWN_CLASS} {words[row] or 'none'}"
        page.wait_for_function(
            "told => $('place').textContent.includes(told)", arg=told
        )


def test_layers_are_drawn_with_opacity_and_legend(
    page: Any, view_results: Results
) -> None:
    def painted() -> np.ndarray:
        page.evaluate("draw()")
        return canvas(page, "over")

    page.evaluate("Promise.all(slide.layers.map(layer => turn(layer, false)))")
    assert not painted().any()
    assert page.inner_text("#legend") == ""
    tiles = view_results.tiles(A)
    for name, words in (
        ("px_focus", "≤"),
        ("principal components", "red, green, blue"),
    ):
        page.get_by_label(name).count()
        page.evaluate("n => turn(slide.layers.find(l => l.name === n), true)", name)
        assert words in page.inner_text("#legend")
        frame = page.evaluate("frame()")
        shown = painted()
        inside = (tiles.coords_l0 + 128) * frame["k"] + (frame["x"], frame["y"])
        assert all(shown[int(y), int(x), 3] == 128 for x, y in inside)  # opacity .5
        assert (shown[..., 3] > 0).sum() < 1.1 * len(inside) * (256 * frame["k"]) ** 2
        page.evaluate("n => turn(slide.layers.find(l => l.name === n), false)", name)
    layer = "slide.layers.find(l => l.name === 'px_focus')"
    page.evaluate(f"turn({layer}, true)")
    page.keyboard.press("[")
    assert page.evaluate(f"{layer}.opacity") == pytest.approx(0.4)
    page.keyboard.press(" ")
    assert not painted().any() and page.inner_text("#legend") == ""
    page.keyboard.press(" ")
    assert painted().any()
    for kind in ("outlines", "grid", "edges", "classes"):
        page.evaluate("k => turn(slide.layers.find(l => l.kind === k), true)", kind)
    page.mouse.move(*place_of(page, *(tiles.coords_l0[0] + 128).tolist()))
    focus = tiles.columns["px_focus"][0]
    page.wait_for_function("() => $('place').textContent.includes('Sharpness')")
    assert f"Sharpness {float(f'{focus:.4g}'):g}" in page.inner_text("#place")


def test_a_click_finds_the_tiles_of_an_exact_search_and_jumps_to_them(
    page: Any, view_results: Results
) -> None:
    tiles = view_results.tiles(A)
    row = len(tiles.coords_l0) // 2
    page.mouse.click(*place_of(page, *(tiles.coords_l0[row] + 128).tolist()))
    page.wait_for_function("() => $('progress').textContent === 'of 2 slides'")
    every = brute_force(view_results, A, row)
    for kind, own in (("of-slide", True), ("of-cohort", False)):
        want = [t for t in every if (t[1] == A) == own and (t[1], t[2]) != (A, row)][
            :12
        ]
        titles = page.eval_on_selector_all(
            f"#{kind} button", "all => all.map(b => b.title)"
        )
        titles = titles[1:] if own else titles  # the tile itself is first
        corners = [
            view_results.tiles(name).coords_l0[n].tolist() for _, name, n in want
        ]
        assert titles == [
            f"{name} at {x}, {y}: cosine {cosine:.4f}"
            for (cosine, name, _), (x, y) in zip(want, corners)
        ]
    page.wait_for_function(
        "() => [...document.querySelectorAll('.strip img')].slice(0, 6).every(i => i.naturalWidth)"
    )
    page.click("#of-cohort button")
    page.wait_for_function(f"() => slide && slide.id === {B!r}")
    page.wait_for_function(READY)
    x, y = corners[0]
    page.wait_for_function(
        "([x, y]) => { const f = frame(); const px = f.x + x * f.k, py = f.y + y * f.k;"
        " return px > 0 && py > 0 && px < f.width && py < f.height && f.k > .3; }",
        arg=[x, y],
    )
    page.keyboard.press("Escape")
    assert page.is_hidden("#similar")
    page.keyboard.press("p")
    page.wait_for_function(f"() => slide && slide.id !== {B!r}")


def test_names_are_text(
    page: Any, browser: Any, tmp_path: Path, seen: dict[str, list[str]]
) -> None:
    assert page.title() == f"{A} - thinsection"
    assert A in page.inner_text("#list")
    page.evaluate(
        "document.querySelectorAll('details').forEach(d => { d.open = true; })"
    )
    assert HOSTILE in page.inner_text("#layers")
    page.evaluate("n => turn(slide.layers.find(l => l.name === n), true)", HOSTILE)
    assert HOSTILE in page.inner_text("#legend")
    assert page.evaluate("document.querySelectorAll('img[src=x]').length") == 0
    path = tmp_path / 'x <b onload="1">#2 %2F é.svs'
    write_he_slide(path, (700, 600), seed=1, downsamples=(1,))
    with open_slide(path) as slide, view(slide) as other:
        second = opened(browser, other.url, seen := {"requests": [], "errors": []})
        assert second.inner_text("#name") == path.name and seen["errors"] == []
        assert second.evaluate("document.querySelectorAll('b[onload]').length") == 0
        second.close()


def test_a_slide_that_cannot_be_opened_says_why(
    browser: Any, tmp_path: Path, seen: dict[str, list[str]]
) -> None:
    write_he_slide(tmp_path / "good.svs", (700, 600), seed=1, downsamples=(1,))
    (tmp_path / "text.svs").write_text("no slide")
    with Viewer([tmp_path]) as viewer:
        page = opened(browser, viewer.url, seen)
        page.click("#list li:nth-child(2) button")
        page.wait_for_function(
            "() => $('message').textContent.includes('no reader opens')"
        )
        page.click("#list li:nth-child(1) button")
        page.wait_for_function(READY)
        assert page.inner_text("#message") == ""
        page.fill("#filter", "TEX")
        assert [row.is_visible() for row in page.query_selector_all("#list li")] == [
            False,
            True,
        ]
        page.close()
