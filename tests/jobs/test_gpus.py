"""Four GPUs have one worker each, which sees no other; no GPU is needed to see it."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import thinsection as ts
from thinsection.errors import ConfigError
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import OnEvent, Report, Task
from thinsection.testing.synthetic import write_he_slide


@dataclass(frozen=True)
class SeenGpus(Task[int, tuple[int, str]]):
    """Says which GPUs CUDA would show to the process of each entry."""

    def __call__(
        self, entries: Sequence[int], *, on_event: OnEvent
    ) -> Report[tuple[int, str]]:
        time.sleep(0.2)  # so that no worker takes all entries
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Report(results=tuple((os.getpid(), seen) for _ in entries))

    def lost(self, entry: int, reason: str) -> tuple[int, str]:
        raise AssertionError(f"{entry} was lost: {reason}")


def gpus_of_processes(folder: Path, config: ExecutorConfig) -> dict[int, str]:
    """Process -> what it sees."""
    reports: list[Report[tuple[int, str]]] = []
    execute(range(16), SeenGpus(), config, folder=folder, on_report=reports.append)
    results = [result for report in reports for result in report.results]
    assert len(results) == 16
    return dict(results)


@pytest.mark.check
def test_each_of_four_gpus_has_a_worker_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,4,6")
    config = ExecutorConfig(gpus="0,1,4,6", chunk_slides=1, threads=1)
    seen = gpus_of_processes(tmp_path, config)
    assert sorted(seen.values()) == ["0", "1", "4", "6"]
    assert os.getpid() not in seen


@pytest.mark.check
def test_more_workers_than_gpus_share_them_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    config = ExecutorConfig(gpus="3,5", workers=4, chunk_slides=1, threads=1)
    seen = gpus_of_processes(tmp_path, config)
    assert sorted(seen.values()) == ["3", "3", "5", "5"]


@pytest.mark.check
def test_one_gpu_that_is_named_is_the_one_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = ExecutorConfig(gpus="1", chunk_slides=1, threads=1)
    seen = gpus_of_processes(tmp_path, config)
    assert [*seen.values()] == ["1"]
    assert os.getpid() not in seen


def test_gpus_that_are_not_there_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="visible GPUs 0, 1, got '2'"):
        gpus_of_processes(tmp_path, ExecutorConfig(gpus="0,2"))


def test_a_run_that_asks_for_a_gpu_that_is_not_there_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_he_slide(tmp_path / "a.svs", (600, 400))
    with pytest.raises(ConfigError, match=r"where no GPU is visible, got '1'"):
        ts.run(tmp_path / "a.svs", out=tmp_path / "out", gpus="1", until="tiles")
    assert not (tmp_path / "out").exists()
