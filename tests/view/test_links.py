"""Every link of every page of a results folder, from disk and in the viewer."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import numpy as np
import pytest
from tests.support.shell import thinsection
from tests.view.test_browser import READY
from tests.view.test_server import ask

from thinsection.errors import MissingDependencyError
from thinsection.files.atomic import write_table
from thinsection.results.folder import open_results
from thinsection.testing.synthetic import write_he_slide
from thinsection.view import ViewConfig, Viewer
from thinsection.view.shown import ShownSlides

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
pytestmark = pytest.mark.check  # seven commands and a browser
COMMANDS = """
run slides --out results --qc auto --measures --no-pretrained --memory 512MiB
train results --labels labels.csv --target label --out EXPERIMENT --folds 2 --epochs 2
heatmap EXPERIMENT/model.safetensors results
heatmap px_focus results
predict EXPERIMENT/model.safetensors results --labels labels.csv
probe slide labels.csv --embeddings results --out results/probes/grade
efficiency results
"""
# all that a page names: links, pictures, scripts, pictures behind a click
NAMED = """() => {
  const all = (query, read) => [...document.querySelectorAll(query)].flatMap(read);
  const behind = slide => pictures(slide).flatMap(picture => picture.slice(1));
  return [
    ...all("a[href]", one => one.getAttribute("href")),
    ...all("img[src], script[src]", one => one.getAttribute("src")),
    ...all(".thumb", one => (one.style.backgroundImage.match(/url\\("(.*)"\\)/) || []).slice(1)),
    ...(typeof slides === "undefined" ? [] : slides.flatMap(behind)),
    ...all("[data-pictures]", one => JSON.parse(one.dataset.pictures).map(p => p[1])),
  ].filter(Boolean);
}"""


@dataclass
class Crawled:
    """What the pages that were reached name."""

    pages: set[Path] = field(default_factory=set)
    files: set[Path] = field(default_factory=set)
    places: set[str] = field(default_factory=set)
    widths: dict[str, int] = field(default_factory=dict)
    without_way_back: list[Path] = field(default_factory=list)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a run with quality control, an experiment, predictions, heatmaps and a probe."""
    home = tmp_path_factory.mktemp("a folder, 'named' #1")
    (home / "slides").mkdir()
    rows = []
    for number in range(10):  # `probe` needs five of each class
        name = f"s {number} & ü"
        path = home / "slides" / f"{name}.svs"
        write_he_slide(path, (1100, 900), seed=number, downsamples=(1, 4))
        rows.append({"slide_id": name, "label": "high" if number % 2 else "low"})
    (home / "slides" / "text.svs").write_text("no slide")
    write_table(home / "labels.csv", rows)
    commands = COMMANDS.replace("EXPERIMENT", "results/experiments/grade")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for line in commands.strip().splitlines():
            done = thinsection(*line.split())
            # text.svs has no result
            partial = (
                line.startswith(("run", "predict", "heatmap")) and done.returncode == 3
            )
            assert done.returncode == 0 or partial, (line, done.stderr[-2000:])
    return home / "results"


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        yield running
        running.close()


@pytest.fixture(scope="module")
def crawled(folder: Path, browser: Any) -> Crawled:
    """All pages that the index leads to, opened from disk."""
    found = Crawled()
    waiting = [folder / "index.html"]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    while waiting:
        path = waiting.pop()
        if path in found.pages:
            continue
        found.pages.add(path)
        page.goto(path.as_uri())
        page.wait_for_load_state()
        found.widths[str(path)] = page.evaluate(
            "Math.max(...[document.documentElement, ...document.querySelectorAll('.frame')]"
            ".map(e => e.scrollWidth))"
        )
        named = page.evaluate(NAMED)
        targets = []
        for name in named:
            if name.startswith("#"):
                found.places.add(name[1:])
            elif not name.startswith("data:"):
                targets.append(path.parent / unquote(urlsplit(name).path))
        targets = [target.resolve() for target in targets]
        if folder / "index.html" not in targets and path.name != "index.html":
            found.without_way_back.append(path)
        found.files.update(targets)
        waiting += [target for target in targets if target.suffix == ".html"]
    page.close()
    assert errors == []
    return found


