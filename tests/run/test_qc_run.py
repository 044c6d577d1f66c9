"""Quality control of many slides: its files, resume, locks, tables; bad slides and deaths alone."""

import csv
import html
import json
import os
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
from PIL import Image
from tests.support.faults import KilledEntryTask
from tests.support.qc_csv import read_qc_csv
from tests.support.slurm_node import why_not
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import as_mapping, from_mapping, replace_flat
from thinsection.errors import ConfigError
from thinsection.exchange.qupath import export_qupath
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.jobs.execute import execute
from thinsection.qc import load_pipeline
from thinsection.qc.checks.check import Score
from thinsection.qc.histoqc_pictures import notes_on_absent, notes_on_row
from thinsection.qc.pipeline import dump_pipeline
from thinsection.report.qc_pictures import write_histoqc
from thinsection.report.qc_sheet import write_qc_csv
from thinsection.report.stored import QC_FILE, read_qc
from thinsection.results.records import read_records
from thinsection.run import prepare
from thinsection.run.process import RunEvent
from thinsection.run.qc_run import (
    QcRunConfig,
    QcSummary,
    _run_settings,
    check_slides,
    chosen_pipeline,
)
from thinsection.run.run import make_task, run
from thinsection.run.task import RunTask
from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry, load_cohort
from thinsection.stages.checks import QcStage
from thinsection.stages.config import QcConfig, RunConfig
from thinsection.stages.own_tables import failing_rules
from thinsection.stages.spec import resolve
from thinsection.store.ledger import FAILURE_NAME
from thinsection.store.outcome import SlideResult
from thinsection.testing.synthetic import write_he_slide

