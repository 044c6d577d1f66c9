"""A chunk of slides through one process: claim, prepare, stream, encode, write."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.errors import StoreError
from thinsection.files.lock import LOCK_NAME, FileLock, heartbeat
from thinsection.pipeline.models import Models, load_models, pipeline_of
from thinsection.pipeline.prepare import check_quality, prepare
from thinsection.pipeline.results import (
    SlideResult,
    clear_failure,
    read_failure,
    record_failure,
)
from thinsection.pipeline.sink import Fail, Finish, Kept, ResultSink
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import OutputConfig, RunConfig, batch_size_of, budget_of
from thinsection.stages.features import FeaturesStage, TokensStage
from thinsection.stages.request import Goal, stages_of
from thinsection.stages.stage import SlideWork, Stage, source_key
from thinsection.store.ledger import SLIDES, fingerprint, load_ledger
from thinsection.stream import (
    SlideFinished,
    SlideStarted,
    StageClock,
    TileBatch,
    TileStream,
)
from thinsection.tiles import load_filters

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.encode.embed import BatchEncoder, EmbeddedBatch, Wanted

_POLL_S = 1.0  # how often a slide that another process holds is looked at again


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Progress of a run; may be emitted from any thread.

    Attributes:
        kind: 'started' (num_tiles to come), 'tiles' (num_tiles done), 'ended' (result set),
            'waiting' (another process holds the slide).
        slide_id: the slide.
        num_tiles: see kind.
        result: of an ended slide.
    """

    kind: str
    slide_id: str
    num_tiles: int = 0
    result: SlideResult | None = None


OnEvent = Callable[[RunEvent], None]


def process_slides(
    entries: Sequence[SlideEntry],
    *,
    out: Path,
    config: RunConfig,
    goal: Goal = "aggregate",
    models: Models | None = None,
    clock: StageClock | None = None,
    on_event: OnEvent = lambda event: None,
) -> list[SlideResult]:
    """Takes slides up to a goal, streaming from one into the next; any number of processes may
    work on one results folder.

    Args:
        entries: the slides.
        out: results folder.
        config: all settings.
        goal: the last stage: 'tissue', 'qc', 'tile', 'embed' or 'aggregate'.
        models: loaded encoders; None loads them.
        clock: where busy and waiting time is added up.
        on_event: progress, from any thread.

    Returns:
        A result per slide, in the order of the entries. A bad slide is a failed result, never an
        exception.

    Memory: the stream's budget, the encoders, and one slide's embeddings while it is pooled.
    """
    job = _Job(
        out=out,
        config=config,
        goal=goal,
        models=models or load_models(config, goal),
        clock=clock or StageClock(),
        on_event=on_event,
    )
    with heartbeat(job.locks):
        waiting = list(entries)
        while waiting:
            job.held_elsewhere = []
            job.process(waiting)
            waiting = job.held_elsewhere
            if waiting:
                for entry in waiting:
                    on_event(RunEvent(kind="waiting", slide_id=entry.slide_id))
                threading.Event().wait(_POLL_S)
    return [job.results[entry.slide_id] for entry in entries]


