"""The task of a run: a chunk of slides through one process, as a value that travels to it."""

import contextlib
import functools
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from thinsection.config import from_mapping
from thinsection.errors import ClusterError
from thinsection.files.atomic import TMP_MARK, writing
from thinsection.files.json_text import parse_json
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import Report, Task
from thinsection.machine import cpu_count
from thinsection.pipeline.events import RunEvent
from thinsection.pipeline.models import (
    LoadedModels,
    file_stamps,
    load_models,
    models_document,
)
from thinsection.pipeline.prepare import skipped_result
from thinsection.pipeline.process import SlideJob
from thinsection.pipeline.results import LOST_STAGE, SlideResult, record_failure
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import GPU_BATCH
from thinsection.stages.spec import RunSpec
from thinsection.store.ledger import SlideLedger, load_ledger
from thinsection.stream import StageClock
from thinsection.stream.budget import CHANNELS, MAX_SCRATCH, MIN_SLOTS
from thinsection.types import parse_bytes
from thinsection.usage.monitor import resource_monitor

if TYPE_CHECKING:
    from thinsection.jobs.request import JobRequest

ENDS = ("done", "skipped", "empty")  # of a slide that need not be looked at again
_ENDED = "ended"  # folder of a record: a line of JSON per slide that a process finished


