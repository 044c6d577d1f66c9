"""From the settings to an executor, and a run's work through it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinsection.errors import InvalidInputError
from thinsection.jobs.executor import (
    ChunkReport,
    Executor,
    ExecutorConfig,
    InlineExecutor,
)
from thinsection.pipeline.results import SlideResult
from thinsection.pipeline.run_task import RunTask, filesystem_now
from thinsection.pipeline.slides import RunEvent
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stream import StageClock
from thinsection.usage.monitor import ResourceMonitor


@dataclass(kw_only=True)
class Work:
    """What came of a run's slides.

    Attributes:
        results: by slide id.
        clock: busy and waiting seconds, over all workers.
        identities: of the models that did it.
    """

    results: dict[str, SlideResult] = field(default_factory=dict)
    clock: StageClock = field(default_factory=StageClock)
    identities: dict[str, Any] = field(default_factory=dict)

    def take(self, report: ChunkReport[SlideResult]) -> None:
        """Adds the report of a chunk."""
        self.results |= {result.slide_id: result for result in report.results}
        for name, seconds in report.stage_seconds.items():
            self.clock.add(name, seconds)
        self.identities |= report.facts


def make_task(out: Path, config: RunConfig, stage: str) -> RunTask:
    """The task of a run that begins now."""
    folder = out.resolve()
    return RunTask(
        out=folder,
        config=config,
        stage=stage,
        threads=config.executor.threads,
        started=filesystem_now(folder),
    )


def execute(
    entries: Sequence[SlideEntry],
    task: RunTask,
    *,
    on_event: Callable[[RunEvent], None],
    on_message: Callable[[str], None],
) -> Work:
    """Runs the slides through the executor of the task's settings, monitored.

    Raises:
        ThinsectionError: settings, weights or the cluster; a bad slide does not raise.
    """
    config = task.config.executor
    work = Work()
    if config.executor == "inline":
        facts = task.facts(task.models())  # errors of settings and weights come before any work
    else:
        check_encoder_name(task.config.encode.encoder)
        facts = {}
    executor, chunks = _make(entries, config, task.out, on_message)
    with ResourceMonitor(task.out, facts=facts, stage_seconds=work.clock.seconds):
        executor.execute(chunks, task, on_report=work.take, on_event=on_event)
    return work


def check_encoder_name(name: str) -> None:
    """Refuses an unknown encoder where the driver does not load it.

    Raises:
        UnknownEncoderError: no such name.
    """
    from thinsection.encode.load import find_spec
    from thinsection.encode.registry import plugin_encoders

    if name not in plugin_encoders():
        find_spec(name)


def _make(
    entries: Sequence[SlideEntry],
    config: ExecutorConfig,
    out: Path,
    on_message: Callable[[str], None],
) -> tuple[Executor[RunTask], list[tuple[SlideEntry, ...]]]:
    """The executor, and the slides as its tasks take them."""
    if config.executor == "inline":  # the stream goes through all slides without a pause
        return InlineExecutor(), [tuple(entries)]
    if config.executor == "dask":
        from thinsection.jobs.dask_executor import dask_work

        return dask_work(entries, config, out=out, on_message=on_message)
    if config.executor == "slurm":
        from thinsection.jobs.slurm_executor import SlurmExecutor
        from thinsection.jobs.slurm_request import array_chunks

        return SlurmExecutor(config, on_message=on_message), array_chunks(entries, config)
    raise InvalidInputError(f"executor must be inline, dask or slurm, got {config.executor!r}")
