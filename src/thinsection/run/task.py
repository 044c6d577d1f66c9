"""Task of a run: a chunk of slides for one process, as a value that can be sent there."""

import contextlib
import functools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from thinsection.config import from_mapping
from thinsection.errors import ClusterError
from thinsection.files.atomic import TMP_MARK, output_errors, parse_json, write_text
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import Report, Task
from thinsection.machine import cpu_count, visible_gpus
from thinsection.run.calibration import refute_rate
from thinsection.run.models import (
    file_stamps,
    load_models,
    models_document,
    models_with,
    need_torch,
)
from thinsection.run.prepare import finished_work
from thinsection.run.process import RunEvent, SlideProcessor
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import GPU_BATCH, RunConfig
from thinsection.stages.spec import Models, stages_of
from thinsection.store.ledger import SlideLedger, load_ledger
from thinsection.store.outcome import LOST_STAGE, SlideResult, record_failure
from thinsection.tiles import StepTimer
from thinsection.tiles.budget import CHANNELS, MAX_SCRATCH, MIN_SLOTS
from thinsection.types import PlainValues, parse_bytes
from thinsection.usage.monitor import read_usage, resource_monitor

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.run.job import Measured
    from thinsection.usage.analysis import Request

ENDS = ("done", "skipped", "empty")  # a slide with one of these needs no further work
# folder in a record, with one line of JSON per slide that a process finished
_ENDED = "ended"
_TINY_S = 1e-3
# a slide for a rough count of its tiles: bytes per pixel of tissue, and µm per pixel of level 0
_BYTES_PER_PIXEL = 0.2
_SLIDE_MPP = 0.25


