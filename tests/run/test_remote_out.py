"""Results by URL: the same files as in a folder, whole or not at all; resumed from there."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import replace_flat
from thinsection.errors import ConfigError, SlideOpenError, StoreError
from thinsection.files.sources import RemoteFolder
from thinsection.run.ending import RunSummary
from thinsection.run.process import RunEvent
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import write_he_slide

pytest.importorskip("fsspec", reason="fsspec is not installed")

CONFIG = replace_flat(RunConfig(), {"threads": 1, "batch_size": 8})
# of a process, a moment, or a machine: not equal between two runs
# nor is the page: a bucket has its pictures already, so that it has no thumbnails
RUNS_OWN = ("records/", "index")
GRID = "256px_0.5mpp"
OF_A_GRID = ("tiles/s0.h5", "overviews/s0.jpg")  # that `tile` leaves


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("slides")
    for index, size in enumerate([(700, 600), (764, 600), (1500, 1200)]):
        write_he_slide(folder / f"s{index}.tiff", size, seed=index)
    return sorted(folder.iterdir())


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs of the test hold their files."""
    folder = tmp_path / "staging"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def memory() -> str:
    """A fresh folder of fsspec's file system in memory."""
    return f"memory://{secrets.token_hex(4)}/out"


def statuses(summary: RunSummary) -> list[str]:
    return [result.status for result in summary.results]


def contents(url: str) -> dict[str, bytes]:
    """Every file of a URL but what is the run's own."""
    target = RemoteFolder(url)
    names = [name for name in target.sizes() if not name.startswith(RUNS_OWN)]
    return {name: target.read(name) for name in names}


def slide_files(url: str) -> dict[str, bytes]:
    """Files of the slides, without the run's tables."""
    return {name: data for name, data in contents(url).items() if "/" in name}


def test_a_bucket_gets_the_same_bytes_as_a_folder_and_nothing_stays_here(
    bucket: Any, slides: list[Path], tmp_path: Path, staging: Path
) -> None:
    url = "s3://slides/results"
    summary = run(slides, out=url, config=CONFIG)
    assert (statuses(summary), summary.out) == (["done"] * 3, url)
    local = tmp_path / "local"
    run(slides, out=local, config=CONFIG)
    wanted = {str(p.relative_to(local)): p for p in local.rglob("*") if p.is_file()}
    wanted = {
        n: p.read_bytes() for n, p in wanted.items() if not n.startswith(RUNS_OWN)
    }
    assert len(wanted) >= 3 * 7 + 3  # files of each slide, then the run's tables
    assert contents(url) == wanted
    sizes = RemoteFolder(url).sizes()
    records = {
        name.split("/")[2]
        for name in sizes
        if name.count("/") > 1 and "records/" in name
    }
    assert records == {"run.json", "run.log", "efficiency.html", "usage", "ended"}
    assert {"index.html", "records/runs.js"} <= set(sizes)
    listed = CliRunner().invoke(build_app(["ls"]), ["ls", url])
    assert listed.exit_code == 0, listed.output
    assert f"{url}: 3 slides" in listed.output
    assert "run: 3 done" in listed.output
    assert list(staging.iterdir()) == []


def test_what_is_there_is_skipped_and_what_is_missing_or_outdated_is_done(
    memory: str, slides: list[Path], staging: Path
) -> None:
    run(slides[:2], out=memory, config=CONFIG, until="tiles")
    first = slide_files(memory)
    again = run(slides, out=memory, config=CONFIG, until="tiles")
    assert statuses(again) == ["skipped", "skipped", "done"]
    now = slide_files(memory)
    assert {name: now[name] for name in first} == first
    RemoteFolder(memory).delete(f"{GRID}/tiles/s1.h5")
    assert statuses(run(slides, out=memory, config=CONFIG, until="tiles")) == [
        *("skipped", "done", "skipped")
    ]
    assert slide_files(memory) == now
    other = replace_flat(CONFIG, {"tile_px": 128})
    assert statuses(run(slides[:1], out=memory, config=other, until="tiles")) == [
        "done"
    ]
    both = slide_files(memory)
    assert set(both) - set(now) == {f"128px_0.5mpp/{name}" for name in OF_A_GRID}
    assert {n: both[n] for n in now if "slide.json" not in n} == {
        n: data for n, data in now.items() if "slide.json" not in n
    }
    summary = contents(memory)["summary.csv"].decode().splitlines()
    assert [row.split(",")[0] for row in summary] == [
        *("slide_id", "s0", "s0", "s1", "s2")  # all of them, a row per grid
    ]


