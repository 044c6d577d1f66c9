"""Processes slides in one operating-system process: claim, prepare, stream, encode, write."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.errors import InvalidInputError, OutputError, StoreError
from thinsection.files.atomic import output_errors
from thinsection.files.lock import (
    LOCK_NAME,
    FileLock,
    find_unfinished_files,
    heartbeat,
    sweep_slide,
)
from thinsection.results.records import RECORDS
from thinsection.run.prepare import SlidePreparer, check_quality, load_work
from thinsection.run.sink import ResultSink, SinkItem
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import Models, grids_of
from thinsection.stages.stage import AnyStage, GridTiles, SlideWork
from thinsection.store.ledger import SLIDES
from thinsection.store.outcome import (
    SlideResult,
    Status,
    failure_path,
    record_failure,
)
from thinsection.tiles import StepTimer, TileBatch, TileStream, load_filters
from thinsection.tiles.budget import MemoryAllowance
from thinsection.tiles.stream import EmbeddedBatch, SlideStarted
from thinsection.types import parse_bytes
from thinsection.usage.analysis import slowest_step

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.encode.embed import BatchEncoder, EncoderRequest


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Progress of a run; may be emitted from any thread."""

    # opening, started, tiles, ended; waiting: another process works on the slide
    kind: str
    slide_id: str
    num_tiles: int = 0  # 'started': tiles to come; 'tiles': tiles done
    # 'opening': steps before the tiles; 'tiles': the slowest step;
    # 'waiting': the process that works on the slide
    text: str = ""
    result: SlideResult | None = None  # only for 'ended'


OnEvent = Callable[[RunEvent], None]


# seconds between two tries to claim slides that other processes hold
_POLL_S = 1.0


