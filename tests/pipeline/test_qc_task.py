"""Quality control by every executor: the same files, bad slides alone, deaths, resume."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from tests.support.faults import KilledQcTask
from tests.support.qc_csv import read_qc_csv
from tests.support.slurm_node import why_not
from thinsection.pipeline.qc_batch import ERROR_FILE, QcReport, QcSettings, qc_slide
from thinsection.pipeline.qc_task import make_qc_task
from typer.testing import CliRunner

from thinsection.cli.main import build_app
from thinsection.config import replace_flat
from thinsection.jobs.execute import execute
from thinsection.jobs.task_document import TaskDocument, load_tasks
from thinsection.pipeline.qc_run import QcRunConfig, QcSummary, qc_run
from thinsection.qc import load_pipeline
from thinsection.report.qc_files import QC_JSON
from thinsection.slide.cohort import load_cohort
from thinsection.testing.synthetic import write_he_slide

REASON = why_not()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=f"no Slurm here: {REASON}")
DASK = {"executor": "dask", "workers": 2, "threads": 1, "chunk_slides": 2}
SLURM = {"executor": "slurm", "job_cpus": 1, "job_memory": "1GiB", "walltime": "00:10:00"}
REPEATS = int(os.environ.get("THINSECTION_FAULT_REPEATS", "1"))


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
    return replace_flat(QcRunConfig(), {"pipeline": "light", "write": ("histoqc",), **changes})


def files(out: Path) -> dict[str, object]:
    """Every file of the result; without seconds, times and the folder's own name."""
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if not path.is_file() or name.split("/", maxsplit=1)[0] in ("logs", "slurm"):
            continue
        if path.name == QC_JSON:
            found[name] = {**json.loads(path.read_text()), "seconds": None}
        elif path.name == "results.tsv":
            found[name] = [x for x in path.read_text().splitlines() if x[:6] not in HEADERS]
        elif path.name != ERROR_FILE:  # a traceback
            found[name] = path.read_bytes()
    return found


HEADERS = ("#start", "#outdi")


def states(summary: QcSummary) -> dict[str, str]:
    return {report.slide_id: report.status for report in summary.reports}


