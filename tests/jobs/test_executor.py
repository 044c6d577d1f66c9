"""The executor's settings and chunks, and the inline executor."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.config import replace_flat
from thinsection.errors import ConfigError
from thinsection.jobs.backend import (
    chunk_size,
    chunked,
    make_chunks,
    weighted_chunks,
)
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import (
    ExecutorConfig,
    check_gpus,
    chosen_executor,
    local_shape,
)
from thinsection.jobs.task import Report, Task
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import with_all_gpus


@dataclass(frozen=True)
class Doubling(Task[int, int]):
    def __call__(
        self, entries: Sequence[int], *, on_event: Callable[[Any], None]
    ) -> Report[int]:
        for entry in entries:
            on_event(entry)
        return Report(results=tuple(2 * entry for entry in entries))

    def lost(self, entry: int, reason: str) -> int:
        raise AssertionError(f"{entry} was lost: {reason}")


class Streaming(Doubling):
    streams: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("task", "results"), [(Doubling(), [(0,), (2,), (4,)]), (Streaming(), [(0, 2, 4)])]
)
def test_inline_reports_every_entry_once_and_passes_events_on(
    tmp_path: Path, task: Doubling, results: list[tuple[int, ...]]
) -> None:
    reports: list[Report[int]] = []
    events: list[Any] = []
    execute(
        range(3),
        task,
        ExecutorConfig(),
        folder=tmp_path,
        on_report=reports.append,
        on_event=events.append,
    )
    assert [r.results for r in reports] == results
    assert events == list(range(3))


@given(st.integers(1, 100_000), st.integers(1, 600))
def test_chunks_keep_every_slide_and_feed_every_worker(
    num_slides: int, workers: int
) -> None:
    size = chunk_size(num_slides, workers)
    chunks = chunked(range(num_slides), size)
    assert [i for chunk in chunks for i in chunk] == list(range(num_slides))
    assert 1 <= size <= 16
    assert len(chunks) >= min(workers, num_slides)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": -1}, r"executor.workers must be >= 0, got -1"),
        ({"worker_memory": "much"}, r"executor.worker_memory must be a size"),
        ({"jobqueue": "pbs"}, r"executor.jobqueue must be slurm, got 'pbs'"),
        ({"directive": ("rm -rf",)}, r"executor.directive must start with '-'"),
        ({"directive": ("--qos=a\nrm",)}, r"executor.directive must start with '-'"),
        ({"gpus": "0", "jobqueue": "slurm"}, r"one of scheduler, gpus and jobqueue"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ExecutorConfig(**settings)


def test_all_gpus_are_those_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert ExecutorConfig(gpus="all").gpu_ids == ("4", "6")
    assert chosen_executor(ExecutorConfig(gpus="all")) == "pool"
    assert chosen_executor(ExecutorConfig(gpus="none")) == "inline"
    assert ExecutorConfig(gpus="none", jobqueue="slurm").gpu_ids == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert chosen_executor(ExecutorConfig(gpus="all")) == "inline"


def test_one_gpu_that_is_named_has_a_worker_that_sees_no_other() -> None:
    for named in ("0", "1", "GPU-a"):
        assert chosen_executor(ExecutorConfig(gpus=named)) == "pool"
        assert local_shape(ExecutorConfig(gpus=named))[0] == 1


@pytest.mark.parametrize(
    ("visible", "asked", "message"),
    [
        ("", "all", "where no GPU is visible, got 'all'.*thinsection doctor"),
        ("-1", "0,1", "where no GPU is visible, got '0,1'"),
        ("2,3", "3,0", "among the visible GPUs 2, 3, got '0'"),
        ("0,1", "2", "among the visible GPUs 0, 1, got '2'"),
        ("GPU-a,GPU-b", "GPU-c", "among the visible GPUs GPU-a, GPU-b, got 'GPU-c'"),
        ("GPU-a,GPU-b", "0", "among the visible GPUs GPU-a, GPU-b, got '0'"),
        ("0,1", "1,0", None),
        ("0,1", "all", None),
        ("0,1", "GPU-a", None),  # CUDA compares it
        ("GPU-a,GPU-b", "GPU-b", None),
        ("", "none", None),
        ("", None, None),
    ],
)
def test_gpus_that_are_not_there_are_refused_by_name(
    visible: str,
    asked: str | None,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with (
        nullcontext() if message is None else pytest.raises(ConfigError, match=message)
    ):
        check_gpus(ExecutorConfig(gpus=asked))


@pytest.mark.parametrize(
    ("executor", "other_way"),
    [("inline", "device='cuda:1'"), ("ray", "gres='gpu:1'"), ("slurm", "gres='gpu:1'")],
)
def test_executors_that_do_not_choose_gpus_refuse_them(
    executor: str, other_way: str
) -> None:
    assert ExecutorConfig(executor=executor, gpus="none").gpu_ids == ()
    with pytest.raises(ConfigError, match=f"left out with .*{executor}.*{other_way}"):
        ExecutorConfig(executor=executor, gpus="1")


def test_a_run_takes_all_gpus_where_nothing_else_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    plain = RunConfig()
    assert with_all_gpus(plain).executor.gpus == "all"
    for changes in (
        {"workers": 2},
        {"executor": "inline"},
        {"gpus": "none"},
        {"scheduler": "tcp://a:1"},
        {"device": "cpu"},
        {"device": "cuda:1"},
        {"until": "tiles"},
    ):
        config = replace_flat(plain, changes)
        assert with_all_gpus(config) == config
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert with_all_gpus(plain) == plain


def test_chunks_with_most_work_come_first_and_keep_all_workers_busy_to_the_end() -> (
    None
):
    rng = np.random.default_rng(0)
    work = rng.lognormal(0, 1.2, 700).tolist()
    entries = list(range(700))
    chunks = weighted_chunks(entries, work, 8)
    flat = [entry for chunk in chunks for entry in chunk]
    assert sorted(flat) == entries
    assert [work[entry] for entry in flat] == sorted(work, reverse=True)
    assert max(map(len, chunks)) <= 16

    def seconds(chunks: list[tuple[int, ...]]) -> float:
        """Time at which the last of eight workers ends, each taking the next chunk."""
        ends = [0.0] * 8
        for chunk in chunks:
            first = ends.index(min(ends))
            ends[first] += sum(work[entry] for entry in chunk)
        return max(ends)

    least = max(sum(work) / 8, *work)
    assert seconds(chunks) < 1.01 * least
    # the same slides in the order of their names, in chunks of equal length
    assert seconds(make_chunks(entries, ExecutorConfig(), workers=8)) > 1.05 * least
    assert weighted_chunks([], [], 4) == []


def test_gpus_are_split_at_commas() -> None:
    assert ExecutorConfig(gpus="0, 1,GPU-a").gpu_ids == ("0", "1", "GPU-a")
