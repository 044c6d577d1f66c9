"""The page of a results folder: all that the tables say, as text, quick with many slides."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from thinsection.files.atomic import write_table
from thinsection.report.index import INDEX, THUMBNAILS, write_index
from thinsection.report.sheets import CELL

CHROMIUM = shutil.which("chromium")
HOSTILE = [
    "a <b>bold</b>",
    'say "#1" & more',
    "ünïcode 日本 </script><script>alert(1)</script>",
]
SUMMARY = (
    *(
        "slide_id",
        "slide_path",
        "status",
        "label",
        "width",
        "height",
        "mpp_x",
        "mpp_y",
        "grid",
    ),
    *("stain", "tissue_fraction", "num_tiles", "features", "also", "warnings"),
)
GRID = "256px_0.5mpp"


def make_folder(out: Path, names: list[str], *, pictures: int) -> Path:
    """A results folder as runs leave it: every third slide looked at, every tenth failed."""
    rows, failed, checked = [], [], []
    for n, name in enumerate(names):
        bad = n % 10 == 9
        rows.append(
            {
                **{
                    "slide_id": name,
                    "slide_path": f"/data/{name}.svs",
                    "grid": "" if bad else GRID,
                },
                **{
                    "status": "failed" if bad else "skipped",
                    "label": ("tumor", "normal")[n % 2],
                },
                **{
                    "width": 20_000,
                    "height": 10_000,
                    "mpp_x": 0.5,
                    "mpp_y": 0.5,
                    "stain": "H&E",
                },
                **{
                    "tissue_fraction": (n % 97) / 100,
                    "num_tiles": "" if bad else (n * 37) % 1000,
                },
                **{"features": "uni|uni2_h", "also": "overviews", "warnings": ""},
            }
        )
        if bad:
            error = "SlideReadError: region must be readable, got nothing; copy the file again"
            failed.append({"slide_id": name, "stage": "decode", "error": error})
        why = "more than 30 % out of focus" if n % 3 == 0 else ""
        said = {
            "verdict": "look" if why else "good",
            "why": why,
            "focus_removed_percent": n / 1000,
        }
        checked.append({"slide_id": name, **said})
        if n < pictures:
            folder = out / "slides" / name.replace("/", "_")
            folder.mkdir(parents=True)
            pixels = np.full((300, 400, 3), (230, 180, 200), np.uint8)
            Image.fromarray(pixels).save(folder / "picture.jpg")
            Image.fromarray(np.eye(40, 50, dtype=np.uint8) * 255).save(
                folder / "tissue.png"
            )
    write_table(out / "summary.csv", rows, SUMMARY)
    write_table(out / "failed.csv", failed, ("slide_id", "stage", "error"))
    write_table(out / "qc_auto.csv", checked)
    write_table(
        out / "predictions_abmil.csv",
        [
            {"level": "slide", "slide_id": n, "prediction": "tumor", "p_tumor": "0.91"}
            for n in names[:2]
        ],
    )
    record = out / "records" / "20260101-000000-host-1"
    record.mkdir(parents=True)
    document = {
        **{
            "command": "run",
            "started": "2026-01-01T00:00:00.000+00:00",
            "host": "host",
        },
        **{
            "seconds": 61.5,
            "counts": {"done": 2, "failed": 1},
            "config": {"tiles": {"tile_px": 9}},
        },
        **{
            "thinsection_version": "0.1.0",
            "efficiency": {"bottleneck": "decoding held it up"},
        },
    }
    (record / "run.json").write_text(json.dumps(document))
    (record / "efficiency.html").write_text("")
    experiment = out / "experiments" / "one"
    experiment.mkdir(parents=True)
    told = {
        "name": "<grade>",
        "metric": "auroc",
        "value": 0.875,
        "interval": [0.8, 0.93],
    }
    (experiment / "experiment.json").write_text(json.dumps(told))
    write_index(out)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed"
    )
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page, what it asked for, and what went wrong on it."""

    def __init__(self, browser: Any, out: Path) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append("dialog"))
        started = time.perf_counter()
        self.page.goto((out / INDEX).as_uri())
        self.page.wait_for_selector("#table tbody tr")
        self.seconds = time.perf_counter() - started

    def cells(self, column: int) -> list[str]:
        return self.page.eval_on_selector_all(
            f"#table tbody tr td:nth-child({column})",
            "all => all.map(one => one.textContent)",
        )

    def click(self, title: str) -> None:
        self.page.click(f"#table thead button:text-is('{title}')")