REASON = why_not()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=f"no Slurm here: {REASON}")
DASK = {"executor": "dask", "workers": 2, "threads": 1, "chunk_slides": 2}
POOL = {**DASK, "executor": "pool"}
SLURM = {
    "executor": "slurm",
    "job_cpus": 1,
    "job_memory": "1GiB",
    "walltime": "00:10:00",
}
REPEATS = int(os.environ.get("THINSECTION_FAULT_REPEATS", "1"))
HEADERS = {
    "start_time": "2026-01-01",
    "pipeline": "a b",
    "outdir": "out",
    "config_file": "histoqc-light",
    "command_line_args": "qc x\ty",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slides and a text file."""
    root = tmp_path_factory.mktemp("slides")
    for index, size in enumerate([(2400, 1700), (1700, 2600), (2100, 2000)]):
        write_he_slide(root / f"s{index}.svs", size, seed=index)
    (root / "bad.svs").write_text("no slide")
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(**changes: object) -> QcRunConfig:
    return replace_flat(
        QcRunConfig(), {"qc": "histoqc-light", "write": ("histoqc",), **changes}
    )


def check(*slides: Path, out: Path, **changes: object) -> QcSummary:
    return check_slides([str(s) for s in slides], out=out, config=settings(**changes))


def task_of(out: Path, **output: object) -> RunTask:
    """What `qc --qc light` has its workers do."""
    config = replace_flat(RunConfig(qc=QcConfig(qc="histoqc-light")), output)
    return make_task(out, resolve(config, {"until": "qc"}))


def files(out: Path) -> dict[str, object]:
    """Every file of the result; without seconds, times and the folder's own name."""
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if not path.is_file() or name.startswith(("records/", "slurm/")):
            continue
        if path.name == "results.tsv":
            own = ("#start", "#outdi")
            found[name] = [x for x in path.read_text().splitlines() if x[:6] not in own]
        elif path.name != FAILURE_NAME:  # a traceback
            found[name] = path.read_bytes()
    return found


def states(summary: QcSummary) -> dict[str, str]:
    return {result.slide_id: result.status for result in summary.results}


def failure(out: Path, slide_id: str) -> dict[str, object]:
    document: dict[str, object] = json.loads(
        (out / "slides" / slide_id / FAILURE_NAME).read_text()
    )
    return document


def test_bad_slides_stay_alone_and_equal_names_apart(tmp_path: Path) -> None:
    root = tmp_path / "slides"
    (root / "b").mkdir(parents=True)
    write_he_slide(root / "a.svs", (3000, 2100), seed=1)
    write_he_slide(root / "b" / "a.svs", (2100, 3000), seed=2)
    (root / "text.svs").write_text("no slide")
    whole = (root / "a.svs").read_bytes()
    (root / "truncated.svs").write_bytes(whole[: len(whole) // 2])
    summary = check(root, out=tmp_path / "out")
    found = {result.slide_id: result for result in summary.results}
    done = {slide_id for slide_id, r in found.items() if r.status == "done"}
    assert len(done) == 2
    assert all(slide_id.startswith("a-") for slide_id in done)
    assert {r.status for s, r in found.items() if s not in done} == {"failed"}
    assert set(found) - done == {"text", "truncated"}
    assert "no reader opens 'text.svs'" in found["text"].error
    assert (failure(tmp_path / "out", "text")["stage"], summary.num_failed) == (
        "open",
        2,
    )
    assert "Traceback" in str(failure(tmp_path / "out", "text")["traceback"])


def test_the_files_of_a_slide_are_there_and_agree(folder: Path, tmp_path: Path) -> None:
    check(folder / "s0.svs", out=tmp_path)
    home = tmp_path / "slides" / "s0" / "qc_histoqc-light"
    stored = read_qc(home)
    document = stored.document
    mask = np.asarray(Image.open(home / "mask_use.png"))
    (row,) = read_qc_csv(tmp_path / "qc_histoqc-light.csv")
    assert mask.sum() == document["scores"]["pixels_to_use"] == row["pixels_to_use"]
    assert mask.shape[::-1] == tuple(document["size_th"])
    with open_slide(folder / "s0.svs") as slide:
        assert slide.slide_mpp is not None
        size_mm = np.array(slide.size) * slide.slide_mpp / 1000
    expected_mm2 = mask.mean() * size_mm.prod()
    assert row["usable_mm2"] == pytest.approx(expected_mm2, rel=1e-3)
    for name in stored.names:
        shown = np.asarray(Image.open(home / f"{name}.png"))
        np.testing.assert_array_equal(shown, stored.mask(name))
    export_qupath(tmp_path, tmp_path / "qupath")
    features = json.loads((tmp_path / "qupath" / "s0.geojson").read_text())["features"]
    assert "nonwhite" in {f["properties"]["name"] for f in features}
    assert not list(home.glob(".*"))
    ledger = json.loads((tmp_path / "slides" / "s0" / "slide.json").read_text())
    recorded: list[str] = []
    for stage in ledger["stages"].values():
        recorded += stage["files"]
    assert len(set(recorded)) == len(recorded)
    assert set(recorded) == {str(p.relative_to(tmp_path)) for p in home.iterdir()}
    assert (row["folder"], row["fails"]) == ("slides/s0/qc_histoqc-light", "")


def test_the_small_thumbnail_is_openslides_of_500_px_as_in_histoqc(
    folder: Path, tmp_path: Path
) -> None:
    check(folder / "s0.svs", folder / "s1.svs", out=tmp_path)
    for name in ("s0.svs", "s1.svs"):
        small = np.asarray(Image.open(tmp_path / name / f"{name}_thumb_small.png"))
        with openslide.OpenSlide(folder / name) as slide:
            expected = np.asarray(slide.get_thumbnail((500, 500)))
        assert max(small.shape) == 500
        np.testing.assert_array_equal(small, expected)


def write_histoqcs_pictures(folder: Path) -> None:
    """In place of HistoQC's: pictures with an orange square, under its names."""
    rgb = np.random.default_rng(0).integers(180, 255, (30, 50, 3), dtype=np.uint8)
    mask = np.zeros((30, 50), dtype=np.uint8)
    rgb[5:20, 10:40], mask[5:20, 10:40] = (250, 140, 20), 255
    checks: tuple[Any, ...] = load_pipeline("histoqc-default").checks
    for one in checks:
        for name in {*one.files, *getattr(one, "absent", ())}:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask if "mask" in name else rgb).save(path)


def test_histoqcs_pictures_are_taken_from_the_folder_that_is_given(
    folder: Path, tmp_path: Path
) -> None:
    write_histoqcs_pictures(tmp_path / "data")
    check(folder / "s0.svs", out=tmp_path / "without", qc="histoqc-default")
    config = settings(qc="histoqc-default", histoqc_data=tmp_path / "data")
    check_slides([str(folder / "s0.svs")], out=tmp_path / "with", config=config)
    columns = ("pen_markings", "coverslip_edge", "template1_MSE_hist")
    for out, is_number in (("without", False), ("with", True)):
        (path,) = (tmp_path / out).glob("qc_histoqc-default*.csv")
        (row,) = read_qc_csv(path)
        assert [isinstance(row.get(name), float) for name in columns] == [is_number] * 3
        assert isinstance(row["areaThresh"], float)
    with pytest.raises(ConfigError, match=r"histoqc_data must be an existing folder"):
        chosen_pipeline(settings(histoqc_data=tmp_path / "nowhere"))


def test_the_folder_that_is_given_wins_over_an_installed_histoqc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("given", "installed"):
        write_histoqcs_pictures(tmp_path / place)
    shutil.rmtree(tmp_path / "given" / "models")
    name = "thinsection.qc.pipeline.installed_folders"
    monkeypatch.setattr(name, lambda: [tmp_path / "installed"])
    for given, pen_place in ((None, "installed"), (tmp_path / "given", "given")):
        pipeline = chosen_pipeline(settings(qc="histoqc-default", histoqc_data=given))
        checks: dict[str, Any] = {check.name: check for check in pipeline.checks}
        places = {
            check: {
                Path(file).relative_to(tmp_path).parts[0]
                for file in checks[check].files
            }
            for check in ("pen_markings", "coverslip_edge")
        }
        # what the folder lacks comes from the installed one
        assert places == {"pen_markings": {pen_place}, "coverslip_edge": {"installed"}}


def test_a_folder_without_any_of_histoqcs_pictures_is_refused_by_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pen.png").write_bytes(b"")
    ini = tmp_path / "config.ini"
    section = "ClassificationModule.byExampleWithFeatures:pen"
    ini.write_text(
        f"[pipeline]\nsteps= {section}\n[{section}]\nexamples: ./pen/1k_version/pen_green.png:"
        "./pen/1k_version/pen_green_mask.png\nfeatures: rgb\nname: pen_markings\n"
    )
    for source in ({"qc": "histoqc-default"}, {"from_histoqc": ini}):
        config = settings(histoqc_data=tmp_path / "other", **source)
        with pytest.raises(
            ConfigError,
            match=r"other' without any of pen/1k_version/pen_green.png, pen/1k_version/pen_green_",
        ):
            chosen_pipeline(config)
    write_histoqcs_pictures(tmp_path / "data")
    data = tmp_path / "data"
    with pytest.raises(ConfigError, match=r"histoqc_data must be left out .* 'auto'"):
        chosen_pipeline(settings(qc="auto", histoqc_data=data))
    # a preset that needs none has the same results with and without the folder
    for name, is_preset in (("histoqc-light", True), ("histoqc-default", False)):
        config = settings(qc=name, histoqc_data=data)
        run_settings = _run_settings(config, chosen_pipeline(config), tmp_path)
        assert (run_settings.qc.qc == name) is is_preset
    # one picture is enough, and the note says which checks lack theirs
    for name in ("pen", "models"):
        shutil.rmtree(tmp_path / "data" / name)
    pipeline = chosen_pipeline(
        settings(qc="histoqc-default", histoqc_data=tmp_path / "data")
    )
    (note,) = notes_on_absent(pipeline.checks)
    assert note.startswith("pen_markings, coverslip_edge: HistoQC's example pictures")


def test_a_run_and_its_page_say_that_pen_was_never_looked_for(
    folder: Path, tmp_path: Path
) -> None:
    pen = (
        "pen_markings, coverslip_edge: HistoQC's example pictures are missing, so these"
    )
    templates = (
        "templates: 4 of HistoQC's template pictures are missing, so their columns"
    )
    starts = (f"note: {pen}", f"note: {templates}")
    first, second = folder / "s0.svs", folder / "s1.svs"
    by_qc: list[str] = []
    config = settings(qc="histoqc-default", write=())
    check_slides(
        [str(first)], out=tmp_path / "qc", config=config, on_message=by_qc.append
    )
    by_run: list[str] = []
    out = tmp_path / "run"
    run_config = RunConfig(qc=QcConfig(qc="histoqc-default"))
    record = None
    for slide in (first, second):
        by_run.clear()
        summary = run(
            slide, out=out, config=run_config, until="qc", on_message=by_run.append
        )
        record = summary.record
    for messages in (by_qc, by_run):
        notes = [text for text in messages if text.startswith("note:")]
        assert len(notes) == 2
        for note, start in zip(notes, starts):
            assert note.startswith(start)
    assert record is not None
    assert starts[0] in (record / "run.log").read_text()
    text = html.unescape((out / "qc_histoqc-default.html").read_text())
    assert f"2 of 2 slides: {pen}" in text
    assert f"2 of 2 slides: {templates}" in text
    # the pictures are there for one slide of two
    write_histoqcs_pictures(tmp_path / "data")
    rows = read_qc_csv(out / "qc_histoqc-default.csv")
    checks = chosen_pipeline(
        settings(qc="histoqc-default", histoqc_data=tmp_path / "data")
    ).checks
    assert notes_on_absent(checks) == []
    assert len(notes_on_row(checks, rows[0])) == 2
    numbers = dict.fromkeys(("pen_markings", "coverslip_edge"), 0.0)
    assert [n[:9] for n in notes_on_row(checks, {**rows[0], **numbers})] == [
        "templates"
    ]


def test_the_name_of_a_converted_pipeline_has_its_hash_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ini = tmp_path / "config.ini"
    step = "BasicModule.finalProcessingSpur"
    ini.write_text(f"[pipeline]\nsteps= {step}\n[{step}]\ndisk_radius: 7\n")
    slide, out = folder / "s0.svs", tmp_path / "out"
    changes = {"from_histoqc": ini, "write": ()}
    # a folder of an earlier version, whose name has the hash twice
    today: Any = QcStage.name
    with monkeypatch.context() as earlier:
        earlier.setattr(
            QcStage,
            "name",
            property(lambda stage: f"{today.fget(stage)}-{today.fget(stage)[-6:]}"),
        )
        check(slide, out=out, **changes)
    assert states(check(slide, out=out, **changes)) == {"s0": "done"}
    old, new = sorted(
        (path.stem for path in out.glob("qc_*.csv")), key=len, reverse=True
    )
    hash_part = new.removeprefix("qc_config-")
    assert re.fullmatch("[0-9a-f]{6}", hash_part)
    assert old == f"qc_config-{hash_part}-{hash_part}"
    assert states(check(slide, out=out, **changes)) == {"s0": "skipped"}
    # `run` with the written file takes the same results
    (toml,) = (out / "records" / "pipelines").iterdir()
    summary = run(
        slide, out=out, config=RunConfig(qc=QcConfig(qc=str(toml))), until="qc"
    )
    assert [result.status for result in summary.results] == ["skipped"]
    for name in (old, new):
        assert "spur" in read_qc(out / "slides" / "s0" / name).names


def test_a_finished_slide_is_kept_and_another_pipeline_lies_beside_it(
    folder: Path, tmp_path: Path
) -> None:
    slide, out = folder / "s0.svs", tmp_path / "out"
    check(slide, out=out)
    (first,) = read_qc_csv(out / "qc_histoqc-light.csv")
    again = check(slide, out=out)
    assert states(again) == {"s0": "skipped"}
    assert read_qc_csv(out / "qc_histoqc-light.csv") == [first]
    (out / "slides" / "s0" / "qc_histoqc-light" / QC_FILE).write_text("{")
    assert states(check(slide, out=out)) == {"s0": "done"}
    before = files(out / "slides" / "s0" / "qc_histoqc-light")
    assert states(check(slide, out=out, qc="histoqc-clinical")) == {"s0": "done"}
    assert files(out / "slides" / "s0" / "qc_histoqc-light") == before
    assert states(check(slide, out=out)) == {"s0": "skipped"}
    assert states(check(slide, out=out, resume=False)) == {"s0": "done"}


def test_pictures_are_made_on_request_and_later_ones_equal_those_of_the_first_run(
    folder: Path, tmp_path: Path
) -> None:
    slide = folder / "s0.svs"
    check(slide, out=tmp_path / "at once", write=(), qc_pictures=True)
    later = tmp_path / "later"
    check(slide, out=later, write=())
    home = later / "slides" / "s0" / "qc_histoqc-light"
    names = {path.name for path in home.iterdir()}
    assert names == {"picture.jpg", "overlay.jpg", QC_FILE}
    page = (later / "qc_histoqc-light.html").read_text()
    assert "nonwhite.png" not in page
    stored = (home / QC_FILE).read_bytes()
    assert states(check(slide, out=later, write=(), qc_pictures=True)) == {"s0": "done"}
    assert (home / QC_FILE).read_bytes() == stored
    first = tmp_path / "at once" / "slides" / "s0" / "qc_histoqc-light"
    assert files(first) == files(home)
    assert len(files(home)) > len(names)
    assert "nonwhite.png" in (later / "qc_histoqc-light.html").read_text()
    assert states(check(slide, out=later, write=())) == {"s0": "skipped"}


def test_a_run_takes_up_what_quality_control_left(folder: Path, tmp_path: Path) -> None:
    check(folder / "s0.svs", out=tmp_path)
    before = files(tmp_path / "slides" / "s0" / "qc_histoqc-light")
    config = replace_flat(RunConfig(), {"qc": "histoqc-light", "overview": False})
    summary = run([folder / "s0.svs"], out=tmp_path, config=config, until="tiles")
    assert summary.counts["done"] == 1
    assert files(tmp_path / "slides" / "s0" / "qc_histoqc-light") == before
    assert (tmp_path / "256px_0.5mpp_qc-histoqc-light" / "tiles" / "s0.h5").is_file()
    assert states(check(folder / "s0.svs", out=tmp_path)) == {"s0": "skipped"}
    commands = [record.document["command"] for record in read_records(tmp_path)]
    assert commands == ["qc", "run --until tiles", "qc"]


def test_a_slide_that_another_process_is_at_is_waited_for_and_not_done_twice(
    tmp_path: Path,
) -> None:
    path, out = tmp_path / "a.svs", tmp_path / "out"
    write_he_slide(path, (900, 700))
    entries = load_cohort([path])
    task, waited = task_of(out), threading.Semaphore(0)

    def on_event(event: RunEvent) -> None:
        if event.kind == "waiting":
            waited.release()

    lock = out / "slides" / "a" / LOCK_NAME
    with ThreadPoolExecutor() as pool:
        with hold(lock):
            waiting = [pool.submit(task, entries, on_event=on_event) for _ in range(2)]
            assert waited.acquire(timeout=60)
            assert waited.acquire(timeout=60)
            assert not wait(waiting, timeout=1.5).done
        reports = [f.result() for f in waiting]
    # one looked at the slide; the other found it done by this very invocation
    assert [report.results[0].status for report in reports] == ["done", "done"]
    assert sorted("prepare_busy" in report.stage_seconds for report in reports) == [
        False,
        True,
    ]
    assert not lock.exists()


def test_a_failed_slide_is_tried_again(tmp_path: Path) -> None:
    path, out = tmp_path / "a.svs", tmp_path / "out"
    path.write_text("not yet a slide")
    assert states(check(path, out=out)) == {"a": "failed"}
    (row,) = read_qc_csv(out / "qc_histoqc-light.csv")
    assert row["status"] == "failed"
    assert "no reader opens" in str(row["warnings"])
    path.unlink()
    write_he_slide(path, (2000, 1500))
    assert states(check(path, out=out)) == {"a": "done"}
    assert not (out / "slides" / "a" / FAILURE_NAME).exists()


@pytest.mark.check
@pytest.mark.parametrize("wide", [POOL, DASK], ids=lambda wide: str(wide["executor"]))
def test_workers_write_the_same_files_as_one_process_and_a_bad_slide_stays_alone(
    folder: Path, tmp_path: Path, wide: dict[str, object]
) -> None:
    if wide is DASK:
        pytest.importorskip("distributed", reason="dask is not installed")
    inline = check(folder, out=tmp_path / "inline")
    told: list[SlideResult] = []
    workers = check_slides(
        [str(folder)],
        out=tmp_path / "workers",
        config=settings(**wide),
        on_event=lambda event: told.append(event.result) if event.result else None,
    )
    assert states(workers) == {
        "bad": "failed",
        **dict.fromkeys(("s0", "s1", "s2"), "done"),
    }
    assert workers.results == inline.results  # facts and errors, in the same order
    assert sorted(result.slide_id for result in told) == ["bad", "s0", "s1", "s2"]
    assert files(tmp_path / "workers") == files(tmp_path / "inline")
    wanted = {
        "qc_histoqc-light.csv",
        "qc_histoqc-light.html",
        "results.tsv",
        "slides/s0/qc_histoqc-light/mask_use.png",
    }
    assert wanted <= set(files(tmp_path / "workers"))
    assert "no reader opens" in str(failure(tmp_path / "workers", "bad")["error"])


@pytest.mark.check
@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("wide", [POOL, DASK], ids=lambda wide: str(wide["executor"]))
def test_a_worker_killed_in_the_middle_loses_no_slide(
    folder: Path, tmp_path: Path, repeat: int, wide: dict[str, object]
) -> None:
    if wide is DASK:
        pytest.importorskip("distributed", reason="dask is not installed")
    plain = task_of(tmp_path).on_worker(threads=1, monitored=False)
    task = KilledEntryTask(
        **vars(plain), killed_once=frozenset({"s1"}), killed_always=frozenset({"s2"})
    )
    entries = load_cohort([folder / f"s{index}.svs" for index in range(3)])
    results: list[SlideResult] = []
    messages: list[str] = []
    execute(
        entries,
        task,
        replace_flat(settings(), {**wide, "workers": 1, "chunk_slides": 3}).executor,
        folder=task.record,
        on_report=lambda report: results.extend(report.results),
        on_message=messages.append,
    )
    found = {result.slide_id: result for result in results}
    assert len(results) == 3
    assert {k: r.status for k, r in found.items()} == {
        "s0": "done",
        "s1": "done",
        "s2": "failed",
    }
    assert any(text.startswith("a worker died with 2 ") for text in messages)
    assert "twice, the second time with this entry alone" in found["s2"].error
    assert "its worker died" in str(failure(tmp_path, "s2")["error"])
    # s0 was finished before s1 killed the worker, so it was not done again
    first, second = (
        tmp_path / "slides" / name / "qc_histoqc-light" / QC_FILE
        for name in ("s0", "s1")
    )
    killed = tmp_path / ".killed-s1"
    assert first.stat().st_mtime < killed.stat().st_mtime < second.stat().st_mtime


@pytest.mark.check
@needs_slurm
def test_array_tasks_write_the_same_files_and_what_a_killed_one_left_is_tried_alone(
    folder: Path, tmp_path: Path, on_slurm: dict[str, str]
) -> None:
    write_he_slide(
        tmp_path / "z.svs", (9000, 7000), seed=5
    )  # long enough to be killed in it
    slides = [folder / "s0.svs", folder / "bad.svs", tmp_path / "z.svs"]
    inline = check(*slides, out=tmp_path / "inline")
    messages: list[str] = []
    out = tmp_path / "slurm"
    killer = Killer(out, at="z")
    killer.start()
    try:
        slurm = check_slides(
            list(map(str, slides)),
            out=out,
            config=settings(**SLURM, chunk_slides=3),
            on_message=messages.append,
        )
    finally:
        killer.stop.set()
        killer.join()
    assert len(killer.killed) == 1
    assert (
        states(slurm) == states(inline) == {"s0": "done", "bad": "failed", "z": "done"}
    )
    assert files(out) == files(tmp_path / "inline")
    assert any("died" in text and "alone" in text for text in messages), messages
    again = check_slides([str(slides[0])], out=out, config=settings(**SLURM))
    assert states(again) == {"s0": "skipped"}
    assert len(list(out.rglob("array.sh"))) == 2  # nothing was submitted


class Killer(threading.Thread):
    """Sends SIGKILL to the array task that is at a slide, once the others are ended."""

    def __init__(self, out: Path, *, at: str) -> None:
        super().__init__(daemon=True)
        self.out, self.at = out, at
        self.killed: list[int] = []
        self.stop = threading.Event()

    def run(self) -> None:
        slides = self.out / "slides"
        while not self.killed and not self.stop.wait(0.002):
            others = (slides / "bad" / FAILURE_NAME, slides / "s0" / "slide.json")
            if (
                all(p.exists() for p in others)
                and (slides / self.at / LOCK_NAME).exists()
            ):
                self.kill()

    def kill(self) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:  # it ended
                continue
            ours = any(str(self.out).encode() in word for word in words)
            if b"thinsection" in words and b"slurm" in words and ours:
                os.kill(int(path.parent.name), signal.SIGKILL)
                self.killed.append(int(path.parent.name))


def test_a_finished_slide_is_not_sent_and_a_changed_file_is(tmp_path: Path) -> None:
    path, out = tmp_path / "s.svs", tmp_path / "out"
    write_he_slide(path, (900, 700))
    (entry,) = load_cohort([path])
    assert task_of(out).finished(entry) is None
    (done,) = task_of(out)([entry], on_event=lambda event: None).results
    known = task_of(out).finished(entry)
    assert known is not None
    assert (known.status, known.facts) == ("skipped", done.facts)
    assert task_of(out, resume=False).finished(entry) is None
    write_he_slide(path, (900, 700), seed=9)
    assert task_of(out).finished(entry) is None


def test_a_run_looks_once_at_a_slide_that_lacks_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process does the work, so what this one looks at is counted apart."""
    path, out = tmp_path / "s.svs", tmp_path / "out"
    write_he_slide(path, (900, 700))
    run([path], out=out, until="tissue")
    looks: list[str] = []
    plain = prepare.load_work

    def counted(entry: SlideEntry, *args: Any, **options: Any) -> Any:
        looks.append(entry.slide_id)
        return plain(entry, *args, **options)

    monkeypatch.setattr(prepare, "load_work", counted)
    config = replace_flat(RunConfig(), {"executor": "pool", "workers": 1})
    assert run([path], out=out, config=config, until="tiles").counts["done"] == 1
    assert looks == ["s"]


def test_what_a_process_of_this_invocation_finished_is_done_even_if_its_worker_dies(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.svs"
    write_he_slide(path, (900, 700))
    (entry,) = load_cohort([path])
    task = task_of(tmp_path / "out")
    (done,) = task([entry], on_event=lambda event: None).results
    assert done.status == "done"
    assert task.lost(entry, "its worker died") == task.finished(entry) == done
    assert not list((tmp_path / "out").rglob(FAILURE_NAME))


@pytest.mark.parametrize("pipeline", ["auto", "histoqc-clinical"])
def test_a_task_comes_back_from_its_document(tmp_path: Path, pipeline: str) -> None:
    config = replace_flat(RunConfig(qc=QcConfig(qc=pipeline)), {"resume": False})
    task = make_task(tmp_path / "out", resolve(config, {"until": "qc"})).on_worker(
        threads=2, monitored=False
    )
    assert from_mapping(RunTask, json.loads(json.dumps(as_mapping(task)))) == task


def test_a_pipeline_of_a_file_has_a_name_that_follows_what_it_says(
    folder: Path, tmp_path: Path
) -> None:
    toml, out = tmp_path / "mine.toml", tmp_path / "out"
    toml.write_text(dump_pipeline(load_pipeline("histoqc-light")))
    check(folder / "s0.svs", out=out, qc=str(toml))
    (first,) = (out / "slides" / "s0").glob("qc_mine-*")
    before = files(first)
    toml.write_text(toml.read_text().replace("work_mpp = ", "work_mpp = 1"))
    check(folder / "s0.svs", out=out, qc=str(toml))
    assert len(list((out / "slides" / "s0").glob("qc_mine-*"))) == 2
    assert files(first) == before
    assert len(list(out.glob("qc_mine-*.csv"))) == 2


def test_rules_mark_slides_in_the_table_and_leave_them_out(
    folder: Path, tmp_path: Path
) -> None:
    rule = "pixels_to_use<1e9"
    summary = check(folder, out=tmp_path, qc_fail=(rule,))
    assert states(summary) == {
        "bad": "failed",
        **dict.fromkeys(("s0", "s1", "s2"), "excluded"),
    }
    assert [slide for slide, _ in summary.failing] == ["s0", "s1", "s2"]
    rows = {
        row["slide_id"]: row for row in read_qc_csv(tmp_path / "qc_histoqc-light.csv")
    }
    assert {name: row["status"] for name, row in rows.items()} == {
        **dict.fromkeys(("s0", "s1", "s2"), "done"),
        "bad": "failed",
    }
    assert rows["s0"]["fails"] == "pixels_to_use<1e+09"
    assert failure(tmp_path, "s0")["status"] == "excluded"
    plain = check(folder, out=tmp_path)
    assert states(plain) == {
        "bad": "failed",
        **dict.fromkeys(("s0", "s1", "s2"), "skipped"),
    }
    assert plain.failing == ()
    assert not (tmp_path / "slides" / "s0" / FAILURE_NAME).exists()


def test_tables_go_by_column_name_and_rules_mark_slides(tmp_path: Path) -> None:
    rows: list[dict[str, Score]] = [
        {
            "slide_id": "a",
            "slide_path": "x/a.svs",
            "status": "done",
            "pixels_to_use": 12.0,
            "width": 30.0,
            "height": 20.0,
            "warnings": "odd\tslide",
        },
        {
            "slide_id": "b",
            "slide_path": "b.svs",
            "status": "failed",
            "warnings": "gone",
        },
        {
            "slide_id": "c",
            "slide_path": "c.svs",
            "status": "done",
            "bright": 0.5,
            "pixels_to_use": 5000.0,
            "warnings": "",
        },
    ]
    failing = failing_rules(rows, ["pixels_to_use<1000"])
    assert [(slide, str(rule)) for slide, rule in failing] == [
        ("a", "pixels_to_use<1000")
    ]
    write_qc_csv(tmp_path / "qc.csv", rows)
    table = {row["slide_id"]: row for row in read_qc_csv(tmp_path / "qc.csv")}
    assert (table["c"]["bright"], table["a"]["bright"]) == (0.5, "")
    write_histoqc(tmp_path, rows, HEADERS)
    lines = (tmp_path / "results.tsv").read_text().splitlines()
    assert [line.split(":")[0] for line in lines[:6]] == [
        *("#start_time", "#pipeline", "#outdir", "#config_file", "#command_line_args"),
        "#dataset",
    ]
    parsed = list(
        csv.DictReader([lines[5].removeprefix("#dataset:"), *lines[6:]], delimiter="\t")
    )
    assert [row["filename"] for row in parsed] == ["a.svs", "c.svs"]
    assert list(parsed[0])[:3] == ["filename", "comments", "image_bounding_box"]
    assert list(parsed[0])[-3:] == ["bright", "pixels_to_use", "warnings"]
    assert len({len(line.split("\t")) for line in lines[5:]}) == 1
    assert parsed[0]["image_bounding_box"] == "(0, 0, 30, 20)"
    assert (parsed[0]["bright"], parsed[1]["bright"]) == ("NA", "0.5")


@pytest.mark.check
def test_the_command_takes_an_executor(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    flags = [
        "--out",
        str(tmp_path / "out"),
        "--qc",
        "histoqc-light",
        "--executor",
        "dask",
    ]
    done = CliRunner().invoke(
        build_app(["qc"]), ["qc", str(folder), *flags, "--workers", "1"]
    )
    assert done.exit_code == 3, done.output
    assert "dask dashboard: http" in done.output
    assert "3 of 4 slides done" in done.output
    rows = read_qc_csv(tmp_path / "out" / "qc_histoqc-light.csv")
    assert {row["slide_id"]: row["status"] for row in rows} == {
        "bad": "failed",
        **dict.fromkeys(("s0", "s1", "s2"), "done"),
    }


def test_quality_control_that_is_off_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qc pipeline must be a preset .*got 'off'"):
        check(folder, out=tmp_path / "out", qc="off")
    assert not (tmp_path / "out").exists()
