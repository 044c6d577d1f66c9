"""Dask workers: the same bytes as inline; deaths, losses and errors of a cluster."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.faults import FaultyTask

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import ClusterError, ConfigError, MissingDependencyError
from thinsection.jobs.dask import LOG_NAME
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig, local_shape
from thinsection.run.run import make_task, run
from thinsection.run.task import RunTask
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve
from thinsection.store.outcome import SlideResult
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import GIB, parse_bytes

pytestmark = pytest.mark.check  # Dask clusters

pytest.importorskip("distributed", reason="dask is not installed")

# the fault tests were made to be repeated: THINSECTION_FAULT_REPEATS=20
REPEATS = int(os.environ.get("THINSECTION_FAULT_REPEATS", "1"))
DASK = ExecutorConfig(executor="dask", workers=2, threads=1, chunk_slides=2)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("slides")
    for index in range(4):
        write_he_slide(folder / f"s{index}.tiff", (700 + 64 * index, 600), seed=index)
    return sorted(folder.iterdir())


def entries(slides: Sequence[Path]) -> list[SlideEntry]:
    return [SlideEntry(slide_id=path.stem, slide_path=str(path)) for path in slides]


def execute_slides(
    task: FaultyTask, slides: Sequence[Path]
) -> tuple[list[SlideResult], list[str]]:
    """Results of the slides in chunks of two on two workers, and the executor's messages."""
    results: list[SlideResult] = []
    messages: list[str] = []
    task.out.mkdir(parents=True, exist_ok=True)
    execute(
        entries(slides),
        task,
        replace(task.spec.executor, chunk_slides=2),
        folder=task.record,
        on_report=lambda report: results.extend(report.results),
        on_message=messages.append,
    )
    return results, messages


def faulty(out: Path, *, config: ExecutorConfig = DASK, **faults: Any) -> FaultyTask:
    """A task up to the tile grid: no encoder, so that a worker is soon there again."""
    out.mkdir(parents=True, exist_ok=True)
    plain = make_task(out, resolve(RunConfig(executor=config), {"until": "tiles"}))
    return FaultyTask(**vars(plain), **faults)


def test_two_workers_give_the_same_bytes_as_inline_and_events_come_home(
    tmp_path: Path, slides: list[Path]
) -> None:
    events: list[Any] = []
    messages: list[str] = []
    one_thread = RunConfig(executor=ExecutorConfig(threads=1))  # as each of the workers
    run(slides, out=tmp_path / "inline", config=one_thread)
    summary = run(
        slides,
        out=tmp_path / "dask",
        config=RunConfig(executor=DASK),
        on_event=events.append,
        on_message=messages.append,
    )
    assert summary.counts["done"] == 4
    assert any("dashboard: http://" in text for text in messages)
    ended = Counter(event.slide_id for event in events if event.kind == "ended")
    assert set(ended.values()) <= {
        1
    }  # events may lag behind the end of the run, never double
    compared = 0
    for path in sorted((tmp_path / "inline").rglob("*")):
        name = path.relative_to(tmp_path / "inline")
        if path.is_file() and name.parts[0] != "records":
            assert path.read_bytes() == (tmp_path / "dask" / name).read_bytes(), name
            compared += 1
    assert compared >= 4 * 6 + 2
    assert summary.stage_seconds["encode_busy"] > 0
    assert "distributed.worker" in (summary.record / "logs" / LOG_NAME).read_text()


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_a_worker_killed_in_the_middle_loses_nothing_and_doubles_nothing(
    tmp_path: Path, slides: list[Path], repeat: int
) -> None:
    task = faulty(tmp_path / "out", killed_once=frozenset({"s1"}))
    results, messages = execute_slides(task, slides)
    assert sorted((r.slide_id, r.status) for r in results) == [
        (f"s{i}", "done") for i in range(4)
    ]
    # s0, which came with s1, may have ended by then
    told = (
        "a worker died with 2 entries, each of which is",
        "a worker died with 1 entry, which is",
    )
    assert [m for m in messages if m.removesuffix(" now retried alone") in told], (
        messages
    )
    assert (task.out / ".killed-s1").exists()


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_a_slide_that_bloats_its_worker_is_recorded_and_the_rest_unharmed(
    tmp_path: Path, slides: list[Path], repeat: int
) -> None:
    config = ExecutorConfig(
        executor="dask", workers=2, threads=1, worker_memory="900MiB"
    )
    task = faulty(tmp_path / "out", config=config, bloated=frozenset({"s2"}))
    results, _ = execute_slides(task, slides)
    found = {r.slide_id: r for r in results}
    assert len(results) == 4
    assert {k: r.status for k, r in found.items()} == {
        **{"s0": "done", "s1": "done"},
        **{"s2": "failed", "s3": "done"},
    }
    assert found["s2"].stage == "worker"
    assert "worker died" in found["s2"].error
    assert "twice, the second time with this entry alone" in found["s2"].error
    assert (task.out / "slides" / "s2" / "failure.json").is_file()


