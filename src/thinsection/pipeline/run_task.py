"""The task of a run: a chunk of slides through one process, as a value that travels to it."""

import functools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from thinsection.errors import ClusterError
from thinsection.files.atomic import TMP_MARK
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import Report, Task
from thinsection.pipeline.results import SlideResult, read_result, record_failure
from thinsection.pipeline.slides import (
    GPU_BATCH,
    SCRATCH_LIMIT,
    Models,
    RunEvent,
    load_models,
    process_slides,
)
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import AggregateConfig, EncodeConfig, RunConfig
from thinsection.store.ledger import LEDGER_NAME
from thinsection.stream import StageClock, cpu_count
from thinsection.stream.budget import CHANNELS, MIN_SLOTS
from thinsection.tiles.grid import TilesConfig
from thinsection.units import parse_bytes
from thinsection.usage.monitor import ResourceMonitor

if TYPE_CHECKING:
    from thinsection.jobs.request import JobRequest

LOST_STAGE = "worker"


@dataclass(frozen=True, kw_only=True)
class RunTask(Task[SlideEntry, SlideResult]):
    """See `Task`.

    Attributes:
        out: output folder, absolute, on a file system that every worker sees.
        config: of the run.
        stage: the last stage.
        threads: of the encoder; 0 leaves the library's own choice. On a CPU the last bit of an
            embedding may depend on it: the same number gives the same bytes everywhere.
        monitored: record this process under out/usage; for workers that are no descendants of a
            monitored process.
        kept: earlier jobs in `out` had the same settings: what is done there need not be sent.
        started: when the run began, by the clock of the file system (`filesystem_now`). A slide
            that a worker finished since and could not report, because it died, was done, not
            skipped.
    """

    kind: ClassVar[str] = "run"
    entry_type: ClassVar[type[Any]] = SlideEntry
    result_type: ClassVar[type[Any]] = SlideResult
    event_type: ClassVar[type[Any] | None] = RunEvent
    streams: ClassVar[bool] = True

    out: Path
    config: RunConfig
    stage: str
    threads: int = 0
    monitored: bool = False
    started: float = float("inf")
    kept: bool = False

    def __call__(
        self, entries: Sequence[SlideEntry], *, on_event: Callable[[RunEvent], None]
    ) -> Report[SlideResult]:
        """See `Task.__call__`."""
        started = time.perf_counter()
        set_threads(self.threads)
        models = self.models()
        clock = StageClock()
        if self.monitored:
            with ResourceMonitor(self.out, facts=self.facts(models), stage_seconds=clock.seconds):
                results = self._process(entries, models, clock, on_event)
        else:
            results = self._process(entries, models, clock, on_event)
        return Report(
            results=tuple(results),
            stage_seconds=clock.seconds(),
            worker=f"{socket.gethostname()}:{os.getpid()}",
            seconds=time.perf_counter() - started,
            facts=models.identities,
        )

    def models(self) -> Models:
        """The encoders, loaded once per process and settings."""
        return _models(self.config.encode, self.config.aggregate, self.config.tiles, self.stage)

    def facts(self, models: Models) -> dict[str, Any]:
        """Settings that explain a resource record."""
        encoder = models.encoder
        return {
            "device": str(encoder.device) if encoder else "cpu",
            "precision": str(encoder.precision) if encoder else None,
            "reader": self.config.slides.reader,
            "decode_workers": self.config.stream.decode_workers or cpu_count(),
        }

    def with_threads(self, threads: int) -> Self:
        """The task in a worker that has so many CPUs; 0 leaves everything as it is."""
        stream = self.config.stream
        stream = replace(stream, decode_workers=stream.decode_workers or threads)
        return replace(self, threads=threads, config=replace(self.config, stream=stream))

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`."""
        return replace(self.with_threads(threads), monitored=monitored)

    def smaller(self) -> Self:
        """Half the stream's memory, or what three batches need; one decoding thread.

        Batches keep their size: what a batch holds may show in the last bit of its embeddings.
        """
        stream = self.config.stream
        batch = self.config.encode.batch_size or GPU_BATCH
        least = MIN_SLOTS * batch * self.config.tiles.tile_px**2 * CHANNELS + SCRATCH_LIMIT
        given = parse_bytes(stream.memory)
        memory = min(given, max(least, given // 2))
        stream = replace(stream, memory=str(memory), decode_workers=1, prefetch_slides=1)
        return replace(self, config=replace(self.config, stream=stream))

    def lost(self, entry: SlideEntry, reason: str) -> SlideResult:
        """Records a slide that no worker survives; one that is done all the same stays done."""
        return self.done(entry) or record_failure(self.out, entry, LOST_STAGE, ClusterError(reason))

    def done(self, entry: SlideEntry) -> SlideResult | None:
        """The result of a slide that is done; None where it is missing or failed."""
        found = read_result(self.out, entry, self.stage)
        return found if found is not None and found.status == "done" else None

    def finished(self, entry: SlideEntry) -> SlideResult | None:
        """See `Task.finished`: finished by this run, or by a job of the same settings.

        Whether a slide is done to the letter is decided by the worker, which has the models.
        """
        done = self.done(entry)
        if done is None:
            return None
        truly = self._truly(replace(done, status="skipped"))
        return truly if self.kept or truly.status == "done" else None

    def ended(self, result: SlideResult) -> RunEvent:
        """See `Task.ended`."""
        return RunEvent(kind="ended", slide_id=result.slide_id, result=result)

    def request(
        self, chunks: Sequence[Sequence[SlideEntry]], config: ExecutorConfig
    ) -> "JobRequest":
        """See `Task.request`: what the plan predicts."""
        from thinsection.plan.request import run_request

        planned = replace(self.config, executor=config)
        return run_request(chunks, planned, stage=self.stage)

    def _process(
        self,
        entries: Sequence[SlideEntry],
        models: Models,
        clock: StageClock,
        on_event: Callable[[RunEvent], None],
    ) -> list[SlideResult]:
        results = process_slides(
            entries,
            out=self.out,
            config=self.config,
            stage=self.stage,
            models=models,
            clock=clock,
            on_event=on_event,
        )
        return [self._truly(result) for result in results]

    def _truly(self, result: SlideResult) -> SlideResult:
        """A slide that a dead worker of this very run finished was done, not skipped."""
        if result.status != "skipped":
            return result
        written = (self.out / result.slide_id / LEDGER_NAME).stat().st_mtime
        return replace(result, status="done") if written >= self.started else result


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


def filesystem_now(folder: Path) -> float:
    """The time by the clock that stamps files in a folder: a file server's may differ from ours."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".now{TMP_MARK}") as file:
        return os.fstat(file.fileno()).st_mtime


def set_threads(threads: int) -> None:
    """Sets the threads of torch's operators in this process; 0 leaves them."""
    if threads:
        import torch

        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=1)
def _models(
    encode: EncodeConfig, aggregate: AggregateConfig, tiles: TilesConfig, stage: str
) -> Models:
    return load_models(RunConfig(encode=encode, aggregate=aggregate, tiles=tiles), stage)
