"""Quality control of some slides in one process, as a value that travels to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import threadpoolctl

from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.request import JobRequest
from thinsection.jobs.task import Report, Task
from thinsection.pipeline.qc_batch import (
    QcReport,
    QcSettings,
    finished_report,
    lost_report,
    qc_slide,
)
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.slide.cohort import SlideEntry


@dataclass(frozen=True, kw_only=True)
class QcTask(Task[SlideEntry, QcReport]):
    """See `Task`: slides one after the other.

    Attributes:
        out: output folder, absolute, on a file system that every worker sees.
        pipeline: plain values, as `Pipeline.as_mapping` gives them.
        device, reader, resume, cache_dir: of `QcSettings`; a worker that finds no pixel models in
            `cache_dir` trains them there.
        threads: of matrix products; 0 leaves them.
    """

    kind: ClassVar[str] = "qc"
    entry_type: ClassVar[type[Any]] = SlideEntry
    result_type: ClassVar[type[Any]] = QcReport

    out: Path
    pipeline: dict[str, Any]
    device: str
    reader: str
    resume: bool
    cache_dir: Path
    threads: int = 0

    def __call__(
        self, entries: Sequence[SlideEntry], *, on_event: Callable[[Any], None]
    ) -> Report[QcReport]:
        """See `Task.__call__`."""
        settings = self.settings()
        with threadpoolctl.threadpool_limits(self.threads or None):
            reports = [qc_slide(entry, self.out, settings) for entry in entries]
        return Report(results=tuple(reports))

    def settings(self) -> QcSettings:
        """The settings, in this process."""
        return QcSettings(
            pipeline=pipeline_from_mapping(self.pipeline),
            device=self.device,
            reader=self.reader,
            resume=self.resume,
            cache_dir=self.cache_dir,
        )

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`; quality control is not monitored."""
        return replace(self, threads=threads)

    def lost(self, entry: SlideEntry, reason: str) -> QcReport:
        """See `Task.lost`; a slide that was finished all the same stays done."""
        done = finished_report(entry, self.out, self.settings())
        return done or lost_report(entry, self.out, reason)

    def finished(self, entry: SlideEntry) -> QcReport | None:
        """See `Task.finished`: done with the same file and pipeline."""
        return finished_report(entry, self.out, self.settings())

    def request(self, chunks: Sequence[Sequence[SlideEntry]], config: ExecutorConfig) -> JobRequest:
        """See `Task.request`: bounds by the largest slide."""
        from thinsection.pipeline.qc_request import qc_request  # planning knows encoders: torch

        return qc_request(chunks, self.settings(), config)


def make_qc_task(out: Path, settings: QcSettings, *, threads: int) -> QcTask:
    """The task of these settings."""
    return QcTask(
        out=out.absolute(),
        pipeline=settings.pipeline.as_mapping(),
        device=settings.device,
        reader=settings.reader,
        resume=settings.resume,
        cache_dir=settings.cache_dir.absolute(),
        threads=threads,
    )