def test_three_slides_are_shown_with_hostile_names_as_text(
    browser: Any, tmp_path: Path
) -> None:
    opened = Opened(browser, make_folder(tmp_path, HOSTILE, pictures=0))
    assert opened.cells(1) == [f"no picture{name}" for name in HOSTILE]
    assert opened.cells(2) == ["done"] * 3
    assert opened.cells(3)[0] == "lookmore than 30 % out of focus"
    assert opened.page.locator("b:text('bold')").count() == 0
    text = opened.page.inner_text("body")
    for told in (
        "<grade>",
        "0.8 to 0.93",
        "tumor (0.91)",
        "uni, uni2_h",
    ):
        assert told in text, told
    assert "decoding held it up" not in text  # on the efficiency page only
    assert (
        "Last command: thinsection run, 2026-01-01 00:00 UTC, 2 done, 1 failed in 62 s"
        in text
    )
    assert all(url.startswith("file:") for url in opened.asked)
    assert sum(url.endswith("records/runs.js") for url in opened.asked) == 1
    assert opened.wrong == []


def test_a_thousand_slides_open_in_two_seconds_and_sort_and_filter(
    browser: Any, tmp_path: Path
) -> None:
    names = [*HOSTILE, *(f"slide {n}" for n in range(3, 1000))]
    out = make_folder(tmp_path, [n.replace("/", "_") for n in names], pictures=220)
    opened = Opened(browser, out)
    assert opened.seconds < 2
    drawn = len(opened.cells(1))
    assert 0 < drawn <= 100  # the others are drawn when they come into sight
    sheets = [url for url in opened.asked if f"/{THUMBNAILS}/" in url]
    assert len(sheets) == 1  # of three: those of slides further down are not loaded
    opened.page.evaluate("document.querySelector('.frame').scrollTop = 1e6")
    opened.page.wait_for_function(
        f"document.querySelectorAll('#table tbody tr').length > {drawn}"
    )
    opened.click("tiles")
    opened.click("tiles")
    tiles = [int(text.replace(",", "")) for text in opened.cells(6) if text]
    assert tiles == sorted(tiles, reverse=True)
    assert tiles[0] > 990
    opened.click("slide")
    found = [name.removeprefix("no picture") for name in opened.cells(1)]
    assert found.index("slide 9") < found.index("slide 10") < found.index("slide 11")
    opened.page.fill("#filter", "slide 99")
    assert len(opened.cells(1)) == 19  # words apart: 99, 199, ..., 990 to 999
    opened.page.fill("#filter", "")
    opened.page.click("button.fact:has-text('failed')")
    assert set(opened.cells(2)) == {"failed"}
    assert opened.page.inner_text("#shown") == "100 of 1,000 slides"
    told = opened.page.inner_text("#problems")
    assert "100 slides without a result" in told
    assert "copy the file again" in told
    opened.page.click("#as-cards")
    assert 0 < opened.page.locator(".card").count() <= 100
    assert opened.wrong == []


def test_a_picture_is_enlarged_and_its_address_survives_the_name(
    browser: Any, tmp_path: Path
) -> None:
    name = 'a #1 "b" ü'
    overview = tmp_path / GRID / "overviews" / f"{name}.png"
    overview.parent.mkdir(parents=True)
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(overview)
    opened = Opened(browser, make_folder(tmp_path, [name], pictures=1))
    opened.page.click(".open")
    opened.page.wait_for_function(
        "document.querySelector('#large img').naturalWidth === 40"
    )
    assert opened.wrong == []


def test_an_overlay_is_shown_of_the_checks_that_a_slide_has(
    browser: Any, tmp_path: Path
) -> None:
    """A second pipeline looked at one slide of two, by another reader."""
    out = make_folder(tmp_path, ["a", "b"], pictures=2)
    checked = {name: {"slide_id": name, "verdict": "good"} for name in "ab"}
    first = [row | {"folder": f"slides/{n}/qc_auto"} for n, row in checked.items()]
    write_table(out / "qc_auto.csv", first)
    more = [checked["b"] | {"folder": "slides/b/qc_mine_tiff"}]
    write_table(out / "qc_mine_tiff.csv", more)
    for name in ("qc_auto.html", "qc_mine_tiff.html"):
        (out / name).write_text("")
    write_index(out)
    opened = Opened(browser, out)
    overlays = opened.page.evaluate("slides.map(s => s.overlays.map(o => o[1]))")
    auto = [[f"slides/{name}/qc_auto/overlay.png"] for name in "ab"]
    assert overlays == [auto[0], [*auto[1], "slides/b/qc_mine_tiff/overlay.png"]]
    assert opened.wrong == []


