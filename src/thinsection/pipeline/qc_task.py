"""Quality control of some slides in one process, as a value that travels to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import threadpoolctl

from thinsection.jobs.executor import ChunkReport
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
class QcTask:
    """See `ArrayTask`: slides one after the other.

    Attributes:
        out: output folder, absolute, on a file system that every worker sees.
        pipeline: plain values, as `Pipeline.as_mapping` gives them.
        device, reader, resume, cache_dir: of `QcSettings`; a worker that finds no pixel models in
            `cache_dir` trains them there.
        threads: of matrix products; 0 leaves them.
    """

    kind: ClassVar[str] = "qc"
    entry_type: ClassVar[type] = SlideEntry
    result_type: ClassVar[type] = QcReport

    out: Path
    pipeline: dict[str, Any]
    device: str
    reader: str
    resume: bool
    cache_dir: Path
    threads: int = 0

    def __call__(
        self, entries: Sequence[SlideEntry], *, on_event: Callable[[Any], None]
    ) -> ChunkReport[QcReport]:
        """See `ChunkTask.__call__`."""
        settings = self.settings()
        with threadpoolctl.threadpool_limits(self.threads or None):
            reports = [qc_slide(entry, self.out, settings) for entry in entries]
        return ChunkReport(results=tuple(reports))

    def settings(self) -> QcSettings:
        """The settings, in this process."""
        return QcSettings(
            pipeline=pipeline_from_mapping(self.pipeline),
            device=self.device,
            reader=self.reader,
            resume=self.resume,
            cache_dir=self.cache_dir,
        )

    def on_worker(self, *, threads: int, monitored: bool) -> "QcTask":
        """See `ChunkTask.on_worker`; quality control is not monitored."""
        return replace(self, threads=threads)

    def smaller(self) -> "QcTask":
        """The same: the checks' memory does not grow with the slide."""
        return self

    def lost(self, entry: SlideEntry, reason: str) -> QcReport:
        """See `ChunkTask.lost`; a slide that was finished all the same stays done."""
        done = finished_report(entry, self.out, self.settings())
        return done or lost_report(entry, self.out, reason)

    def skipped(self, entry: SlideEntry) -> tuple[QcReport, ...]:
        """See `ArrayTask.skipped`: done with the same file and pipeline."""
        done = finished_report(entry, self.out, self.settings())
        return () if done is None else (done,)


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