@dataclass(kw_only=True)
class SlideProcessor:
    """Takes slides through the run's stages in one process.

    Several processes may share a results folder; the lock of a slide keeps them apart.

    Memory: the stream's budget, the encoders, and one slide's embeddings while they are pooled.
    """

    out: Path  # results folder
    spec: RunConfig  # resolved and checked settings
    models: Models
    # all stages of the run; each comes after the stages that it needs
    stages: tuple[AnyStage, ...]
    # adds up the busy and the waiting time of each step
    clock: StepTimer = field(default_factory=StepTimer)
    # called with progress events, from any thread
    on_event: OnEvent = lambda event: None
    _results: dict[str, SlideResult] = field(default_factory=dict, init=False)
    _locks: dict[str, FileLock] = field(default_factory=dict, init=False)
    # Locks that other processes hold. The objects are kept between tries: each measures how long
    # its holder has sent no heartbeat, and takes the lock over after a timeout.
    _foreign_locks: dict[str, FileLock] = field(default_factory=dict, init=False)
    _announced_holders: dict[str, str] = field(default_factory=dict, init=False)
    # temporary files that killed processes left in folders shared by all slides, by slide;
    # None until these folders are searched
    _leftover_files: dict[str, list[Path]] | None = field(default=None, init=False)
    # True after an error of the run: no further slide is claimed
    _stopping: bool = field(default=False, init=False)
    _claimed_at: dict[str, float] = field(default_factory=dict, init=False)
    # time at which the last slide was closed
    _last_closed_at: float = field(default=0.0, init=False)

    def process(self, entries: Sequence[SlideEntry]) -> list[SlideResult]:
        """Returns one result for each slide, in the order of `entries`.

        A slide that cannot be processed gives a failed result, not an exception.
        """
        # `values()` is a live view, so `heartbeat` refreshes exactly the locks that are held now
        with heartbeat(self._locks.values()):
            held_elsewhere = self._process_free_slides(entries)
            while held_elsewhere:
                for entry in held_elsewhere:
                    self._emit_waiting(entry)
                time.sleep(_POLL_S)
                held_elsewhere = self._process_free_slides(held_elsewhere)
        return [self._results[entry.slide_id] for entry in entries]

    def _process_free_slides(self, entries: Sequence[SlideEntry]) -> list[SlideEntry]:
        """Processes the slides that no other process holds, and returns the others."""
        held_elsewhere: list[SlideEntry] = []
        # the next claim searches again, because a process may have been killed since
        self._leftover_files = None
        encoders = self.models.loaded_encoders
        batch_encoder = None
        if encoders:
            from thinsection.encode import embed

            batch_encoder = embed.BatchEncoder[GridTiles, SinkItem](
                encoders, clock=self.clock
            )
        sink = ResultSink(on_end=self._record_end, clock=self.clock)
        stream = self._open_stream(self._claim(entries, held_elsewhere))
        with sink, stream:
            try:
                self._route_events(stream, batch_encoder, sink)
            except BaseException:
                # before the stream is closed, its prepare thread must stop claiming slides
                self._stopping = True
                raise
        return held_elsewhere

    def _open_stream(
        self, slides: Iterator[SlideWork]
    ) -> TileStream[SlideWork, GridTiles]:
        """Opens the stream of decoded tiles of the claimed slides."""
        spec = self.spec
        encoders = self.models.loaded_encoders
        allocate = None
        if encoders:
            from thinsection.encode import embed

            allocate = embed.pinned_allocator(encoders)
        on_gpu = any(encoder.device.type != "cpu" for encoder in encoders)
        batch_size = spec.batch_size(on_gpu=on_gpu)
        budget = spec.stream_budget(batch_size)
        bytes_left = parse_bytes(spec.stream.memory) - budget.total_bytes
        preparer = SlidePreparer(
            slides=spec.slides,
            stain=spec.encoding.stain,
            grids=grids_of(self.stages),
            dims={encoder.label: encoder.dim for encoder in encoders},
            memory_for_whole_images=MemoryAllowance(bytes_left),
            stain_target=self.models.stain_target,
        )
        return TileStream(
            slides,
            preparer,
            budget=budget,
            batch_size=batch_size,
            allocate=allocate,
            filters=load_filters(spec.tiles.tile_filter),
            prefetch_slides=spec.stream.prefetch_slides,
            clock=self.clock,
        )

    def _route_events(
        self,
        stream: TileStream[SlideWork, GridTiles],
        batch_encoder: "BatchEncoder[GridTiles, SinkItem] | None",
        sink: ResultSink,
    ) -> None:
        """Passes the stream's events on to the sink; tiles are replaced by their embeddings."""
        for event in stream:
            if isinstance(event, SlideStarted):
                if event.source.is_first:
                    work = event.source.work
                    self._emit("started", work, work.num_tiles)
            elif isinstance(event, TileBatch):
                self._put(self._encode(event, batch_encoder), sink)
            else:
                self._put(_queue_in_order(event, batch_encoder), sink)
        if batch_encoder is not None:
            self._put(batch_encoder.flush(), sink)

    def _encode(
        self,
        batch: TileBatch[GridTiles],
        batch_encoder: "BatchEncoder[GridTiles, SinkItem] | None",
    ) -> Iterable[SinkItem]:
        """Submits a batch to the encoders that need it; returns items that are complete now."""
        requests = encoder_requests(batch.source, self.models.loaded_encoders)
        if batch_encoder is not None and any(requests):
            return batch_encoder.submit(batch, requests)
        # no encoder needs the pixels; the sink only needs the indices of the tiles
        batch.release()
        without_embeddings = EmbeddedBatch(
            source=batch.source, indices=batch.indices, coords_l0=batch.coords_l0
        )
        return _queue_in_order(without_embeddings, batch_encoder)

    def _put(self, items: Iterable[SinkItem], sink: ResultSink) -> None:
        """Puts items into the sink, and reports progress for each batch of embeddings."""
        for item in items:
            if isinstance(item, EmbeddedBatch) and item.tile_embeddings:
                bottleneck = slowest_step(self.clock.seconds())
                self._emit("tiles", item.source.work, len(item.indices), bottleneck)
            sink.put(item)

    def _claim(
        self, entries: Sequence[SlideEntry], held_elsewhere: list[SlideEntry]
    ) -> Iterator[SlideWork]:
        """Yields slides that are not done and that no other process holds.

        Runs in the stream's prepare thread.

        Args:
            entries: slides to claim.
            held_elsewhere: slides that another process holds are appended to it.
        """
        for entry in entries:
            if self._stopping:
                return
            try:
                work = self._claim_one(entry)
            except OutputError:
                raise
            except (StoreError, InvalidInputError) as error:
                self._close_slide(entry, record_failure(self.out, entry, "open", error))
                continue
            if work is None:
                held_elsewhere.append(entry)
                continue
            if not work.missing:
                self._skip(work)
                continue
            # titles of the stages that run before tiles are read
            titles = [stage.title for stage in work.missing if stage.reads == "slide"]
            text = ", ".join(dict.fromkeys(titles)) or "stored results"
            self._emit("opening", work, 0, text)
            yield work

    def _claim_one(self, entry: SlideEntry) -> SlideWork | None:
        """Locks a slide and reads its ledger; returns None if another process holds the lock."""
        path = self.out / SLIDES / entry.slide_id / LOCK_NAME
        lock = self._foreign_locks.pop(entry.slide_id, FileLock(path))
        if not lock.acquire():
            self._foreign_locks[entry.slide_id] = lock
            return None
        self._locks[entry.slide_id] = lock
        self._claimed_at[entry.slide_id] = time.monotonic()
        if self._leftover_files is None:
            self._leftover_files = _find_leftover_files(self.out)
        with output_errors(lock.path):
            sweep_slide(entry.slide_id, lock.path.parent, self._leftover_files)
        return load_work(
            entry,
            self.stages,
            out=self.out,
            spec=self.spec,
            slide_encoders={
                encoder.name: encoder for encoder in self.models.loaded_slide_encoders
            },
        )

    def _skip(self, work: SlideWork) -> None:
        """Ends a slide whose results are complete; quality rules may still exclude it."""
        failure = None
        try:
            if work.has_new_facts:
                # Save the identity of the slide file, so that the next run need not hash the
                # whole file again. No result has changed, so the ledger keeps its time stamp.
                work.ledger.save(keep_time=True)
            check_quality(work)
        except OutputError:
            raise
        except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded
            failure = work.stage_title, error
        self._record_end(work, failure, status="skipped")

    def _record_end(
        self,
        work: SlideWork,
        failure: tuple[str, Exception] | None,
        *,
        status: Status = "done",
    ) -> None:
        """Writes or removes the slide's failure record, and closes the slide."""
        entry = work.entry
        if failure is not None:
            stage, error = failure
            error.add_note(f"slide {entry.slide_id!r}, stage {stage}")
            result = record_failure(self.out, entry, stage, error)
        else:
            # remove the failure record of an earlier run
            with output_errors(self.out):
                failure_path(self.out, entry.slide_id).unlink(missing_ok=True)
            facts = {**work.facts(), **work.download_counts()}
            # about this run, so it is in no ledger
            notes = [facts.get("warnings"), work.note_on_removed, *work.run_notes]
            facts["warnings"] = "; ".join(note for note in notes if note)
            result = SlideResult.of(entry, status, facts)
        self._close_slide(entry, result)

    def _close_slide(self, entry: SlideEntry, result: SlideResult) -> None:
        """Releases the lock of a slide, keeps its result and emits its last event."""
        lock = self._locks.pop(entry.slide_id, None)
        if lock is not None:
            lock.release()
        now = time.monotonic()
        if result.status != "skipped":
            # slides overlap, so count only the time since the previous slide was closed
            claimed_at = self._claimed_at.get(entry.slide_id, now)
            counted_from = max(self._last_closed_at, claimed_at)
            result = replace(result, seconds=round(now - counted_from, 2))
        self._last_closed_at = now
        self._results[entry.slide_id] = result
        self.on_event(RunEvent(kind="ended", slide_id=entry.slide_id, result=result))

    def _emit(
        self,
        kind: str,
        work: SlideWork,
        num_tiles: int,
        text: str = "",
    ) -> None:
        slide_id = work.entry.slide_id
        self.on_event(
            RunEvent(kind=kind, slide_id=slide_id, num_tiles=num_tiles, text=text)
        )

    def _emit_waiting(self, entry: SlideEntry) -> None:
        """Reports which process holds a slide, once for each slide and holder."""
        lock = self._foreign_locks[entry.slide_id]
        holder = str(lock.owner())
        if self._announced_holders.get(entry.slide_id) == holder:
            return
        self._announced_holders[entry.slide_id] = holder
        self.on_event(
            RunEvent(kind="waiting", slide_id=entry.slide_id, text=lock.describe())
        )