def test_without_time_the_page_shows_the_thumbnails_that_are_drawn(
    tmp_path: Path,
) -> None:
    out = make_folder(tmp_path, [f"s{n}" for n in range(110)], pictures=110)
    sheets = sorted((out / THUMBNAILS).iterdir())
    picture = out / "slides" / "s109" / "picture.jpg"
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(picture)
    write_index(out, draw_thumbnails=False)
    assert sorted((out / THUMBNAILS).iterdir()) == sheets
    text = (out / INDEX).read_text().split('id="data">')[1].split("</script>")[0]
    assert len(json.loads(text)["thumbs"]) == 100
    write_index(out)
    assert len(list((out / THUMBNAILS).iterdir())) == 2


def test_thumbnails_are_drawn_once_and_only_where_a_picture_changed(
    tmp_path: Path,
) -> None:
    names = [f"s{n}" for n in range(120)]
    out = make_folder(tmp_path, names, pictures=120)
    sheets = sorted((out / THUMBNAILS).iterdir())
    assert len(sheets) == 2
    stamps = {path: path.stat().st_mtime_ns for path in sheets}
    with Image.open(max(sheets, key=lambda path: path.stat().st_size)) as sheet:
        assert sheet.size == (10 * CELL[0], 10 * CELL[1])
    Image.fromarray(np.zeros((300, 500, 3), np.uint8)).save(
        out / "slides" / "s119" / "picture.jpg"
    )
    page = (out / INDEX).read_bytes()
    write_index(out)
    again = sorted((out / THUMBNAILS).iterdir())
    kept = [path for path in again if stamps.get(path) == path.stat().st_mtime_ns]
    assert (len(again), len(kept)) == (2, 1)
    assert (out / INDEX).read_bytes() != page
    page = (out / INDEX).read_bytes()
    write_index(out)
    assert (out / INDEX).read_bytes() == page


def test_the_page_of_finished_slides_costs_less_than_a_millisecond_each(
    tmp_path: Path,
) -> None:
    out = make_folder(tmp_path, [f"s{n}" for n in range(300)], pictures=300)
    spent = []
    for _ in range(3):
        before = time.process_time()
        write_index(out)
        spent.append(time.process_time() - before)
    assert min(spent) < 0.3


def test_what_cannot_be_read_is_left_out_and_an_empty_folder_has_a_page(
    tmp_path: Path,
) -> None:
    write_index(tmp_path)
    assert (tmp_path / INDEX).is_file()
    out = make_folder(tmp_path / "out", ["a", "b"], pictures=2)
    (out / "slides" / "a" / "picture.jpg").write_bytes(b"\xff\xd8 cut")
    (out / "slides" / "b" / "tissue.png").write_bytes(b"\x89PNG cut")
    (out / "qc_auto.csv").write_bytes(b"\xff\xfe")
    (out / "records" / "20260101-000000-host-1" / "run.json").write_text("{")
    (out / "experiments" / "one" / "experiment.json").write_text("[]")
    write_index(out)
    assert '"slide_id": "b"' in (out / INDEX).read_text()


def test_what_histoqc_could_not_measure_is_missing_in_distributions(
    tmp_path: Path,
) -> None:
    out = make_folder(tmp_path / "out", ["s0", "s1"], pictures=0)
    rows = [
        {
            "slide_id": "s0",
            "verdict": "good",
            "deconv_c0_mean": -100,
            "deconv_c1_mean": 0.25,
        },
        {
            "slide_id": "s1",
            "verdict": "good",
            "deconv_c0_mean": "-100.0",
            "deconv_c1_mean": -99.5,
        },
    ]
    write_table(out / "qc_histoqc.csv", rows)
    write_index(out)
    text = (out / INDEX).read_text().split('id="data">')[1].split("</script>")[0]
    told = json.loads(text)["tables"]["qc_histoqc.csv"]
    assert all("deconv_c0_mean" not in row for row in told)
    assert [row["deconv_c1_mean"] for row in told] == ["0.25", "-99.5"]
