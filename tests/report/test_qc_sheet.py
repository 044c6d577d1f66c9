"""The contact sheet: outliers, sorting and enlarging, in a real browser where there is one."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from thinsection.files import pages
from thinsection.report import qc_sheet
from thinsection.report.qc_pictures import write_histoqc
from thinsection.report.qc_sheet import _cell, is_outlier, write_qc_sheet
from thinsection.report.values import column_words

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ),
)
CLICKS = """
<script>
addEventListener("load", () => {
  document.querySelectorAll("#sheet thead button")[3].click();
  const ids = [...document.querySelectorAll("#sheet tbody tr")].map(r => r.cells[0].dataset.sort);
  document.querySelector(".open").click();
  const image = document.querySelector("#large img");
  const report = () => document.body.setAttribute("data-seen", [ids.join(","),
    document.getElementById("large").open, image.naturalWidth].join(" "));
  image.complete && image.naturalWidth ? report() : image.addEventListener("load", report);
});
</script></body>"""


def rows() -> list[dict[str, float | str]]:
    made: list[dict[str, float | str]] = [
        {
            "slide_id": f"s{n}",
            "slide_path": "x",
            "status": "done",
            "pixels_to_use": value,
            "warnings": "",
        }
        for n, value in enumerate((5000.0, 5100.0, 4900.0, 5050.0, 700.0, 5020.0))
    ]
    made.append(
        {
            "slide_id": "<bad>",
            "slide_path": "x",
            "status": "failed",
            "warnings": "a & b",
        }
    )
    return made


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    for row in rows()[:-1]:
        (tmp_path / str(row["slide_id"])).mkdir()
        for name in ("overlay", "mask_use"):
            picture = np.full((300, 420, 3), 90, np.uint8)
            Image.fromarray(picture).save(
                tmp_path / str(row["slide_id"]) / f"{name}.png"
            )
    write_qc_sheet(tmp_path / "qc.html", rows(), title="QC")
    return tmp_path / "qc.html"


def test_only_what_is_far_from_the_median_is_an_outlier() -> None:
    assert is_outlier(0.9, (0.5, 0.1))
    assert not is_outlier(0.8, (0.5, 0.1))
    assert not is_outlier(0.5004, (0.5, 0.0))
    assert is_outlier(-100.0, None)
    assert not is_outlier(None, (0.5, 0.1))


def test_the_page_marks_outliers_escapes_names_and_needs_nothing_outside(
    sheet: Path,
) -> None:
    page = sheet.read_text()
    assert page.count('class="outlier"') == 1
    assert '<td data-sort="700.0" class="outlier">700</td>' in page
    assert "&lt;bad&gt;" in page
    assert "a &amp; b" in page
    assert "http" not in page
    assert page.count("background-image: url(") == 6
    (thumbnails,) = (sheet.parent / "index").iterdir()
    assert page.count(f"index/{thumbnails.name}") == 6


def test_a_sheet_without_slides_is_a_page(tmp_path: Path) -> None:
    write_qc_sheet(tmp_path / "qc.html", [], title="QC")
    assert "0 slides" in (tmp_path / "qc.html").read_text()


def test_pictures_are_found_and_linked_in_any_folder_below_the_page(
    tmp_path: Path,
) -> None:
    folders = ["slides/a b/qc_histoqc-default", "slides/ü#1/qc_mine"]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        picture = Image.fromarray(np.full((30, 42, 3), 90, np.uint8))
        picture.save(tmp_path / folder / "overlay.png")
    made = [
        {**row, "folder": folder} for row, folder in zip(rows(), folders, strict=False)
    ]
    write_qc_sheet(tmp_path / "qc.html", made, title="QC")
    page = (tmp_path / "qc.html").read_text()
    assert page.count("background-image: url(") == 2
    found = re.findall(r'data-pictures="([^"]*)"', page)
    links = [json.loads(html.unescape(text))[0][1] for text in found]
    assert links[0] == "slides/a%20b/qc_histoqc-default/overlay.png"
    assert all((tmp_path / unquote(link)).is_file() for link in links)


def test_histoqcs_files_are_made_from_pictures_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "slides" / "a" / "qc_histoqc-default"
    folder.mkdir(parents=True)
    Image.fromarray(np.full((30, 42, 3), 90, np.uint8)).save(folder / "thumbnail.png")
    Image.fromarray(np.arange(42)[None] < np.full((30, 1), 20)).save(
        folder / "mask_use.png"
    )
    row = {
        "slide_id": "a",
        "slide_path": "x/a.svs",
        "status": "done",
        "pixels_to_use": 5.0,
    }
    keys = ("start_time", "pipeline", "outdir", "config_file", "command_line_args")
    write_histoqc(
        tmp_path,
        [{**row, "folder": "slides/a/qc_histoqc-default"}],
        dict.fromkeys(keys, "v"),
    )
    with Image.open(tmp_path / "a.svs" / "a.svs_fuse.png") as picture:
        assert np.asarray(picture)[5, [5, 30]].tolist() == [[255, 90, 255], [0, 90, 0]]
    with Image.open(tmp_path / "a.svs" / "a.svs_mask_use.png") as picture:
        assert np.asarray(picture)[5, [5, 30]].tolist() == [255, 0]
    names, line = (tmp_path / "results.tsv").read_text().splitlines()[5:]
    values = dict(
        zip(names.removeprefix("#dataset:").split("\t"), line.split("\t"), strict=True)
    )
    assert (values["filename"], values["pixels_to_use"], values["comment"]) == (
        "a.svs",
        "5",
        "NA",
    )


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_sorts_and_enlarges_from_the_file_system(
    sheet: Path, tmp_path: Path
) -> None:
    assert CHROMIUM is not None
    clicked = sheet.with_name("clicked.html")
    clicked.write_text(sheet.read_text().replace("</body>", CLICKS))
    out = subprocess.run(
        [
            *(CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"),
            *("--virtual-time-budget=8000", "--dump-dom", clicked.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert 'data-seen="s4,s2,s0,s5,s3,s1,&lt;bad&gt; true 420"' in out


def test_an_unchanged_page_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = []
    for n in range(3):
        path = f"/s{n}.svs"
        rows.append({"slide_id": f"s{n}", "slide_path": path, "status": "done", "x": n})
    page = tmp_path / "qc.html"
    qc_sheet.write_qc_sheet(page, rows, title="QC")
    first = page.read_bytes()
    rendered: list[str] = []
    render = pages.render_page

    def counted(room: str, template: str, **values: object) -> str:
        rendered.append(template)
        return render(room, template, **values)

    monkeypatch.setattr(qc_sheet, "render_page", counted)
    qc_sheet.write_qc_sheet(page, rows, title="QC")
    assert rendered == []
    assert page.read_bytes() == first
    qc_sheet.write_qc_sheet(page, [*rows[:2], rows[2] | {"x": 7.0}], title="QC")
    assert rendered == ["qc_sheet.html"]
    assert page.read_bytes() != first


def test_areas_are_in_mm2_where_the_resolution_is_known() -> None:
    row = {
        "pixels_to_use": 1000.0,
        "usable_mm2": 0.064,
        "spur_max_area": 500.0,
        "spur_num_regions": 2.0,
    }
    assert _cell(row, "spur_max_area", None).text == "0.032"
    assert _cell(row, "spur_num_regions", None).text == "2"
    assert _cell(row, "pixels_to_use", None).text == "1,000"
    unknown = {"pixels_to_use": 1000.0, "spur_max_area": 500.0}
    assert _cell(unknown, "spur_max_area", None).text == "500 px"
    assert column_words("usable_mm2") == "usable tissue, mm²"