def _queue_in_order(
    item: SinkItem, batch_encoder: "BatchEncoder[GridTiles, SinkItem] | None"
) -> Iterable[SinkItem]:
    """Queues an item behind the batches in the encoders; returns items that are complete now."""
    if batch_encoder is None:
        return [item]
    return batch_encoder.queue_in_order(item)


def encoder_requests(
    tiles: GridTiles, encoders: Sequence["TileEncoder"]
) -> list["EncoderRequest"]:
    """Returns the request to each encoder; '' if no stage needs it for this slide."""
    outputs = [stage.encoder_output for stage in tiles.stages]
    wanted = {output for output in outputs if output is not None}
    requests: list[EncoderRequest] = []
    for encoder in encoders:
        results = {result for label, result in wanted if label == encoder.label}
        if "tokens" in results:
            requests.append("tokens")
        elif results:
            requests.append("embeddings")
        else:
            requests.append("")
    return requests


def _find_leftover_files(out: Path) -> dict[str, list[Path]]:
    """Finds the temporary files that killed processes left in shared folders, by slide.

    A shared folder holds one file of each slide: `out/GRID/STAGE`.
    """
    shared_folders: list[Path] = []
    for folder in out.glob("*"):
        if folder.name not in (SLIDES, RECORDS):
            shared_folders += folder.glob("*")
    return find_unfinished_files(shared_folders)
