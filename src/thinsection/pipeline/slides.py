"""A chunk of slides through one process: claim, prepare, stream, encode, write."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinsection.encode import TileEncoder, load_encoder
from thinsection.encode.embed import BatchEncoder, EmbeddedBatch, pinned_allocator
from thinsection.encode.heap import keep_freed_memory
from thinsection.errors import StoreError
from thinsection.files.lock import LOCK_NAME, FileLock, heartbeat
from thinsection.pipeline.results import SlideResult, clear_failure, read_result, record_failure
from thinsection.pipeline.work import SlideWork, prepare
from thinsection.pipeline.writer import Fail, Finish, ResultWriter
from thinsection.pool import SlideEncoder, check_fit, load_slide_encoder
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.keys import STAGES, qc_pipeline, stage_keys
from thinsection.store.ledger import fingerprint, load_ledger
from thinsection.stream import (
    SlideFinished,
    SlideStarted,
    StageClock,
    StreamBudget,
    TileBatch,
    TileStream,
    cpu_count,
    stream_budget,
)
from thinsection.stream.budget import REGION_BYTES
from thinsection.tiles import load_filters
from thinsection.units import parse_bytes

CPU_BATCH, GPU_BATCH = 32, 256
_POLL_S = 1.0  # how often a slide that another process holds is looked at again
SCRATCH_LIMIT = 2 * REGION_BYTES


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


@dataclass(frozen=True, kw_only=True)
class Models:
    """The loaded encoders of a process; None for stages that do not use them.

    Attributes:
        encoder, slide_encoder: loaded.
        warnings: what does not fit between them and the run's tiles.
    """

    encoder: TileEncoder | None
    slide_encoder: SlideEncoder | None
    warnings: tuple[str, ...] = ()

    @property
    def identities(self) -> dict[str, Any]:
        """What of them decides a result, for the ledger's keys."""
        found: dict[str, Any] = {}
        if self.encoder is not None:
            e = self.encoder
            found["encoder"] = [e.spec.name, e.weights_hash, str(e.precision)]
        if self.slide_encoder is not None:
            found["slide_encoder"] = [self.slide_encoder.name, self.slide_encoder.weights_hash]
        return found


def load_models(config: RunConfig, stage: str) -> Models:
    """Loads what a run up to `stage` needs; on a CPU this process then keeps freed memory."""
    encoder = slide_encoder = None
    if stage in ("embed", "aggregate"):
        options = config.encode
        encoder = load_encoder(
            options.encoder,
            device=options.device,
            precision=options.precision,
            weights=options.weights,
            pretrained=options.pretrained,
            allow_remote_code=options.allow_remote_code,
            seed=options.seed,
        )
        if encoder.device.type == "cpu":
            keep_freed_memory()
    if stage == "aggregate":
        slide_encoder = load_slide_encoder(
            config.aggregate.slide_encoder,
            weights=config.aggregate.slide_weights,
            device=config.encode.device,
            budget_bytes=parse_bytes(config.aggregate.aggregate_memory),
        )
    fit: tuple[str, ...] = ()
    if encoder is not None and slide_encoder is not None:
        tiles = config.tiles
        fit = check_fit(slide_encoder, encoder.spec.name, tiles.tile_px, tiles.mpp)
    return Models(encoder=encoder, slide_encoder=slide_encoder, warnings=fit)


def batch_size_of(config: RunConfig, encoder: TileEncoder | None) -> int:
    """The batch size that was asked for, or the default of the encoder's device."""
    if config.encode.batch_size:
        return config.encode.batch_size
    on_gpu = encoder is not None and encoder.device.type != "cpu"
    return GPU_BATCH if on_gpu else CPU_BATCH


def budget_of(config: RunConfig, batch_size: int) -> StreamBudget:
    """The stream's buffers under the run's settings."""
    return stream_budget(
        budget_bytes=parse_bytes(config.stream.memory),
        batch_size=batch_size,
        tile_px=config.tiles.tile_px,
        workers=config.stream.decode_workers or cpu_count(),
        scratch_bytes=SCRATCH_LIMIT,
    )