class _Job:
    """The state of one call of `process_slides`."""

    def __init__(
        self,
        *,
        out: Path,
        config: RunConfig,
        goal: Goal,
        models: Models,
        clock: StageClock,
        on_event: OnEvent,
    ) -> None:
        self.out, self.config = out, config
        self.models, self.clock, self.on_event = models, clock, on_event
        self.stages = stages_of(
            config,
            goal,
            pipeline=models.pipeline,
            encoders=models.encoders,
            slide_encoders=models.slide_encoders,
            target=models.stain_target,
        )
        self.results: dict[str, SlideResult] = {}
        self.locks: set[FileLock] = set()
        self.held_elsewhere: list[SlideEntry] = []
        self._lock_of: dict[str, FileLock] = {}

    def process(self, entries: Sequence[SlideEntry]) -> None:
        """One pass over slides; those that others hold are left in `held_elsewhere`."""
        encoders = self.models.encoders
        batch_size = batch_size_of(self.config, on_gpu=self.models.on_gpu)
        stream = TileStream(
            self._claim(entries),
            lambda work: prepare(work, self.config, target=self.models.stain_target),
            budget=budget_of(self.config, batch_size),
            batch_size=batch_size,
            filters=load_filters(self.config.tiles.tile_filter),
            prefetch_slides=self.config.stream.prefetch_slides,
            clock=self.clock,
            **self.models.allocate,
        )
        dims = {encoder.label: encoder.dim for encoder in encoders}
        with ResultSink(dims=dims, on_end=self._ended, clock=self.clock) as sink, stream:
            self._pump(stream, sink)

    def _pump(self, stream: TileStream, sink: ResultSink) -> None:
        batches = self._batch_encoder()
        for event in stream:
            if isinstance(event, SlideStarted):
                slide_id = event.key.entry.slide_id
                self.on_event(
                    RunEvent(kind="started", slide_id=slide_id, num_tiles=event.num_tiles)
                )
                continue
            ready: Iterator[EmbeddedBatch | Kept | Finish | Fail]
            if isinstance(event, TileBatch):
                wanted = wanted_of(event.key, self.models.encoders)
                if batches is None or not any(wanted):
                    kept = Kept(work=event.key, indices=event.indices.copy())
                    event.release()
                    ready = iter([kept])
                else:
                    ready = batches.submit(event, wanted)
            else:
                marker: Finish | Fail = (
                    Finish(work=event.key)
                    if isinstance(event, SlideFinished)
                    else Fail(work=event.key, stage=event.stage, error=event.error)
                )
                ready = batches.mark(marker) if batches else iter([marker])
            self._hand_over(ready, sink)
        if batches is not None:
            self._hand_over(batches.flush(), sink)

    def _batch_encoder(self) -> "BatchEncoder | None":
        if not self.models.encoders:
            return None
        from thinsection.encode.embed import BatchEncoder

        return BatchEncoder(self.models.encoders, clock=self.clock)

    def _hand_over(
        self, ready: Iterator["EmbeddedBatch | Kept | Finish | Fail"], sink: ResultSink
    ) -> None:
        for item in ready:
            if not isinstance(item, Kept | Finish | Fail):
                slide_id = item.key.entry.slide_id
                self.on_event(
                    RunEvent(kind="tiles", slide_id=slide_id, num_tiles=len(item.indices))
                )
            sink.put(item)

    def _claim(self, entries: Sequence[SlideEntry]) -> Iterator[SlideWork]:
        """Slides that are not done and that nobody else holds; runs in the prepare thread."""
        for entry in entries:
            lock = FileLock(self.out / SLIDES / entry.slide_id / LOCK_NAME)
            try:
                if not lock.acquire():
                    self.held_elsewhere.append(entry)
                    continue
                self.locks.add(lock)
                self._lock_of[entry.slide_id] = lock
                work = slide_work(entry, self.stages, out=self.out, options=self.config.output)
            except StoreError as error:
                self._end(entry, record_failure(self.out, entry, "open", error))
                continue
            if not work.missing and self._settled(work):
                continue
            yield work

    def _settled(self, work: SlideWork) -> bool:
        """Ends a slide that is done; False where its rules were not looked at before."""
        try:
            check_quality(work)
        except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded
            self._ended(work, work.at, error)
            return True
        clear_failure(self.out, work.entry.slide_id)
        self._end(work.entry, _skipped(work))
        return True

    def _ended(self, work: SlideWork, stage: str, error: Exception | None) -> None:
        entry = work.entry
        if error is not None:
            error.add_note(f"slide {entry.slide_id!r}, stage {stage}")
            result = record_failure(self.out, entry, stage, error)
        else:
            clear_failure(self.out, entry.slide_id)
            result = SlideResult(
                slide_id=entry.slide_id,
                slide_path=entry.slide_path,
                status="done",
                facts=work.facts() | work.fetched(),
            )
        self._end(entry, result)

    def _end(self, entry: SlideEntry, result: SlideResult) -> None:
        lock = self._lock_of.pop(entry.slide_id, None)
        if lock is not None:
            self.locks.discard(lock)
            lock.release()
        self.results[entry.slide_id] = result
        self.on_event(RunEvent(kind="ended", slide_id=entry.slide_id, result=result))


def slide_work(
    entry: SlideEntry, stages: Sequence[Stage], *, out: Path, options: OutputConfig
) -> SlideWork:
    """A slide as its ledger tells it, with what is missing of these stages.

    Raises:
        StoreError: the slide's file cannot be read.
    """
    work = SlideWork(
        entry=entry,
        out=out,
        source=source_key(fingerprint(entry.slide_path), entry),
        ledger=load_ledger(out, entry.slide_id),
        stages=tuple(stages),
        overwrite=options.overwrite,
    )
    work.missing = [stage for stage in stages if not options.resume or not work.done(stage)]
    return work


def skipped_result(
    entry: SlideEntry, *, out: Path, config: RunConfig, goal: Goal
) -> SlideResult | None:
    """The result of a slide that is done with the same settings and file; None where it is not.

    For goals without encoders. Rules of quality control are for whoever has the slide's lock.
    """
    if config.qc.qc_fail or read_failure(out, entry.slide_id) is not None:
        return None
    stages = stages_of(config, goal, pipeline=pipeline_of(config))
    try:
        work = slide_work(entry, stages, out=out, options=config.output)
    except StoreError:
        return None
    return None if work.missing else _skipped(work)


def _skipped(work: SlideWork) -> SlideResult:
    entry = work.entry
    return SlideResult(
        slide_id=entry.slide_id,
        slide_path=entry.slide_path,
        status="skipped",
        facts=work.facts(),
    )


def wanted_of(work: SlideWork, encoders: Sequence["TileEncoder"]) -> list["Wanted"]:
    """What a slide lacks of each encoder: '' nothing, 'embeddings', or 'tokens' for both."""
    wanted: list[Wanted] = []
    for encoder in encoders:
        features = any(
            isinstance(s, FeaturesStage) and s.encoder == encoder.label for s in work.missing
        )
        tokens = any(
            isinstance(s, TokensStage) and s.features.encoder == encoder.label for s in work.missing
        )
        wanted.append("tokens" if tokens else "embeddings" if features else "")
    return wanted