def test_a_slide_is_alone_in_less_memory_that_still_holds_three_batches(
    tmp_path: Path,
) -> None:
    task = faulty(tmp_path / "out")
    smaller = task.smaller()
    assert parse_bytes(smaller.spec.stream.memory) == GIB
    assert smaller.spec.stream.decode_threads == 1
    assert smaller.spec.encoding == task.spec.encoding  # batches decide the last bit
    memory = [parse_bytes(task.spec.stream.memory)]
    for _ in range(6):
        task = task.smaller()
        memory.append(parse_bytes(task.spec.stream.memory))
    assert memory[-1] == memory[-2] >= 3 * 256 * 256 * 256 * 3


def test_a_lost_slide_that_is_done_all_the_same_stays_done(
    tmp_path: Path, slides: list[Path]
) -> None:
    task = faulty(tmp_path / "out")
    entry = entries(slides)[0]
    task([entry], on_event=lambda event: None)
    assert task.lost(entry, "its worker died").status == "done"


def test_the_task_comes_back_from_its_document(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    task = make_task(
        tmp_path / "out", resolve(RunConfig(executor=DASK), {"until": "embeddings"})
    )
    assert from_mapping(RunTask, json.loads(json.dumps(as_mapping(task)))) == task


def test_an_error_of_the_settings_ends_the_run_at_once(
    tmp_path: Path, slides: list[Path]
) -> None:
    config = RunConfig(executor=ExecutorConfig(executor="dask", workers=1, threads=1))
    task = make_task(tmp_path, resolve(config, {"until": "embeddings"}))
    broken = FaultyTask(**vars(task), failing=ConfigError("tiles.x must be 1, got 2"))
    with pytest.raises(ConfigError, match=r"tiles\.x must be 1, got 2"):
        execute_slides(broken, slides)


def test_no_scheduler_at_the_address_is_said(
    tmp_path: Path, slides: list[Path]
) -> None:
    config = ExecutorConfig(executor="dask", scheduler="tcp://127.0.0.1:9")
    with pytest.raises(
        ClusterError, match=r"address of a running one, got 'tcp://127\.0\.0\.1:9'"
    ):
        execute_slides(faulty(tmp_path / "out", config=config), slides)


def test_an_output_that_dask_jobqueue_would_not_quote_is_refused(
    tmp_path: Path, slides: list[Path]
) -> None:
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed")
    config = ExecutorConfig(executor="dask", jobqueue="slurm")
    with pytest.raises(
        ConfigError, match=r'without spaces for jobqueue.*or executor="slurm"'
    ):
        execute_slides(faulty(tmp_path / "an out", config=config), slides)


def test_gpus_without_dask_cuda_are_refused_with_another_way(
    tmp_path: Path, slides: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = ExecutorConfig(executor="dask", gpus="0,1")
    assert local_shape(config)[0] == 2
    with pytest.raises(
        MissingDependencyError, match=r"needs dask-cuda.*CUDA_VISIBLE_DEVICES"
    ):
        execute_slides(faulty(tmp_path / "out", config=config), slides)
