"""Array jobs on a real one-node Slurm, and the pure parts: script, times, what is missing."""

import csv
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.slurm_node import why_not

from thinsection.cli.slurm import TASKS
from thinsection.errors import ClusterError, ConfigError
from thinsection.jobs.executor import ExecutorConfig, parse_walltime
from thinsection.jobs.request import batch_script
from thinsection.jobs.slurm import collect
from thinsection.jobs.slurm_array import Array, array_folders, load_array, task_states
from thinsection.run.run import make_task, run
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import GIB
from thinsection.usage.analysis import Request
from thinsection.usage.monitor import read_usage

REASON = why_not()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=f"no Slurm here: {REASON}")
TASK_FLAGS = ("--job-cpus", 1, "--job-memory", "1900MiB", "--walltime", "00:10:00")
REQUEST = Request(cpus=3, memory_bytes=2 * GIB, gpus=0, walltime_s=3600)


def settings(**changes: object) -> RunConfig:
    executor = ExecutorConfig(
        executor="slurm",
        **{"chunk_slides": 1, "job_cpus": 1, "job_memory": "1900MiB", **changes},  # type: ignore[arg-type]
        **({} if "walltime" in changes else {"walltime": "01:00:00"}),
    )
    return RunConfig(executor=executor)


def script(folder: str, config: ExecutorConfig, **changes: Any) -> str:
    values: dict[str, Any] = {"num_tasks": 9, "request": REQUEST, **changes}
    return batch_script(Path(folder), config=config, **values)


def test_the_script_asks_for_the_request_and_the_users_directives_come_last() -> None:
    config = ExecutorConfig(
        partition="gpu",
        account="lab",
        gres="gpu:a100:1",
        workers=4,
        directive=("--qos=long",),
    )
    lines = script("/o/j", config).splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [
        line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")
    ]
    assert "--array=1-9%4" in directives
    assert {"--cpus-per-task=3", "--mem=2048M", "--time=01:00:00"} <= set(directives)
    assert {"--partition=gpu", "--account=lab", "--gres=gpu:a100:1"} <= set(directives)
    assert directives[-1] == "--qos=long"
    assert lines[-1].endswith('slurm array-task /o/j --index "$SLURM_ARRAY_TASK_ID"')


def test_paths_with_spaces_quotes_and_percents_are_quoted() -> None:
    text = script('/o/a "b" 50%', ExecutorConfig(), python="/p y")
    assert """'/p y' -m thinsection slurm array-task '/o/a "b" 50%' --index""" in text
    assert '#SBATCH --output="/o/a \\"b\\" 50%%/logs/%A_%a.log"\n' in text


@pytest.mark.parametrize("name", ["partition", "account", "gres", "gpu"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a b", "a'b", "", "a#b"])
def test_a_word_of_a_directive_cannot_break_out_of_its_line(
    name: str, value: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"executor.{name} must be one word without quotes"
    ):
        ExecutorConfig(**{name: value})


def test_a_line_break_in_the_output_folder_or_a_directive_is_refused() -> None:
    with pytest.raises(ConfigError, match="out must contain no line break"):
        script("/o/a\nb", ExecutorConfig())
    with pytest.raises(ConfigError, match=r"executor\.directive must start with '-'"):
        ExecutorConfig(directive=("--qos=a\r--uid=0",))


def test_an_array_that_slurm_would_refuse_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"num_tasks must be in \[1, 1000\], got 1001"
    ):
        script("/o", ExecutorConfig(), num_tasks=1001)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("01:00:05", 3605),
        ("2-03", 183600),
        ("1-00:10:00", 87000),
    ],
)
def test_walltimes_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert parse_walltime(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "x-1", "0"])
def test_other_walltimes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"executor\.walltime must be"):
        parse_walltime(text)


def test_without_sbatch_the_error_says_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_he_slide(tmp_path / "a.tiff", (600, 400))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ClusterError, match=r'sbatch must be on the PATH.*another executor="'
    ):
        run([tmp_path / "a.tiff"], out=tmp_path / "out", config=settings())
    assert not arrays(tmp_path / "out")


