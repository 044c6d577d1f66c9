"""Results by URL: the same files as in a folder, whole or not at all; resumed from there."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from thinsection.pipeline.api import RunSummary, run
from thinsection.pipeline.slides import RunEvent

from thinsection.config import replace_flat
from thinsection.errors import ConfigError, SlideOpenError, StoreError
from thinsection.files.remote_folder import RemoteFolder
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import write_he_slide

pytest.importorskip("fsspec", reason="fsspec is not installed")

CONFIG = replace_flat(RunConfig(), {"threads": 1, "batch_size": 8})
# of a process, a moment, or a machine: not equal between two runs
RUNS_OWN = ("usage", "run.json", "efficiency.html")


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
    wanted = {n: p.read_bytes() for n, p in wanted.items() if not n.startswith(RUNS_OWN)}
    assert len(wanted) >= 3 * 7 + 2
    assert contents(url) == wanted
    assert {"run.json", "efficiency.html"} <= set(RemoteFolder(url).sizes())
    assert list(staging.iterdir()) == []


def test_what_is_there_is_skipped_and_what_is_missing_or_outdated_is_done(
    memory: str, slides: list[Path], staging: Path
) -> None:
    run(slides[:2], out=memory, config=CONFIG, stage="tile")
    first = slide_files(memory)
    again = run(slides, out=memory, config=CONFIG, stage="tile")
    assert statuses(again) == ["skipped", "skipped", "done"]
    now = slide_files(memory)
    assert {name: now[name] for name in first} == first
    RemoteFolder(memory).delete("s1/tiles.h5")
    assert statuses(run(slides, out=memory, config=CONFIG, stage="tile")) == [
        *("skipped", "done", "skipped")
    ]
    assert slide_files(memory) == now
    other = replace_flat(CONFIG, {"tile_px": 128})
    assert statuses(run(slides[:1], out=memory, config=other, stage="tile")) == ["done"]
    assert slide_files(memory)["s0/tiles.h5"] != now["s0/tiles.h5"]
    summary = contents(memory)["summary.csv"].decode().splitlines()
    assert [row.split(",")[0] for row in summary] == ["slide_id", "s0", "s1", "s2"]  # all of them


def test_a_slide_whose_files_do_not_arrive_is_failed_without_a_ledger_and_done_next_time(
    memory: str, slides: list[Path], staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(slides, out=memory, config=replace_flat(CONFIG, {"tile_px": 128}), stage="tile")
    put = RemoteFolder.put

    def broken(target: RemoteFolder, local: Path, name: str) -> None:
        if name == "s1/tiles.h5":
            raise OSError("the network is down")
        put(target, local, name)

    events: list[RunEvent] = []
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", broken)
        failed = run(slides, out=memory, config=CONFIG, stage="tile", on_event=events.append)
    assert statuses(failed) == ["done", "failed", "done"]
    assert (failed.results[1].stage, failed.exit_code) == ("upload", 3)
    assert "the network is down" in failed.results[1].error
    ended = {e.slide_id: e.result.status for e in events if e.kind == "ended" and e.result}
    assert ended["s1"] == "failed"
    there = contents(memory)
    assert "s1/slide.json" not in there
    assert b"the network is down" in there["failed.csv"]
    assert "s1/error.json" in there
    assert statuses(run(slides, out=memory, config=CONFIG, stage="tile")) == [
        *("skipped", "done", "skipped")
    ]
    there = contents(memory)
    assert "s1/slide.json" in there
    assert "s1/error.json" not in there
    assert b"network" not in there["failed.csv"]


def test_only_the_slides_in_work_are_held_here(
    memory: str, slides: list[Path], staging: Path
) -> None:
    held: list[int] = []

    def look(event: RunEvent) -> None:
        if event.kind == "ended":
            held.append(len(list(staging.glob("*/*/tiles.h5"))))

    run(slides, out=memory, config=CONFIG, stage="tile", on_event=look)
    assert held == [0, 0, 0]  # what ended has left


def test_a_killed_run_is_taken_up_from_what_arrived(
    bucket: Any, slides: list[Path], staging: Path
) -> None:
    url = "s3://slides/killed"
    command = [sys.executable, "-m", "thinsection", "run", *map(str, slides), "--out", url]
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(staging)}
    flags = ["--threads", "1", "--batch-size", "8"]
    process = subprocess.Popen(
        [*command, *flags], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while "s0/slide.json" not in RemoteFolder(url).sizes():
        assert process.poll() is None
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = RemoteFolder(url).sizes()
    assert "run.json" not in before
    summary = run(slides, out=url, config=CONFIG)
    assert statuses(summary)[0] == "skipped"
    assert "done" in statuses(summary)
    run(slides, out="s3://slides/whole", config=CONFIG)
    assert slide_files(url) == slide_files("s3://slides/whole")


def test_what_cannot_be_done_is_said_before_any_work(slides: list[Path], memory: str) -> None:
    for changes, words in (
        ({"executor": "dask"}, r"out must be a folder for --executor dask.*no locks"),
        ({"qc": "light"}, "out must be a folder with --qc"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(slides, out=memory, config=replace_flat(CONFIG, changes))
    with pytest.raises(SlideOpenError, match="must have a known protocol"):
        run(slides, out="nosuch://a/b", config=CONFIG)


def test_a_bucket_that_is_not_there_is_named(bucket: Any, slides: list[Path]) -> None:
    with pytest.raises(StoreError, match=r"out must be writable.*s3://no-such-bucket/x"):
        run(slides, out="s3://no-such-bucket/x", config=CONFIG)
