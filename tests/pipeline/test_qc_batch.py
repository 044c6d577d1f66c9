"""Many slides: files, resume, failures, workers, and tables."""

import csv
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.qc_csv import read_qc_csv
from thinsection.pipeline.qc_batch import QcSettings, qc_slide, qc_slides, write_tables

from thinsection.files.lock import LOCK_NAME, hold
from thinsection.pipeline import qc_batch
from thinsection.qc import load_pipeline, parse_rule
from thinsection.report.histoqc_files import HISTOQC_COLUMNS
from thinsection.slide.cohort import SlideEntry, load_cohort
from thinsection.testing.synthetic import write_he_slide

HEADERS = {
    "start_time": "2026-01-01",
    "pipeline": "a b",
    "outdir": "out",
    "config_file": "light",
    "command_line_args": "qc x\ty",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides of one name, a text file, and a truncated slide."""
    root = tmp_path_factory.mktemp("slides")
    (root / "b").mkdir()
    write_he_slide(root / "a.svs", (3000, 2100), seed=1)
    write_he_slide(root / "b" / "a.svs", (2100, 3000), seed=2)
    (root / "text.svs").write_text("no slide")
    whole = (root / "a.svs").read_bytes()
    (root / "truncated.svs").write_bytes(whole[: len(whole) // 2])
    return root


@pytest.fixture
def settings(tmp_path: Path) -> QcSettings:
    return QcSettings(pipeline=load_pipeline("light"), cache_dir=tmp_path / "cache")


def test_bad_slides_stay_alone_and_equal_names_apart(
    folder: Path, tmp_path: Path, settings: QcSettings
) -> None:
    entries = load_cohort([folder])
    reports = {r.slide_id: r for r in qc_slides(entries, tmp_path / "out", settings)}
    done = {slide_id for slide_id, r in reports.items() if r.status == "done"}
    assert len(done) == 2
    assert all(slide_id.startswith("a-") for slide_id in done)
    assert {r.status for s, r in reports.items() if s not in done} == {"failed"}
    assert "no reader opens 'text.svs'" in reports["text"].error
    assert "Traceback" in (tmp_path / "out" / "text" / qc_batch.ERROR_FILE).read_text()


def test_the_files_of_a_slide_are_there_and_agree(
    folder: Path, tmp_path: Path, settings: QcSettings
) -> None:
    report = qc_slide(
        SlideEntry(slide_id="a", slide_path=str(folder / "a.svs")), tmp_path, settings
    )
    document = json.loads((tmp_path / "a" / "qc.json").read_text())
    mask = np.asarray(Image.open(tmp_path / "a" / "mask_use.png"))
    assert mask.sum() == document["scores"]["pixels_to_use"] == report.row["pixels_to_use"]
    assert mask.shape[::-1] == tuple(document["size_th"])
    for name in document["masks"]:
        assert (tmp_path / "a" / f"{name}.png").is_file()
    features = json.loads((tmp_path / "a" / "qc.geojson").read_text())["features"]
    assert "nonwhite" in {f["properties"]["name"] for f in features}
    assert not list((tmp_path / "a").glob(".*"))


def test_a_finished_slide_is_kept_and_another_pipeline_runs_again(
    folder: Path, tmp_path: Path, settings: QcSettings
) -> None:
    entry = SlideEntry(slide_id="a", slide_path=str(folder / "a.svs"))
    first = qc_slide(entry, tmp_path, settings)
    again = qc_slide(entry, tmp_path, settings)
    assert (first.status, again.status) == ("done", "skipped")
    assert again.row == first.row
    (tmp_path / "a" / "qc.json").write_text("{")
    assert qc_slide(entry, tmp_path, settings).status == "done"
    other = QcSettings(pipeline=load_pipeline("clinical"), cache_dir=settings.cache_dir)
    assert qc_slide(entry, tmp_path, other).status == "done"


def test_a_slide_that_another_process_is_at_is_waited_for_and_not_done_twice(
    tmp_path: Path, settings: QcSettings
) -> None:
    path = tmp_path / "a.svs"
    write_he_slide(path, (900, 700))
    entry = SlideEntry(slide_id="a", slide_path=str(path))
    out = tmp_path / "out"
    with ThreadPoolExecutor() as pool:
        with hold(out / "a" / LOCK_NAME):
            waiting = [pool.submit(qc_slide, entry, out, settings) for _ in range(2)]
            assert not wait(waiting, timeout=1.5).done
        assert sorted(f.result().status for f in waiting) == ["done", "skipped"]
    assert not (out / "a" / LOCK_NAME).exists()


def test_a_failed_slide_is_tried_again(tmp_path: Path, settings: QcSettings) -> None:
    path = tmp_path / "a.svs"
    path.write_text("not yet a slide")
    entry = SlideEntry(slide_id="a", slide_path=str(path))
    assert qc_slide(entry, tmp_path / "out", settings).status == "failed"
    path.unlink()
    write_he_slide(path, (2000, 1500))
    assert qc_slide(entry, tmp_path / "out", settings).status == "done"
    assert not (tmp_path / "out" / "a" / qc_batch.ERROR_FILE).exists()


def test_two_workers_give_what_one_gives(
    folder: Path, tmp_path: Path, settings: QcSettings
) -> None:
    entries = load_cohort([folder / "a.svs", folder / "b"])
    rows = [
        {r.slide_id: r.row for r in qc_slides(entries, tmp_path / str(n), chosen)}
        for n, chosen in (
            (1, settings),
            (2, QcSettings(pipeline=settings.pipeline, workers=2, cache_dir=settings.cache_dir)),
        )
    ]
    assert rows[0] == rows[1]


def _kill_worker_on_bad(entry: SlideEntry, out: Path, settings: QcSettings) -> object:
    if entry.slide_id == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return qc_slide(entry, out, settings)


def test_a_slide_that_kills_its_worker_is_reported_and_the_others_go_on(
    folder: Path, tmp_path: Path, settings: QcSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qc_batch, "qc_slide", _kill_worker_on_bad)
    path = str(folder / "a.svs")
    entries = [SlideEntry(slide_id=name, slide_path=path) for name in ("good", "bad", "fine")]
    two = QcSettings(pipeline=settings.pipeline, workers=2, cache_dir=settings.cache_dir)
    reports = {r.slide_id: r for r in qc_slides(entries, tmp_path / "out", two)}
    assert {s: r.status for s, r in reports.items() if r.status != "skipped"}["bad"] == "failed"
    assert "worker process was killed" in reports["bad"].error
    assert {reports["good"].status, reports["fine"].status} <= {"done", "skipped"}


def test_tables_go_by_column_name_and_rules_mark_slides(tmp_path: Path) -> None:
    rows: list[dict[str, float | str]] = [
        {
            "slide_id": "a",
            "slide_path": "x/a.svs",
            "status": "done",
            "pixels_to_use": 12.0,
            "width": 30.0,
            "height": 20.0,
            "warnings": "odd\tslide",
        },
        {"slide_id": "b", "slide_path": "b.svs", "status": "failed", "warnings": "gone"},
        {
            "slide_id": "c",
            "slide_path": "c.svs",
            "status": "done",
            "bright": 0.5,
            "pixels_to_use": 5000.0,
            "warnings": "",
        },
    ]
    failing = write_tables(
        rows, tmp_path, rules=[parse_rule("pixels_to_use<1000")], histoqc_headers=HEADERS
    )
    assert [(slide, str(rule)) for slide, rule in failing] == [("a", "pixels_to_use<1000")]
    table = {row["slide_id"]: row for row in read_qc_csv(tmp_path / "qc.csv")}
    assert table["a"]["fails"] == "pixels_to_use<1000"
    assert (table["c"]["bright"], table["a"]["bright"]) == (0.5, "")
    lines = (tmp_path / "results.tsv").read_text().splitlines()
    assert [line.split(":")[0] for line in lines[:6]] == [
        *("#start_time", "#pipeline", "#outdir", "#config_file", "#command_line_args"),
        "#dataset",
    ]
    parsed = list(csv.DictReader([lines[5].removeprefix("#dataset:"), *lines[6:]], delimiter="\t"))
    assert [row["filename"] for row in parsed] == ["a.svs", "c.svs"]
    assert all(len(line.split("\t")) == len(HISTOQC_COLUMNS) == 63 for line in lines[5:])
    assert parsed[0]["image_bounding_box"] == "(0, 0, 30, 20)"
    assert (parsed[0]["template1_MSE_hist"], parsed[1]["bright"]) == ("NA", "0.5")