@dataclass(frozen=True, kw_only=True)
class RunTask(Task[SlideEntry, SlideResult]):
    """See `Task`: slides up to the last result of a run, for `run`, `segment` and `qc`."""

    kind: ClassVar[str] = "run"
    entry_type: ClassVar[type] = SlideEntry
    result_type: ClassVar[type] = SlideResult
    event_type: ClassVar[type | None] = RunEvent
    streams: ClassVar[bool] = True

    out: Path  # results folder, absolute, on a file system that every worker sees
    record: Path  # folder of this invocation inside `out`
    spec: RunConfig
    # True records the resource use of this process, because no parent process does
    monitored: bool = False
    # Start of the run, by `filesystem_now`. If a worker finished a slide after that and died before
    # reporting it, the slide counts as done, not as skipped.
    started: float = float("inf")
    # Records of earlier invocations with the same settings. Slides that they finished and that have
    # not changed since are not sent to a batch system.
    kept: tuple[Path, ...] = ()
    # tiles of one of the run's processes, about; None if nobody knows. By it `auto` compiles.
    num_tiles: int | None = None

    def __call__(
        self, entries: Sequence[SlideEntry], *, on_event: Callable[[RunEvent], None]
    ) -> Report[SlideResult]:
        """See `Task.__call__`; the end of each slide is written to the record."""
        encoding = self.spec.encoding
        set_threads(self.threads, torch_too=self.needs_torch())
        models = self.models()
        clock = StepTimer()
        path = self.record / _ENDED / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        with contextlib.ExitStack() as stack:
            stack.enter_context(output_errors(path.parent))
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.monitored:
                monitor = resource_monitor(
                    self.record,
                    facts=self.facts(models),
                    stage_seconds=clock.seconds,
                )
                stack.enter_context(monitor)
            log = stack.enter_context(path.open("ab", buffering=0))

            num_encoded = 0

            def note_end(event: RunEvent) -> None:
                nonlocal num_encoded
                if event.kind == "tiles":
                    num_encoded += event.num_tiles
                if event.result is not None and event.result.status in ENDS:
                    result = self._done_in_this_run(event.result)
                    line = json.dumps(asdict(result)) + "\n"
                    with output_errors(path):
                        log.write(line.encode())
                on_event(event)

            job = SlideProcessor(
                out=self.out,
                spec=self.spec,
                models=models,
                stages=stages_of(self.spec, models),
                clock=clock,
                on_event=note_end,
            )
            begun_s = time.process_time()
            results = tuple(map(self._done_in_this_run, job.process(entries)))
            spent_s = time.process_time() - begun_s
        self._compare_rate(models, num_encoded / max(spent_s, _TINY_S))
        return Report(
            results=results,
            stage_seconds=clock.seconds(),
            facts=models_document(models, encoding),
        )

    def _compare_rate(self, models: Models, tiles_per_s: float) -> None:
        """Lets a plan measure an encoder again whose stored rate this process has exceeded."""
        loaded = models.loaded_encoders
        if len(loaded) != 1 or str(loaded[0].device) != "cpu":
            return
        # a cache that is not writable is no reason to fail
        with contextlib.suppress(OSError):
            refute_rate(
                self.spec.encoding.encoders[0],
                precision=str(loaded[0].precision),
                tile_px=self.spec.tiles.tile_px,
                # the engine may be followed by why it is not another
                engine=loaded[0].engine.partition(" (")[0],
                tiles_per_s=tiles_per_s,
            )

    def needs_torch(self) -> bool:
        """True if an encoder does not compute by NumPy alone."""
        encoding = self.spec.encoding
        return need_torch(encoding.encoders, encoding.slide_encoders)

    def models(self) -> Models:
        """Encoders, loaded once per process, settings and files named there."""
        encoding = self.spec.encoding
        files = [name for name in encoding.named_files if Path(name).is_file()]
        return load_models(encoding, file_stamps(files), self.num_tiles)

    def facts(self, models: Models) -> PlainValues:
        """Settings that explain a resource record."""
        facts: dict[str, object] = {"device": "cpu", "precision": None, "engine": None}
        if models.loaded_encoders:
            first = models.loaded_encoders[0]
            facts["device"] = str(first.device)
            facts["precision"] = str(first.precision)
            facts["engine"] = first.engine
        facts["reader"] = self.spec.slides.reader
        facts["decode_threads"] = self.spec.stream.decode_threads or cpu_count()
        return facts

    def with_expected_tiles(self, entries: Sequence[SlideEntry]) -> Self:
        """Same task, which knows about how many tiles each process of the run has to encode.

        The bytes of the files predict them, as in `work`; URLs have none. The number is a power of
        two, so that runs of about the same size share their loaded models. Only `auto` on a GPU
        asks for it.
        """
        total_bytes = sum(map(self.work, entries))
        is_asked = self.spec.encoding.engine == "auto" and visible_gpus()
        if not is_asked or total_bytes <= len(entries):
            return self
        pixels = total_bytes / _BYTES_PER_PIXEL
        num_tiles = 0.0
        for grid in self.spec.tiles.grids:
            edge = grid.tile_px * (grid.mpp or _SLIDE_MPP) / _SLIDE_MPP
            num_tiles += pixels / edge**2
        executor = self.spec.executor
        processes = max(1, executor.workers, len(executor.gpu_ids))
        tiles_each = max(1, int(num_tiles / processes))
        return replace(self, num_tiles=1 << (tiles_each.bit_length() - 1))

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`; 0 threads change nothing."""
        stream = self.spec.stream
        stream = replace(stream, decode_threads=stream.decode_threads or threads)
        spec = replace(self.spec, stream=stream)
        return replace(self, spec=spec, threads=threads, monitored=monitored)

    def smaller(self) -> Self:
        """Same task with half the stream's memory, but at least three batches; one decoding thread.

        The batch size stays, since it may change the last bit of the embeddings.
        """
        batch_size = self.spec.encoding.batch_size or GPU_BATCH
        batch_bytes = batch_size * self.spec.tiles.tile_px**2 * CHANNELS
        least = MIN_SLOTS * batch_bytes + MAX_SCRATCH
        memory = parse_bytes(self.spec.stream.memory)
        smaller_memory = min(memory, max(least, memory // 2))
        stream = replace(
            self.spec.stream,
            memory=str(smaller_memory),
            decode_threads=1,
            prefetch_slides=1,
        )
        return replace(self, spec=replace(self.spec, stream=stream))

    def lost(self, entry: SlideEntry, reason: str) -> SlideResult:
        """Records a slide that ends every worker; if this run finished it, it stays done."""
        done = ended_slides(self.record).get(entry.slide_id)
        return done or record_failure(self.out, entry, LOST_STAGE, ClusterError(reason))

    def work(self, entry: SlideEntry) -> float:
        """See `Task.work`: the bytes of a local file; areas without tissue need few bytes.

        The bytes predict the number of tiles, and no thumbnail is read, which would take a second.
        """
        try:
            return float(max(1, Path(entry.slide_path).stat().st_size))
        except OSError:  # a URL, or a file that is missing
            return 1.0

    def name(self, entry: SlideEntry) -> str:
        """See `Task.name`."""
        return entry.slide_id

    def finished(self, entry: SlideEntry) -> SlideResult | None:
        """See `Task.finished`.

        The result comes from this invocation. Without encoders, any invocation counts; with
        encoders, only those in `kept`.

        Only a worker, which has the weights, can decide exactly whether embeddings are done.
        """
        done = ended_slides(self.record).get(entry.slide_id)
        if done is not None:
            return done
        if not self.spec.encoding.encoders:
            stages = stages_of(self.spec)
            work = finished_work(entry, stages, out=self.out, spec=self.spec)
            if work is None:
                return None
            return SlideResult.of(entry, "skipped", work.facts())
        if self.spec.slides.fingerprint == "full":
            return None
        path = Path(entry.slide_path)
        for record in self.kept:
            result = ended_slides(record).get(entry.slide_id)
            if result is None or not path.is_file():
                continue
            last = max(log.stat().st_mtime for log in (record / _ENDED).glob("*.jsonl"))
            ledger = load_ledger(self.out, entry.slide_id)
            is_whole = all(map(ledger.complete, ledger.stages.values()))
            if path.stat().st_mtime <= last and is_whole:
                status = "skipped" if result.status == "done" else result.status
                return replace(result, status=status)
        return None

    def end_event(self, result: SlideResult) -> RunEvent:
        """See `Task.end_event`."""
        return RunEvent(kind="ended", slide_id=result.slide_id, result=result)

    def request(
        self, chunks: Sequence[Sequence[SlideEntry]], config: ExecutorConfig
    ) -> "Request":
        """See `Task.request`: resources that the plan predicts, or that earlier jobs used."""
        from thinsection.run.job import run_request

        spec = replace(self.spec, executor=config)
        return run_request(chunks, spec, self._measured())

    def _measured(self) -> "Measured | None":
        """Largest use in earlier invocations with the same settings; None if there is none."""
        from thinsection.run.job import Measured

        peaks: list[int] = []
        seconds: list[float] = []
        for record in self.kept:
            for usage in read_usage(record):
                if usage.samples and not usage.idle:
                    peaks.append(usage.peak_bytes)
            for result in ended_slides(record).values():
                if result.seconds > 0:
                    seconds.append(result.seconds)
        if not peaks or not seconds:
            return None
        return Measured(
            peak_bytes=max(peaks), slide_s=max(seconds), num_slides=len(seconds)
        )

    def _done_in_this_run(self, result: SlideResult) -> SlideResult:
        """Changes 'skipped' to 'done' for a slide that a dead worker of this run finished."""
        if result.status != "skipped":
            return result
        ledger = SlideLedger(out=self.out, slide_id=result.slide_id)
        if ledger.path.stat().st_mtime >= self.started:
            return replace(result, status="done")
        return result


@dataclass(frozen=True, kw_only=True)
class OwnEncoderTask(RunTask):
    """A run with an encoder of this process, which no other process can load."""

    encoder: "TileEncoder"

    def needs_torch(self) -> bool:
        from thinsection.encode.base import NUMPY

        encoding = self.spec.encoding
        if not encoding.encoders:
            return False
        by_torch = self.encoder.device is not NUMPY
        return by_torch or need_torch((), encoding.slide_encoders)

    def models(self) -> Models:
        if not self.spec.encoding.encoders:
            return Models()
        return models_with([self.encoder], self.spec.encoding)


def ended_slides(record: Path) -> Mapping[str, SlideResult]:
    """Slides that an invocation finished or found done, from the notes of its processes."""
    logs = sorted((record / _ENDED).glob("*.jsonl"))
    sizes = tuple((path, path.stat().st_size) for path in logs)
    return _read_ended_slides(sizes)


def write_ended(record: Path, results: Sequence[SlideResult]) -> None:
    """Writes the notes on slides that this process brings from elsewhere; see `ended_slides`."""
    lines = [json.dumps(asdict(result)) + "\n" for result in results]
    name = f"{socket.gethostname()}-{os.getpid()}.jsonl"
    write_text(record / _ENDED / name, "".join(lines))


@functools.lru_cache(maxsize=4)
def _read_ended_slides(logs: tuple[tuple[Path, int], ...]) -> dict[str, SlideResult]:
    """Results by slide from logs; their sizes are arguments so that a longer log is read again."""
    results = {}
    for path, _ in logs:
        for line in path.read_bytes().splitlines():
            # skips the incomplete last line of a killed process, and damaged ones
            with contextlib.suppress(ValueError):
                result = from_mapping(SlideResult, parse_json(line))
                results[result.slide_id] = result
    return results


def filesystem_now(folder: Path) -> float:
    """Time from the clock that stamps files in a folder; a file server's clock may differ."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".now{TMP_MARK}") as file:
        return os.fstat(file.fileno()).st_mtime


def set_threads(threads: int, *, torch_too: bool) -> None:
    """Sets the threads for matrix products, and for torch's operators.

    0 keeps the libraries' choice, unless it exceeds the CPUs that this process may use, since
    libraries do not see the quota of a cgroup. Without `torch_too`, PyTorch is not imported; if
    tiles are resampled later, it takes the number from OMP_NUM_THREADS, which is set here.
    """
    import threadpoolctl

    most = threads or cpu_count()
    pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
    if threads or max(pools, default=1) > most:
        threadpoolctl.threadpool_limits(most)
    if torch_too or "torch" in sys.modules:
        import torch

        if threads or torch.get_num_threads() > most:
            torch.set_num_threads(most)
    elif threads or _openmp_threads() > most:
        os.environ["OMP_NUM_THREADS"] = str(most)


def _openmp_threads() -> int:
    """Threads that PyTorch would take: OMP_NUM_THREADS, else all CPUs of the machine."""
    # a list has a number for each level of nesting
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if outermost.isdecimal() and int(outermost) > 0:
        return int(outermost)
    return os.cpu_count() or 1