def test_dask_workers_write_the_same_files_as_inline_and_a_bad_slide_stays_alone(
    folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    inline = qc_run([str(folder)], out=tmp_path / "inline", config=settings())
    told: list[QcReport] = []
    dask = qc_run(
        [str(folder)], out=tmp_path / "dask", config=settings(**DASK), on_report=told.append
    )
    assert states(dask) == {"bad": "failed", **dict.fromkeys(("s0", "s1", "s2"), "done")}
    assert dask == inline  # rows and errors, in the same order
    assert sorted(report.slide_id for report in told) == ["bad", "s0", "s1", "s2"]
    assert files(tmp_path / "dask") == files(tmp_path / "inline")
    assert {"qc.csv", "qc.html", "results.tsv", "s0/mask_use.png"} <= set(files(tmp_path / "dask"))
    assert "no reader opens" in (tmp_path / "dask" / "bad" / ERROR_FILE).read_text()


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_a_worker_killed_in_the_middle_loses_no_slide(
    folder: Path, tmp_path: Path, repeat: int
) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    plain = make_qc_task(tmp_path, QcSettings(pipeline=load_pipeline("light")), threads=1)
    task = KilledQcTask(
        **vars(plain), killed_once=frozenset({"s1"}), killed_always=frozenset({"s2"})
    )
    entries = load_cohort([folder / f"s{index}.svs" for index in range(3)])
    reports: list[QcReport] = []
    messages: list[str] = []
    execute(
        entries,
        task,
        replace_flat(settings(), {**DASK, "workers": 1, "chunk_slides": 3}).executor,
        folder=tmp_path,
        on_report=lambda report: reports.extend(report.results),
        on_message=messages.append,
    )
    found = {report.slide_id: report for report in reports}
    assert len(reports) == 3
    # s0 was finished before s1 killed the worker, so it was not done again
    assert {k: r.status for k, r in found.items()} == {
        "s0": "skipped",
        "s1": "done",
        "s2": "failed",
    }
    assert "a worker died with 3 slides: each is tried alone" in messages
    assert "twice, the second time alone" in str(found["s2"].row["warnings"])
    assert "its worker died" in (tmp_path / "s2" / ERROR_FILE).read_text()


@needs_slurm
def test_array_tasks_write_the_same_files_and_what_a_killed_one_left_is_tried_alone(
    folder: Path, tmp_path: Path, on_slurm: dict[str, str]
) -> None:
    write_he_slide(tmp_path / "z.svs", (9000, 7000), seed=5)  # long enough to be killed in it
    slides = [str(folder / "s0.svs"), str(folder / "bad.svs"), str(tmp_path / "z.svs")]
    inline = qc_run(slides, out=tmp_path / "inline", config=settings())
    messages: list[str] = []
    killer = Killer(tmp_path / "slurm" / "slurm", entries=2)
    killer.start()
    try:
        slurm = qc_run(
            slides,
            out=tmp_path / "slurm",
            config=settings(**SLURM, chunk_slides=3),
            on_message=messages.append,
        )
    finally:
        killer.stop.set()
        killer.join()
    assert len(killer.killed) == 1
    assert states(slurm) == states(inline) == {"s0": "done", "bad": "failed", "z": "done"}
    assert files(tmp_path / "slurm") == files(tmp_path / "inline")
    assert "an array task died: what it left is tried once more, each alone: 1" in messages
    again = qc_run(
        slides[:1], out=tmp_path / "slurm", config=settings(**SLURM), on_message=messages.append
    )
    assert states(again) == {"s0": "skipped"}
    assert len(list((tmp_path / "slurm" / "slurm").iterdir())) == 2  # nothing was submitted


class Killer(threading.Thread):
    """Sends SIGKILL to the first array task that has reported so many entries."""

    def __init__(self, jobs: Path, *, entries: int) -> None:
        super().__init__(daemon=True)
        self.jobs, self.entries = jobs, entries
        self.killed: list[int] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.killed and not self.stop.wait(0.002):
            for results in self.jobs.glob("*/results/1.json"):
                if len(json.loads(results.read_text())) == self.entries:
                    self.kill(results.parents[1].name)

    def kill(self, job: str) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:  # it ended
                continue
            if b"array-task" in words and any(job.encode() in word for word in words):
                os.kill(int(path.parent.name), signal.SIGKILL)
                self.killed.append(int(path.parent.name))


def test_a_finished_slide_is_not_sent_and_a_changed_file_is(folder: Path, tmp_path: Path) -> None:
    (entry,) = load_cohort([folder / "s0.svs"])
    chosen = QcSettings(pipeline=load_pipeline("light"))
    task = make_qc_task(tmp_path / "out", chosen, threads=1)
    assert task.finished(entry) is None
    done = qc_slide(entry, tmp_path / "out", chosen)
    known = task.finished(entry)
    assert known is not None
    assert (known.status, known.row) == ("skipped", done.row)
    assert task.lost(entry, "its worker died") == known
    anew = make_qc_task(
        tmp_path / "out", QcSettings(pipeline=chosen.pipeline, resume=False), threads=1
    )
    assert anew.finished(entry) is None


@pytest.mark.parametrize("pipeline", ["extended", "clinical"])
def test_a_task_comes_back_from_its_document(folder: Path, tmp_path: Path, pipeline: str) -> None:
    chosen = QcSettings(pipeline=load_pipeline(pipeline), resume=False)
    task = make_qc_task(tmp_path / "out", chosen, threads=2)
    entries = load_cohort([folder], slide_mpp=(0.5, 0.51))
    TaskDocument(folder=tmp_path, task=task, chunks=(entries,)).save()
    loaded = load_tasks(tmp_path)
    assert loaded.chunks == (entries,)
    assert loaded.task.settings() == chosen


def test_the_command_takes_an_executor(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="dask is not installed")
    flags = ["--out", str(tmp_path / "out"), "--pipeline", "light", "--executor", "dask"]
    done = CliRunner().invoke(build_app(["qc"]), ["qc", str(folder), *flags, "--workers", "1"])
    assert done.exit_code == 3, done.output
    assert "dask dashboard: http" in done.output
    assert "3 of 4 slides done" in done.output
    rows = {row["slide_id"]: row["status"] for row in read_qc_csv(tmp_path / "out" / "qc.csv")}
    assert rows == {"bad": "failed", **dict.fromkeys(("s0", "s1", "s2"), "done")}
