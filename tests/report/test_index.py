"""The page of a results folder: all that the tables say, as text, quick with many slides."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from thinsection.files.atomic import read_table, write_table
from thinsection.report.index import (
    INDEX,
    RUNS,
    SECONDS,
    THUMBNAILS,
    slide_seconds,
    write_index,
)
from thinsection.report.sheets import CELL, stable_groups

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


PROOF = "embeddings agree with the authors' code: 1.0000 (fp32, <torch>)"


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
            "models": {
                "uni": {"name": "uni", "fingerprint": PROOF},
                "uni2_h": {"name": "uni2_h", "fingerprint": "none"},
                "virchow": {"name": "virchow", "fingerprint": "of an earlier grid"},
                "titan": {"name": "titan"},
            },
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


def sheets_of(out: Path) -> list[Path]:
    return sorted((out / THUMBNAILS).glob("*.jpg"))


def parts_of(out: Path) -> dict[str, Any]:
    """What the scripts hold that the page loads, in their order."""
    joined: dict[str, Any] = {"tables": {}, "thumbs": {}, "heatmaps": {}}
    for name in re.findall(r'src="(index/part_[^"]*)"', (out / INDEX).read_text()):
        text = (out / name).read_text()
        part = json.loads(text.removeprefix("parts.push(").removesuffix(");\n"))
        joined["thumbs"] |= part["thumbs"]
        joined["heatmaps"] |= part["heatmaps"]
        for table, content in part["tables"].items():
            for cells in content["rows"]:
                row = dict(zip(content["columns"], cells, strict=True))
                joined["tables"].setdefault(table, []).append(row)
    return joined


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
        devtools = self.page.context.new_cdp_session(self.page)
        # CPU time of the page's thread, which does not grow while the machine is busy
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto((out / INDEX).as_uri())
        self.page.wait_for_selector("#table tbody tr")
        measured = devtools.send("Performance.getMetrics")["metrics"]
        metrics = {metric["name"]: metric["value"] for metric in measured}
        self.cpu_s = metrics["TaskDuration"]
        self.num_nodes = metrics["Nodes"]

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
    assert opened.cells(1) == [f"no picture{name} viewer" for name in HOSTILE]
    assert opened.cells(2) == ["done"] * 3
    assert opened.cells(3)[0] == "lookmore than 30 % out of focus"
    assert opened.page.locator("b:text('bold')").count() == 0
    text = opened.page.inner_text("body")
    for told in (
        "<grade>",
        "0.8 to 0.93",
        "tumor (0.91)",
        "uni, uni2_h",
        f"uni: {PROOF}",
        "uni2_h: embeddings were not compared with the authors' code",
    ):
        assert told in text, told
    assert "virchow" not in text and "titan" not in text
    assert "decoding held it up" not in text  # on the efficiency page only
    assert (
        "Last command: thinsection run, 2026-01-01 00:00 UTC, 2 done, 1 failed in 62 s"
        in text
    )
    assert all(url.startswith("file:") for url in opened.asked)
    assert sum(url.endswith("records/runs.js") for url in opened.asked) == 1
    assert opened.wrong == []


def test_a_thousand_slides_open_quickly_and_sort_and_filter(
    browser: Any, tmp_path: Path
) -> None:
    names = [*HOSTILE, *(f"slide {n}" for n in range(3, 1000))]
    out = make_folder(tmp_path, [n.replace("/", "_") for n in names], pictures=220)
    opened = Opened(browser, out)
    # some 0.13 s of CPU and 2,700 nodes; a row for each slide would be 25,000
    assert opened.cpu_s < 0.6
    assert opened.num_nodes < 4000
    drawn = len(opened.cells(1))
    assert 0 < drawn <= 100  # the others are drawn when they come into sight
    sheets = [url for url in opened.asked if url.endswith(".jpg")]
    # those of slides further down are not loaded
    assert 1 <= len(sheets) < len(sheets_of(out))
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
    found = [
        name.removeprefix("no picture").removesuffix(" viewer")
        for name in opened.cells(1)
    ]
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
    opened.page.click("button.fact:has-text('failed')")
    pager = opened.page.locator("#pager")
    assert pager.locator("span").inner_text() == "rows 1 to 500 of 1,000"
    assert pager.locator("button").first.is_disabled()
    pager.locator("button").last.click()
    assert pager.locator("span").inner_text() == "rows 501 to 1,000 of 1,000"
    assert opened.cells(1)[0].startswith("no pictureslide 501")
    assert pager.locator("button").last.is_disabled()
    opened.page.evaluate("document.querySelector('.frame').scrollTop = 1e6")
    opened.page.wait_for_function(
        "document.querySelectorAll('#table tbody tr').length > 50"
    )
    opened.page.fill("#filter", "slide 99")
    assert pager.is_hidden()  # one page is enough
    opened.page.fill("#filter", "")
    opened.page.click("#as-cards")
    assert 0 < opened.page.locator(".card").count() <= 100
    assert opened.wrong == []


@pytest.mark.parametrize("suffix", ["jpg", "png"])  # older versions wrote PNG
def test_a_picture_is_enlarged_and_its_address_survives_the_name(
    browser: Any, tmp_path: Path, suffix: str
) -> None:
    name = 'a #1 "b" ü'
    overview = tmp_path / GRID / "overviews" / f"{name}.{suffix}"
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
    # older versions wrote a PNG
    overlays = ("a/qc_auto/overlay.jpg", "b/qc_auto/overlay.jpg")
    for overlay in (*overlays, "b/qc_mine_tiff/overlay.png"):
        (out / "slides" / overlay).parent.mkdir(exist_ok=True)
        (out / "slides" / overlay).touch()
    for name in ("qc_auto.html", "qc_mine_tiff.html"):
        (out / name).write_text("")
    write_index(out)
    opened = Opened(browser, out)
    shown = opened.page.evaluate("slides.map(s => s.overlays.map(o => o[1]))")
    auto = [[f"slides/{name}/qc_auto/overlay.jpg"] for name in "ab"]
    assert shown == [auto[0], [*auto[1], "slides/b/qc_mine_tiff/overlay.png"]]
    assert opened.wrong == []


def test_without_time_the_page_shows_the_thumbnails_that_are_drawn(
    tmp_path: Path,
) -> None:
    out = make_folder(tmp_path, [f"s{n}" for n in range(110)], pictures=110)
    sheets = sheets_of(out)
    assert len(sheets) > 1
    changed = parts_of(out)["thumbs"]["s109"][0]
    picture = out / "slides" / "s109" / "picture.jpg"
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(picture)
    write_index(out, draw_thumbnails=False)
    assert sheets_of(out) == sheets
    places = parts_of(out)["thumbs"]
    assert 0 < len(places) < 110
    assert "s109" not in places
    assert changed not in {sheet for sheet, _, _ in places.values()}
    write_index(out)
    assert len(parts_of(out)["thumbs"]) == 110
    assert len(sheets_of(out)) == len(sheets)


def test_thumbnails_are_drawn_once_and_only_where_a_picture_changed(
    tmp_path: Path,
) -> None:
    names = [f"s{n}" for n in range(120)]
    out = make_folder(tmp_path, names, pictures=120)
    sheets = sheets_of(out)
    stamps = {path: path.stat().st_mtime_ns for path in sheets}
    for path in sheets:
        with Image.open(path) as sheet:
            assert sheet.width == 10 * CELL[0]
            assert sheet.height % CELL[1] == 0
    Image.fromarray(np.zeros((300, 500, 3), np.uint8)).save(
        out / "slides" / "s119" / "picture.jpg"
    )
    page = (out / INDEX).read_bytes()
    write_index(out)
    again = sheets_of(out)
    kept = [path for path in again if stamps.get(path) == path.stat().st_mtime_ns]
    assert len(again) == len(sheets)
    assert len(kept) == len(sheets) - 1
    assert (out / INDEX).read_bytes() != page
    page = (out / INDEX).read_bytes()
    write_index(out)
    assert (out / INDEX).read_bytes() == page


def test_a_new_slide_that_sorts_first_changes_one_sheet_and_one_part(
    tmp_path: Path,
) -> None:
    names = [f"s{n:04d}" for n in range(900)]
    out = make_folder(tmp_path / "before", names, pictures=900)
    before = {path.name for path in (out / THUMBNAILS).iterdir()}
    more = make_folder(tmp_path / "after", ["a first", *names], pictures=901)
    after = {path.name for path in (more / THUMBNAILS).iterdir()}
    # every tenth slide is another one in `after`, so only sheets are alike
    sheets_before = {name for name in before if name.endswith(".jpg")}
    sheets_after = {name for name in after if name.endswith(".jpg")}
    assert len(sheets_before) > 10
    assert len(sheets_before - sheets_after) <= 1
    assert len(sheets_after - sheets_before) <= 1
    rows = read_table(out / "summary.csv")
    first = rows[0] | {"slide_id": "a first"}
    write_table(out / "summary.csv", [first, *rows], SUMMARY)
    write_index(out)
    parts = {path.name for path in (out / THUMBNAILS).glob("*.js")}
    assert len(parts) > 2
    assert len(parts - before) <= 2


def test_groups_keep_their_order_and_limits_and_one_more_key_changes_one() -> None:
    keys = [f"slide {n:05d}" for n in range(5000)]
    groups = stable_groups(keys, usual=50, most=150)
    assert [key for group in groups for key in group] == keys
    assert max(map(len, groups)) <= 150
    assert 70 < len(groups) < 150
    for new in ("a", "slide 02500b", "z"):
        more = stable_groups(sorted([*keys, new]), usual=50, most=150)
        changed = set(more) - set(groups)
        assert 1 <= len(changed) <= 2
    assert stable_groups([], usual=50, most=150) == []


def test_notes_of_a_record_are_read_once_and_the_newest_command_counts(
    tmp_path: Path,
) -> None:
    def note(record: str, *lines: str) -> Path:
        log = tmp_path / "records" / record / "ended" / "host-1.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write("".join(lines))
        return log

    first = note("20260101-a", '{"slide_id": "s", "seconds": 2}\n', '{"slide_id"')
    note("20260102-b", '{"slide_id": "s", "seconds": 0.0}\n')
    assert slide_seconds(tmp_path) == {"s": 2}
    known = (tmp_path / SECONDS).stat().st_mtime_ns
    assert slide_seconds(tmp_path) == {"s": 2}
    assert (tmp_path / SECONDS).stat().st_mtime_ns == known
    # the line that was cut off is complete now
    note("20260101-a", ': "t", "seconds": 3}\n', '{"slide_id": "u", "seconds": 1}\n')
    note("20260102-b", '{"slide_id": "u", "seconds": 5}\n')
    assert slide_seconds(tmp_path) == {"s": 2, "t": 3, "u": 5}
    # an older command that ends later does not win
    note("20260101-a", '{"slide_id": "u", "seconds": 7}\n')
    assert slide_seconds(tmp_path)["u"] == 5
    first.unlink()
    assert slide_seconds(tmp_path) == {"u": 5}
    (tmp_path / SECONDS).write_text("[]")
    assert slide_seconds(tmp_path) == {"u": 5}


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


def test_the_page_has_the_fingerprint_of_each_encoder_of_a_record(
    tmp_path: Path,
) -> None:
    out = make_folder(tmp_path, ["a", "b"], pictures=0)
    for text in (
        None,
        "[]",
        '{"models": [1]}',
        '{"models": {"a": {"fingerprint": 1}}}',
    ):
        if text is not None:  # records of other programs stop nothing
            other = out / "records" / "20260102-000000-host-2"
            other.mkdir(exist_ok=True)
            (other / "run.json").write_text(text)
        write_index(out)
        script = (out / RUNS).read_text().removeprefix("const runs = ")
        records = json.loads(script.rstrip(";\n"))["records"]
        assert records[0]["fingerprints"] == {
            "uni": PROOF,
            "uni2_h": "none",
            "virchow": "of an earlier grid",
        }
        assert all(record["fingerprints"] == {} for record in records[1:])


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
    assert [row["slide_id"] for row in parts_of(out)["tables"]["summary.csv"]] == [
        "a",
        "b",
    ]


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
    told = parts_of(out)["tables"]["qc_histoqc.csv"]
    assert all("deconv_c0_mean" not in row for row in told)
    assert [row["deconv_c1_mean"] for row in told] == ["0.25", "-99.5"]


def test_predictions_heatmaps_validations_and_probes_are_listed_with_links(
    browser: Any, tmp_path: Path
) -> None:
    """A heatmap leads to its layer in the viewer, and to its highest tile."""
    heatmaps = tmp_path / GRID / "heatmap_abmil"
    heatmaps.mkdir(parents=True)
    for name in ("a.attention", "a.top"):
        Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(heatmaps / f"{name}.png")
    record = {
        "model": "sum",
        "pictures": {"a": ["attention"]},
        "places": {"a": {"attention": [700, 500]}},
    }
    (heatmaps / "scale.json").write_text(json.dumps(record))
    validation = tmp_path / "validation_abmil"
    validation.mkdir()
    told = {"validation": "external", "cases": 12, "metric": "auroc", "value": 0.75}
    (validation / "validation.json").write_text(json.dumps(told))
    probe = tmp_path / "probes" / "one"
    probe.mkdir(parents=True)
    (probe / "knn.html").write_text("")
    told = {"probe": "knn", "dataset": "<crc>", "metric": "auroc", "score": 0.5}
    (probe / "knn.json").write_text(json.dumps(told))
    opened = Opened(browser, make_folder(tmp_path, ["a", "b"], pictures=2))
    models = opened.page.inner_text("#models")
    for words in ("2 slides", "external validation", "12 cases, AUROC 0.75", "1 slide"):
        assert words in models
    assert "<crc>" in opened.page.inner_text("#probes")
    links = opened.page.eval_on_selector_all(
        "#models a, #probes a", "all => all.map(one => one.getAttribute('href'))"
    )
    layer = f"layer={GRID}%2Fheatmap_abmil%3Aattention"
    assert links == [
        "predictions_abmil.csv",
        "validation_abmil/index.html",
        f"#slide=a&{layer}",
        "probes/one/knn.html",
    ]
    opened.page.click(".open >> nth=0")
    opened.page.click("#large button:text-is('heatmap abmil: attention')")
    found = opened.page.eval_on_selector_all(
        "#large a.viewer:visible", "all => all.map(one => one.getAttribute('href'))"
    )
    assert found == [
        f"#slide=a&{layer}",
        f"#slide=a&x=700&y=500&downsample=1&{layer}",
    ]
    assert opened.wrong == []


def test_each_table_of_cells_has_its_number_and_its_density(
    browser: Any, tmp_path: Path
) -> None:
    columns = [
        f"cells_{name}:{measure}"
        for name in ("cellvit", "qupath")
        for measure in ("count", "count_Tumour", "per_mm2")
    ]
    rows = []
    for slide, numbers in (
        ("a", (61_000, 7, 2786.6596, 900, 450, 0.125)),
        ("b", (500, 8, "", "", "", "")),
    ):
        cells = dict(zip(columns, numbers, strict=True))
        rows.append({"slide_id": slide, "status": "done", "grid": GRID, **cells})
    write_table(
        tmp_path / "summary.csv", rows, ("slide_id", "status", "grid", *columns)
    )
    write_table(tmp_path / "failed.csv", [], ("slide_id", "stage", "error"))
    write_index(tmp_path)
    opened = Opened(browser, tmp_path)
    titles = opened.page.eval_on_selector_all(
        "#table thead th", "all => all.map(one => one.textContent)"
    )
    first = titles.index("cellvit: cells") + 1
    assert titles[first - 1 : first + 3] == [
        "cellvit: cells",
        "cellvit: cells per mm²",
        "qupath: cells",
        "qupath: cells per mm²",
    ]
    shown = [opened.cells(first + i) for i in range(4)]
    assert shown == [["61,000", "500"], ["2787", ""], ["900", ""], ["0.125", ""]]
    assert not opened.wrong