def test_every_link_leads_to_a_file(crawled: Crawled) -> None:
    missing = [str(path) for path in crawled.files if not path.is_file()]
    assert missing == []
    assert len(crawled.files) > 40


def test_every_page_is_reached_and_leads_back_and_fits(
    crawled: Crawled, folder: Path
) -> None:
    assert crawled.pages == {path.resolve() for path in folder.rglob("*.html")}
    kinds = {path.relative_to(folder).parts[0] for path in crawled.pages}
    assert {"experiments", "probes", "records", "qc_auto.html"} <= kinds
    assert any(kind.startswith("validation_") for kind in kinds)
    assert crawled.without_way_back == []
    assert {name for name, width in crawled.widths.items() if width > 1280} == set()


def test_every_place_is_one_that_the_viewer_shows(
    crawled: Crawled, folder: Path
) -> None:
    shown = ShownSlides([folder], ViewConfig())
    layers = {}
    for slide_id in shown.listed():
        facts: Any = shown.facts(slide_id)
        layers[slide_id] = [layer["key"] for layer in facts["layers"]]
    asked = set()
    middles = set()
    for place in crawled.places - {""}:
        named = parse_qs(place)
        (slide_id,) = named["slide"]
        for key in named.get("layer", []):
            if key == "tissue/":  # quality control has an outline of its own
                continue
            matches = [k for k in layers[slide_id] if k == key or k.startswith(key)]
            assert matches and (len(matches) == 1 or key.endswith("/")), key
            asked.add(key.rpartition("/")[2])
        if "x" in named:
            middles.add((slide_id, key, int(named["x"][0]), int(named["y"][0])))
    assert {"heatmap_grade:attention", "px_focus", "tiles", ""} <= asked
    results = open_results(folder)
    for slide_id, key, x, y in middles:  # in the tile with the highest value
        tiles = results.tiles(slide_id)
        row = np.nanargmax(tiles.columns[key.rpartition("/")[2]])
        inside = np.array([x, y]) - tiles.coords_l0[row]
        assert (inside > 0).all() and (inside < tiles.size_l0).all()
    assert len(middles) > 8


def test_the_viewer_serves_every_page_and_its_links_open_slides(
    crawled: Crawled, folder: Path, browser: Any
) -> None:
    try:
        viewer = Viewer([folder])
    except MissingDependencyError as error:
        pytest.skip(str(error))
    with viewer:
        for path in crawled.files:
            if path.suffix != ".safetensors":
                name = path.relative_to(folder.resolve()).as_posix()
                assert ask(viewer, f"results/{quote(name)}")[0] == 200, name
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url))
        page.goto(viewer.url)
        page.wait_for_function(READY)
        page.click("#index")
        page.wait_for_selector("#table tbody tr")
        assert "Last command: thinsection" in page.inner_text("#lead")  # runs.js
        page.click("#links >> text=quality control")
        page.wait_for_selector("#sheet tbody tr")
        page.click("#sheet tbody tr:nth-child(2) a.viewer")
        page.wait_for_function(READY)
        assert page.evaluate("slide.id") == "s 1 & ü"
        on = page.evaluate("slide.layers.filter(l => l.on).map(l => l.group)")
        assert on and set(on) == {"qc_auto"}
        # a script of a page reads nothing from the viewer
        page.goto(viewer.url + "results/index.html")
        read = page.evaluate(
            "fetch('../slides').then(a => a.text(), error => 'refused')"
        )
        assert read == "refused"
        page.close()
        assert [error for error in errors if not error.endswith("/slides")] == []


def test_from_disk_a_link_shows_the_command_that_opens_the_place(
    folder: Path, browser: Any
) -> None:
    """The command is read by a shell, and has the folder and the place."""
    page = browser.new_page()
    page.goto((folder / "experiments" / "grade" / "index.html").as_uri())
    page.click(".cases a.viewer >> nth=0")
    text = page.input_value("#viewer-command textarea")
    script = f'for word in {text}; do printf "%s\\n" "$word"; done'
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    program, command, results, option, place = words.stdout.splitlines()
    assert (program, command, option) == ("thinsection", "view", "--at")
    assert Path(results) == folder
    assert parse_qs(place)["slide"][0].startswith("s ")
    page.close()