def test_what_a_new_stage_reads_is_fetched_and_no_tile_is_encoded_again(
    memory: str, slides: list[Path], staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(slides[:1], out=memory, config=CONFIG)
    first = slide_files(memory)
    put: list[str] = []
    plain = RemoteFolder.put

    def noted(target: RemoteFolder, local: Path, name: str) -> None:
        put.append(name)
        plain(target, local, name)

    monkeypatch.setattr(RemoteFolder, "put", noted)
    tiles: list[RunEvent] = []
    config = replace_flat(
        CONFIG, {"slide_encoders": ["max"], "write": ["tsv"], "graph": "knn:4"}
    )
    again = run(slides[:1], out=memory, config=config, on_event=tiles.append)
    assert statuses(again) == ["done"]
    assert not [event for event in tiles if event.kind == "tiles"]
    now = slide_files(memory)
    ledger = "slides/s0/slide.json"
    assert {n: now[n] for n in first if n != ledger} == {
        n: data for n, data in first.items() if n != ledger
    }
    new = {n for n in put if not n.startswith(RUNS_OWN) and "/" in n}
    assert new == set(now) - set(first) | {ledger}  # what was fetched is not put again
    assert len(new) == 4


def test_what_is_replaced_goes_with_all_that_was_made_from_it(
    memory: str, slides: list[Path], staging: Path, tmp_path: Path
) -> None:
    slide = tmp_path / "s.tiff"
    shutil.copy(slides[0], slide)
    run(
        [slide],
        out=memory,
        config=replace_flat(CONFIG, {"graph": "knn:4"}),
        until="tiles",
    )
    first = slide_files(memory)
    shutil.copy(slides[2], slide)
    refused = run([slide], out=memory, config=CONFIG, until="tiles")
    assert statuses(refused) == ["failed"]
    assert "pass --overwrite to replace it" in refused.results[0].error
    failure = "slides/s/failure.json"
    assert {n: d for n, d in slide_files(memory).items() if n != failure} == first
    again = run(
        [slide],
        out=memory,
        config=replace_flat(CONFIG, {"overwrite": True}),
        until="tiles",
    )
    assert statuses(again) == ["done"]
    assert set(first) - set(slide_files(memory)) == {f"{GRID}/graph_knn-4/s.h5"}


def test_a_slide_whose_files_do_not_arrive_is_failed_without_a_ledger_and_done_next_time(
    memory: str, slides: list[Path], staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(
        slides, out=memory, config=replace_flat(CONFIG, {"tile_px": 128}), until="tiles"
    )
    put = RemoteFolder.put

    def broken(target: RemoteFolder, local: Path, name: str) -> None:
        if name == f"{GRID}/tiles/s1.h5":
            raise OSError("the network is down")
        put(target, local, name)

    events: list[RunEvent] = []
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", broken)
        failed = run(
            slides, out=memory, config=CONFIG, until="tiles", on_event=events.append
        )
    assert statuses(failed) == ["done", "failed", "done"]
    assert (failed.results[1].stage, failed.exit_code) == ("upload", 3)
    assert "the network is down" in failed.results[1].error
    ended = {
        e.slide_id: e.result.status for e in events if e.kind == "ended" and e.result
    }
    assert ended["s1"] == "failed"
    there = contents(memory)
    assert "slides/s1/slide.json" not in there
    assert b"the network is down" in there["failed.csv"]
    assert "slides/s1/failure.json" in there
    assert statuses(run(slides, out=memory, config=CONFIG, until="tiles")) == [
        *("skipped", "done", "skipped")
    ]
    there = contents(memory)
    assert "slides/s1/slide.json" in there
    assert "slides/s1/failure.json" not in there
    assert b"network" not in there["failed.csv"]


def test_only_the_slides_in_work_are_held_here(
    memory: str, slides: list[Path], staging: Path
) -> None:
    held: dict[str, set[str]] = {}

    def look(event: RunEvent) -> None:
        if event.kind == "ended":
            held[event.slide_id] = {path.stem for path in staging.rglob("*.h5")}

    config = replace_flat(CONFIG, {"prefetch_slides": 1})
    run(slides, out=memory, config=config, until="tiles", on_event=look)
    assert list(held) == ["s0", "s1", "s2"]
    # what ended has left; the next ones are prepared meanwhile
    assert held["s0"] <= {"s1", "s2"}
    assert held["s1"] <= {"s2"}
    assert held["s2"] == set()


def test_a_killed_run_is_taken_up_from_what_arrived(
    bucket: Any, slides: list[Path], staging: Path
) -> None:
    url = "s3://slides/killed"
    command = [
        sys.executable,
        "-m",
        "thinsection",
        "run",
        *map(str, slides),
        "--out",
        url,
    ]
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(staging)}
    flags = ["--threads", "1", "--batch-size", "8"]
    process = subprocess.Popen(
        [*command, *flags],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while "slides/s0/slide.json" not in RemoteFolder(url).sizes():
        assert process.poll() is None
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = RemoteFolder(url).sizes()
    assert not [name for name in before if name.startswith(RUNS_OWN)]
    summary = run(slides, out=url, config=CONFIG)
    assert statuses(summary)[0] == "skipped"
    assert "done" in statuses(summary)
    run(slides, out="s3://slides/whole", config=CONFIG)
    assert slide_files(url) == slide_files("s3://slides/whole")


def test_what_cannot_be_done_is_said_before_any_work(
    slides: list[Path], memory: str
) -> None:
    for changes, words in (
        (
            {"executor": "dask"},
            r"out must be a local folder for executor 'dask'.*no locks",
        ),
        ({"qc": "histoqc-light"}, "out must be a local folder with qc"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(slides, out=memory, config=replace_flat(CONFIG, changes))
    with pytest.raises(SlideOpenError, match="must have a known protocol"):
        run(slides, out="nosuch://a/b", config=CONFIG)


def test_a_bucket_that_is_not_there_is_named(bucket: Any, slides: list[Path]) -> None:
    with pytest.raises(
        StoreError, match=r"out must be writable.*s3://no-such-bucket/x"
    ):
        run(slides, out="s3://no-such-bucket/x", config=CONFIG)