@dataclass(frozen=True, kw_only=True)
class RunTask(Task[SlideEntry, SlideResult]):
    """See `Task`: slides up to a goal, of `run` and of each of its stages, `qc` too."""

    kind: ClassVar[str] = "run"
    entry_type: ClassVar[type[Any]] = SlideEntry
    result_type: ClassVar[type[Any]] = SlideResult
    event_type: ClassVar[type[Any] | None] = RunEvent
    streams: ClassVar[bool] = True

    out: Path  # results folder, absolute, on a file system that every worker sees
    record: Path  # folder of this invocation below it
    spec: RunSpec
    monitored: bool = False  # record what this process uses: none above it does
    # when the run began, by `filesystem_now`: a slide that a worker finished since and could not
    # report, because it died, was done, not skipped
    started: float = float("inf")
    # records of earlier invocations with the same settings: what they finished and nobody touched
    # since need not be sent to a batch system
    kept: tuple[Path, ...] = ()

    def __call__(
        self, entries: Sequence[SlideEntry], *, on_event: Callable[[RunEvent], None]
    ) -> Report[SlideResult]:
        """See `Task.__call__`; each slide is noted in the record as it ends."""
        encoding = self.spec.encoding
        set_threads(self.threads, torch_too=bool(encoding.encoders))
        models = self.models()
        clock = StageClock()
        path = self.record / _ENDED / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        with contextlib.ExitStack() as stack:
            stack.enter_context(writing(path.parent))
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.monitored:
                monitor = resource_monitor(
                    self.record,
                    facts=self.facts(models),
                    stage_seconds=clock.seconds,
                )
                stack.enter_context(monitor)
            log = stack.enter_context(path.open("ab", buffering=0))

            def note_end(event: RunEvent) -> None:
                if event.result is not None and event.result.status in ENDS:
                    result = self._done_in_this_run(event.result)
                    line = json.dumps(asdict(result)) + "\n"
                    with writing(path):
                        log.write(line.encode())
                on_event(event)

            job = SlideJob(
                out=self.out,
                spec=self.spec,
                models=models,
                clock=clock,
                on_event=note_end,
            )
            results = tuple(map(self._done_in_this_run, job.process(entries)))
        return Report(
            results=results,
            stage_seconds=clock.seconds(),
            facts=models_document(models.identities, encoding),
        )

    def models(self) -> LoadedModels:
        """The encoders, loaded once per process, settings and files that these name."""
        encoding = self.spec.encoding
        files = [name for name in encoding.named_files if Path(name).is_file()]
        return load_models(encoding, file_stamps(files))

    def facts(self, models: LoadedModels) -> dict[str, Any]:
        """Settings that explain a resource record."""
        facts: dict[str, Any] = {"device": "cpu", "precision": None, "engine": None}
        if models.encoders:
            first = models.encoders[0]
            facts["device"] = str(first.device)
            facts["precision"] = str(first.precision)
            facts["engine"] = first.engine
        facts["reader"] = self.spec.slides.reader
        facts["decode_workers"] = self.spec.stream.decode_workers or cpu_count()
        return facts

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`; 0 threads leave everything as it is."""
        spec = self.spec.with_stream(
            decode_workers=self.spec.stream.decode_workers or threads
        )
        return replace(self, spec=spec, threads=threads, monitored=monitored)

    def smaller(self) -> Self:
        """Half the stream's memory, or what three batches need; one decoding thread.

        Batches keep their size: what a batch holds may show in the last bit of its embeddings.
        """
        batch_size = self.spec.encoding.batch_size or GPU_BATCH
        batch_bytes = batch_size * self.spec.tiles.tile_px**2 * CHANNELS
        least = MIN_SLOTS * batch_bytes + MAX_SCRATCH
        memory = parse_bytes(self.spec.stream.memory)
        smaller_memory = min(memory, max(least, memory // 2))
        spec = self.spec.with_stream(
            memory=str(smaller_memory), decode_workers=1, prefetch_slides=1
        )
        return replace(self, spec=spec)

    def lost(self, entry: SlideEntry, reason: str) -> SlideResult:
        """Records a slide that no worker survives; what this run finished stays done."""
        done = ended_slides(self.record).get(entry.slide_id)
        return done or record_failure(self.out, entry, LOST_STAGE, ClusterError(reason))

    def name(self, entry: SlideEntry) -> str:
        """See `Task.name`."""
        return entry.slide_id

    def finished(self, entry: SlideEntry) -> SlideResult | None:
        """See `Task.finished`: by this invocation; without encoders by any one; else by `kept`.

        Whether embeddings are done to the letter is decided by the worker, which has the weights.
        """
        done = ended_slides(self.record).get(entry.slide_id)
        if done is not None:
            return done
        if not self.spec.encoding.encoders:
            return skipped_result(entry, out=self.out, spec=self.spec)
        if self.spec.slides.fingerprint == "full":
            return None
        for record in self.kept:
            result = ended_slides(record).get(entry.slide_id)
            if result is not None and self._untouched(entry, record):
                if result.status == "done":
                    return replace(result, status="skipped")
                return result
        return None

    def _untouched(self, entry: SlideEntry, record: Path) -> bool:
        """True for a slide older than the record's last word, whose files are all there."""
        path = Path(entry.slide_path)
        last = max(log.stat().st_mtime for log in (record / _ENDED).glob("*.jsonl"))
        if not path.is_file() or path.stat().st_mtime > last:
            return False
        ledger = load_ledger(self.out, entry.slide_id)
        return all(ledger.complete(stage) for stage in ledger.stages.values())

    def ended(self, result: SlideResult) -> RunEvent:
        """See `Task.ended`."""
        return RunEvent(kind="ended", slide_id=result.slide_id, result=result)

    def request(
        self, chunks: Sequence[Sequence[SlideEntry]], config: ExecutorConfig
    ) -> "JobRequest":
        """See `Task.request`: what the plan predicts."""
        from thinsection.planning.job import run_request

        return run_request(chunks, replace(self.spec, executor=config))

    def _done_in_this_run(self, result: SlideResult) -> SlideResult:
        """A slide that a dead worker of this very run finished was done, not skipped."""
        if result.status != "skipped":
            return result
        ledger = SlideLedger(out=self.out, slide_id=result.slide_id)
        if ledger.path.stat().st_mtime >= self.started:
            return replace(result, status="done")
        return result


def ended_slides(record: Path) -> Mapping[str, SlideResult]:
    """The slides that an invocation finished or found done, from what its processes noted."""
    logs = sorted((record / _ENDED).glob("*.jsonl"))
    sizes = tuple((path, path.stat().st_size) for path in logs)
    return _read_ended_slides(sizes)


@functools.lru_cache(maxsize=4)
def _read_ended_slides(logs: tuple[tuple[Path, int], ...]) -> dict[str, SlideResult]:
    """Results by slide in logs of these sizes; a log that grew is another argument."""
    results = {}
    for path, _ in logs:
        for line in path.read_text(encoding="utf-8").splitlines():
            # but for the torn last line of a killed process
            with contextlib.suppress(ValueError):
                result = from_mapping(SlideResult, parse_json(line))
                results[result.slide_id] = result
    return results


def filesystem_now(folder: Path) -> float:
    """The time by the clock that stamps files in a folder: a file server's may differ from ours."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".now{TMP_MARK}") as file:
        return os.fstat(file.fileno()).st_mtime


def set_threads(threads: int, *, torch_too: bool) -> None:
    """Sets the threads of matrix products, and of torch's operators.

    0 leaves the libraries' choice, but for a choice of more than the CPUs that this process may
    use: libraries do not see the quota of a cgroup.
    """
    import threadpoolctl

    most = threads or cpu_count()
    pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
    if threads or max(pools, default=1) > most:
        threadpoolctl.threadpool_limits(most)
    if torch_too:
        import torch

        if threads or torch.get_num_threads() > most:
            torch.set_num_threads(most)
