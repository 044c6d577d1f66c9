"""The executor's settings and chunks, and the inline executor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.errors import ConfigError
from thinsection.jobs.chunks import chunk_size, chunked
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import Report, Task


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


def test_gpus_are_split_at_commas() -> None:
    assert ExecutorConfig(gpus="0, 1,GPU-a").gpu_ids == ("0", "1", "GPU-a")