def arrays(out: Path) -> list[Array]:
    return [load_array(folder, TASKS) for folder in array_folders(out)]


def thinsection(
    *arguments: object, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinsection", *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )


def await_end(job: Array, *, timeout_s: float = 200) -> None:
    """Until every array task reported or left the queue."""
    deadline = time.monotonic() + timeout_s

    def running() -> bool:
        listed = task_states(job.job_id or 0, len(job.chunks))
        return not all(state.has_ended for state in listed.values())

    while set(job.states().values()) - {"DONE", "LOST"} or running():
        assert time.monotonic() < deadline, job.states()
        threading.Event().wait(0.2)


def rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as file:
        return {row["slide_id"]: row for row in csv.DictReader(file)}


@needs_slurm
def test_an_array_with_a_bad_slide_and_a_cancelled_task_is_collected_and_resubmitted(
    tmp_path: Path, on_slurm: dict[str, str]
) -> None:
    slides, out = tmp_path / "slides", tmp_path / "out"
    slides.mkdir()
    for index in range(2):
        write_he_slide(slides / f"good{index}.tiff", (700, 600), seed=index)
    (slides / "bad.tiff").write_bytes(b"II*\0 this is no slide")
    write_he_slide(slides / "slow.tiff", (700, 600), seed=7)
    flags = ["--out", out, "--chunk-slides", 1, *TASK_FLAGS]

    first = thinsection("slurm", "submit", slides, *flags, environment=on_slurm)
    assert first.returncode == 0, first.stderr
    (job,) = arrays(out)
    assert job.job_id is not None
    assert f"slurm job {job.job_id}: 4 entries in 4 array tasks" in first.stdout
    chunks: list[tuple[Any, ...]] = job.chunks
    slow = next(i for i, c in enumerate(chunks, start=1) if c[0].slide_id == "slow")
    subprocess.run(["scancel", f"{job.job_id}_{slow}"], check=True)
    await_end(job)
    assert job.states()[slow] == "LOST"

    merged = thinsection("slurm", "collect", out, environment=on_slurm)
    assert merged.returncode == 3, merged.stderr
    summary, failed = rows(out / "summary.csv"), rows(out / "failed.csv")
    assert {k: v["status"] for k, v in summary.items()} == {
        **{"good0": "done", "good1": "done"},
        **{"bad": "failed", "slow": "failed"},
    }
    assert failed["bad"]["stage"] == "open"
    assert failed["slow"]["stage"] == "worker"
    assert (
        f"array task {job.job_id}_{slow} ended without a report"
        in failed["slow"]["error"]
    )
    assert len(arrays(out)) == 1  # who cancels a task does not want it again
    assert "good" in "".join(p.read_text() for p in (job.folder / "logs").iterdir())
    document = json.loads((job.folder.parents[1] / "run.json").read_text())
    assert document["stage_seconds"]["encode_busy"] > 0
    assert document["efficiency"]["next_request"]["memory_bytes"] > 0

    write_he_slide(slides / "bad.tiff", (700, 600), seed=9)  # repaired
    before = next(out.glob("*/features_*/good0.h5")).stat().st_mtime_ns
    again = thinsection("slurm", "submit", slides, *flags, environment=on_slurm)
    assert "2 of 4 are already done and are skipped" in again.stderr
    second = arrays(out)[-1]
    entries: tuple[Any, ...] = second.attempt.entries
    assert sorted(entry.slide_id for entry in entries) == ["bad", "slow"]
    assert second.job_id is not None
    await_end(second)
    done = thinsection("slurm", "collect", out, environment=on_slurm)
    assert (done.returncode, "run: 4 done" in done.stdout) == (0, True), done.stderr
    assert next(out.glob("*/features_*/good0.h5")).stat().st_mtime_ns == before
    status = thinsection("slurm", "status", out, environment=on_slurm)
    assert "2 done" in status.stdout.splitlines()[-2]  # of the newer array
    nothing = thinsection("slurm", "submit", slides, *flags, environment=on_slurm)
    assert "nothing is missing" in nothing.stderr
    assert len(arrays(out)) == 2


@needs_slurm
def test_a_running_task_that_is_cancelled_loses_no_slide(
    tmp_path: Path, on_slurm: dict[str, str]
) -> None:
    write_he_slide(tmp_path / "big.tiff", (6000, 5000))
    out = tmp_path / "out"
    thinsection(
        "slurm",
        "submit",
        tmp_path / "big.tiff",
        "--out",
        out,
        *TASK_FLAGS,
        environment=on_slurm,
    )
    (job,) = arrays(out)
    number = job.job_id
    lock = out / "slides" / "big" / ".lock"
    deadline = time.monotonic() + 100
    while not lock.exists():
        assert time.monotonic() < deadline, "the task did not begin"
        threading.Event().wait(0.05)
    subprocess.run(["scancel", f"{number}_1"], check=True)
    await_end(job)
    (found,) = collect(out, TASKS)
    assert [result.status for result in found.results.values()] == ["failed"]
    task = make_task(out, resolve(settings(), {"until": "tissue"}))
    report = task(
        job.attempt.entries, on_event=lambda event: None
    )  # the dead task's lock is no obstacle; it may have been killed after its last file
    assert [r.status for r in report.results] in (["done"], ["skipped"])
    assert (out / "slides" / "big" / "tissue.png").stat().st_size > 0


@needs_slurm
def test_run_with_the_slurm_executor_waits_and_gives_the_same_bytes_as_inline(
    tmp_path: Path, on_slurm: dict[str, str]
) -> None:
    for index in range(2):
        write_he_slide(tmp_path / f"s{index}.tiff", (700, 600), seed=index)
    slides = [tmp_path / "s0.tiff", tmp_path / "s1.tiff"]
    flags = [*TASK_FLAGS, "--threads", 1, "--executor"]
    for name in ("inline", "slurm"):
        done = thinsection(
            "run", *slides, "--out", tmp_path / name, *flags, name, environment=on_slurm
        )
        assert done.returncode == 0, done.stderr
    names = [
        p.relative_to(tmp_path / "inline") for p in (tmp_path / "inline").rglob("*.h5")
    ]
    assert {"s0.h5", "s1.h5"} == {name.name for name in names}
    assert len(names) >= 2 * 3  # tiles, features, slide features
    for name in (*names, Path("summary.csv")):
        inline, slurm = tmp_path / "inline" / name, tmp_path / "slurm" / name
        assert inline.read_bytes() == slurm.read_bytes(), name


@needs_slurm
def test_dask_workers_come_up_as_two_slurm_jobs_and_do_the_work(
    tmp_path: Path, on_slurm: dict[str, str]
) -> None:
    for index in range(4):
        write_he_slide(tmp_path / f"s{index}.tiff", (700, 600), seed=index)
    slides = sorted(tmp_path.glob("*.tiff"))
    config = RunConfig(
        executor=ExecutorConfig(
            **{
                "executor": "dask",
                "jobqueue": "slurm",
                "workers": 2,
                "chunk_slides": 1,
            },  # type: ignore[arg-type]
            **{"job_cpus": 1, "job_memory": "1900MiB", "walltime": "00:10:00"},  # type: ignore[arg-type]
        )
    )
    earlier = dask_jobs()
    summary = run(slides, out=tmp_path / "out", config=config, until="tiles")
    assert summary.counts["done"] == 4
    # one that came up late, when all was done, has no log
    assert len(dask_jobs() - earlier) == 2
    records = read_usage(summary.record)
    jobs = {record.requested.job for record in records} - {None}
    assert 1 <= len(jobs) <= 2  # a quick job may have done the other's share
    assert all(r.requested.source == "slurm" for r in records if r.requested.job)
    assert list((summary.record / "logs").glob("dask-worker-*"))


def dask_jobs() -> set[str]:
    """Numbers of the jobs of Dask workers that Slurm knows, also of those that have ended."""
    command = ["squeue", "--noheader", "--states=all", "--name=dask-worker"]
    listed = subprocess.run(
        [*command, "--format=%A"], capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())