def process_slides(
    entries: Sequence[SlideEntry],
    *,
    out: Path,
    config: RunConfig,
    stage: str = "aggregate",
    models: Models | None = None,
    clock: StageClock | None = None,
    on_event: OnEvent = lambda event: None,
) -> list[SlideResult]:
    """Takes slides up to a stage, streaming from one into the next; any number of processes may
    work on one output folder.

    Args:
        entries: the slides.
        out: output folder of the run.
        config: all settings.
        stage: the last stage: 'tissue', 'tile', 'embed' or 'aggregate'.
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
        stage=stage,
        models=models or load_models(config, stage),
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
        stage: str,
        models: Models,
        clock: StageClock,
        on_event: OnEvent,
    ) -> None:
        self.out, self.config, self.stage = out, config, stage
        self.models, self.clock, self.on_event = models, clock, on_event
        self.pipeline = qc_pipeline(config)
        self.results: dict[str, SlideResult] = {}
        self.locks: set[FileLock] = set()
        self.held_elsewhere: list[SlideEntry] = []
        self._lock_of: dict[str, FileLock] = {}

    def process(self, entries: Sequence[SlideEntry]) -> None:
        """One pass over slides; those that others hold are left in `held_elsewhere`."""
        encoder = self.models.encoder
        batch_size = batch_size_of(self.config, encoder)
        stream = TileStream(
            self._claim(entries),
            lambda work: prepare(work, self.config, scratch_limit=SCRATCH_LIMIT),
            budget=budget_of(self.config, batch_size),
            batch_size=batch_size,
            filters=load_filters(self.config.tiles.tile_filter) if encoder else (),
            prefetch_slides=self.config.stream.prefetch_slides,
            clock=self.clock,
            decode=encoder is not None,
            **({"allocate": pinned_allocator([encoder])} if encoder else {}),
        )
        identity: dict[str, Any] = {}
        if encoder is not None:
            identity = {
                "encoder": encoder.spec.name,
                "weights_hash": encoder.weights_hash,
                "precision": str(encoder.precision),
            }
        writer = ResultWriter(
            self.config,
            dim=encoder.dim if encoder else 0,
            encoder=identity,
            slide_encoder=self.models.slide_encoder,
            write_tiles=self.stage != "tissue",
            on_end=self._ended,
            clock=self.clock,
        )
        with writer, stream:
            self._pump(stream, writer)

    def _pump(self, stream: TileStream, writer: ResultWriter) -> None:
        encoder = self.models.encoder
        batches = BatchEncoder([encoder], clock=self.clock) if encoder else None
        for event in stream:
            if isinstance(event, SlideStarted):
                slide_id = event.key.entry.slide_id
                self.on_event(
                    RunEvent(kind="started", slide_id=slide_id, num_tiles=len(event.table))
                )
                continue
            ready: Iterator[EmbeddedBatch | Finish | Fail]
            if isinstance(event, TileBatch):
                assert batches is not None
                ready = batches.submit(event)
            else:
                marker: Finish | Fail = (
                    Finish(work=event.key)
                    if isinstance(event, SlideFinished)
                    else Fail(work=event.key, stage=event.stage, error=event.error)
                )
                ready = batches.mark(marker) if batches else iter([marker])
            self._hand_over(ready, writer)
        if batches is not None:
            self._hand_over(batches.flush(), writer)

    def _hand_over(
        self, ready: Iterator[EmbeddedBatch | Finish | Fail], writer: ResultWriter
    ) -> None:
        for item in ready:
            if isinstance(item, EmbeddedBatch):
                slide_id = item.key.entry.slide_id
                self.on_event(
                    RunEvent(kind="tiles", slide_id=slide_id, num_tiles=len(item.indices))
                )
            writer.put(item)

    def _claim(self, entries: Sequence[SlideEntry]) -> Iterator[SlideWork]:
        """Slides that are not done and that nobody else holds; runs in the prepare thread."""
        for entry in entries:
            folder = self.out / entry.slide_id
            lock = FileLock(folder / LOCK_NAME)
            try:
                if not lock.acquire():
                    self.held_elsewhere.append(entry)
                    continue
                self.locks.add(lock)
                self._lock_of[entry.slide_id] = lock
                mark = fingerprint(entry.slide_path)
            except StoreError as error:
                self._end(entry, record_failure(self.out, entry, "open", error))
                continue
            keys = stage_keys(
                entry, mark, self.config, self.models.identities, pipeline=self.pipeline
            )
            work = SlideWork(
                entry=entry,
                folder=folder,
                keys=keys,
                ledger=load_ledger(folder),
                pipeline=self.pipeline,
            )
            done = self.config.output.resume and self._all_done(work)
            result = read_result(self.out, entry, self.stage) if done else None
            if result is not None and result.status == "done":
                skipped = SlideResult(
                    slide_id=entry.slide_id,
                    slide_path=entry.slide_path,
                    status="skipped",
                    facts=result.facts,
                )
                self._end(entry, skipped)
                continue
            clear_failure(self.out, entry.slide_id)
            yield work

    def _all_done(self, work: SlideWork) -> bool:
        needed = STAGES[: STAGES.index(self.stage) + 1]
        return all(work.ledger.done(name, work.keys[name]) for name in needed)

    def _ended(self, work: SlideWork, stage: str, error: Exception | None) -> None:
        if error is not None:
            error.add_note(f"slide {work.entry.slide_id!r}, stage {stage}")
            result = record_failure(self.out, work.entry, stage, error)
        else:
            found = read_result(self.out, work.entry, self.stage)
            assert found is not None
            result = replace(found, facts={**found.facts, **work.fetched()})
        self._end(work.entry, result)

    def _end(self, entry: SlideEntry, result: SlideResult) -> None:
        lock = self._lock_of.pop(entry.slide_id, None)
        if lock is not None:
            self.locks.discard(lock)
            lock.release()
        self.results[entry.slide_id] = result
        self.on_event(RunEvent(kind="ended", slide_id=entry.slide_id, result=result))
