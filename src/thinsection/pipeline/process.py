"""Takes a chunk of slides through one process: claim, prepare, stream, encode, write."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.errors import InvalidInputError, OutputError, StoreError
from thinsection.files.atomic import output_errors
from thinsection.files.lock import (
    LOCK_NAME,
    FileLock,
    heartbeat,
    sweep_slide,
    unfinished,
)
from thinsection.pipeline.events import OnEvent, RunEvent
from thinsection.pipeline.models import LoadedModels
from thinsection.pipeline.prepare import SlidePreparer, check_quality, claim_slide
from thinsection.pipeline.records import RECORDS
from thinsection.pipeline.results import (
    SlideResult,
    Status,
    failure_path,
    record_failure,
)
from thinsection.pipeline.sink import Item, ResultSink, encoder_of
from thinsection.pipeline.slide_states import ClaimedSlide, PreparedSlide, SlideEnd
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.features import TokensStage
from thinsection.stages.graph import stages_of
from thinsection.stages.spec import RunSpec
from thinsection.stages.stage import AnyStage, SlideStage
from thinsection.stages.tiles import TilesStage
from thinsection.store.ledger import SLIDES
from thinsection.stream import StageClock, TileBatch, TileStream
from thinsection.stream.batches import SlideFailed, SlideFinished, SlideStarted
from thinsection.stream.threads import Scratch
from thinsection.tiles import load_filters
from thinsection.types import parse_bytes
from thinsection.usage.analysis import slowest_step

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.encode.embed import BatchEncoder, Wanted

# seconds between two tries to claim slides that other processes hold
_POLL_S = 1.0


@dataclass(kw_only=True)
class SlideJob:
    """Takes slides through the run's stages in one process.

    Several processes may share a results folder; the lock of a slide keeps them apart.

    Memory: the stream's budget, the encoders, and one slide's embeddings while they are pooled.
    """

    out: Path  # results folder
    spec: RunSpec
    models: LoadedModels
    # adds up the busy and the waiting time of each step
    clock: StageClock = field(default_factory=StageClock)
    # called with progress events, from any thread
    on_event: OnEvent = lambda event: None
    _stages: tuple[AnyStage, ...] = field(init=False)
    _results: dict[str, SlideResult] = field(default_factory=dict, init=False)
    _locks: dict[str, FileLock] = field(default_factory=dict, init=False)
    _held_elsewhere: list[SlideEntry] = field(default_factory=list, init=False)
    # locks that other processes hold; each notices when its holder stops refreshing it
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

    def __post_init__(self) -> None:
        self._stages = stages_of(self.spec, self.models.identities)

    def process(self, entries: Sequence[SlideEntry]) -> list[SlideResult]:
        """Returns one result for each slide, in the order of `entries`.

        A slide that cannot be processed gives a failed result, not an exception.
        """
        with heartbeat(self._locks.values()):
            self._process_free_slides(entries)
            while self._held_elsewhere:
                waiting = self._held_elsewhere
                for entry in waiting:
                    self._emit_waiting(entry)
                time.sleep(_POLL_S)
                self._process_free_slides(waiting)
        return [self._results[entry.slide_id] for entry in entries]

    def _process_free_slides(self, entries: Sequence[SlideEntry]) -> None:
        """Processes the slides that no other process holds, and lists the others.

        The others are in `_held_elsewhere` afterwards.
        """
        self._held_elsewhere = []
        # search again: a process that held a slide may have been killed since
        self._leftover_files = None
        encoders = self.models.encoders
        batch_encoder = None
        if encoders:
            from thinsection.encode import embed

            batch_encoder = embed.BatchEncoder[PreparedSlide, Item](
                encoders, clock=self.clock
            )
        dims = {encoder.label: encoder.dim for encoder in encoders}
        stream = self._open_stream(entries)
        with (
            ResultSink(dims=dims, on_end=self._record_end, clock=self.clock) as sink,
            stream,
        ):
            try:
                self._forward_events(stream, batch_encoder, sink)
            except BaseException:
                self._stopping = True
                raise

    def _open_stream(
        self, entries: Sequence[SlideEntry]
    ) -> TileStream[ClaimedSlide, PreparedSlide]:
        """Opens the stream of decoded tiles."""
        spec = self.spec
        encoders = self.models.encoders
        allocate = None
        if encoders:
            from thinsection.encode import embed

            allocate = embed.pinned_allocator(encoders)
        on_gpu = any(encoder.device.type != "cpu" for encoder in encoders)
        batch_size = spec.batch_size(on_gpu=on_gpu)
        budget = spec.stream_budget(batch_size)
        stream_bytes = budget.slots * budget.batch_bytes + budget.scratch_bytes
        memory_for_whole_images = Scratch(
            parse_bytes(spec.stream.memory) - stream_bytes
        )
        target = self.models.identities.stain_target
        return TileStream(
            self._claim(entries),
            SlidePreparer(
                spec=spec,
                memory_for_whole_images=memory_for_whole_images,
                target=target,
            ),
            budget=budget,
            batch_size=batch_size,
            allocate=allocate,
            filters=load_filters(spec.tiles.tile_filter),
            prefetch_slides=spec.stream.prefetch_slides,
            clock=self.clock,
        )

    def _forward_events(
        self,
        stream: TileStream[ClaimedSlide, PreparedSlide],
        batch_encoder: "BatchEncoder[PreparedSlide, Item] | None",
        sink: ResultSink,
    ) -> None:
        """Passes the stream's events on to the sink; tiles are replaced by their embeddings."""
        for event in stream:
            slide = event.key
            if isinstance(event, SlideStarted):
                self._emit("started", slide, event.num_tiles)
                continue
            if isinstance(event, TileBatch):
                requests = encoder_requests(slide, self.models.encoders)
                if batch_encoder is not None and any(requests):
                    self._put(batch_encoder.submit(event, requests), sink)
                    continue
                # no encoder needs the pixels; the sink only needs the indices of the tiles
                event.release()
            if batch_encoder is None:
                self._put([event], sink)
            else:
                self._put(batch_encoder.queue_in_order(event), sink)
        if batch_encoder is not None:
            self._put(batch_encoder.flush(), sink)

    def _put(self, items: Iterable[Item], sink: ResultSink) -> None:
        """Puts items into the sink, and reports progress for each batch of embeddings."""
        for item in items:
            # every other item is an `EmbeddedBatch`, whose module is not imported here, because
            # it imports torch
            if not isinstance(item, TileBatch | SlideFinished | SlideFailed):
                bottleneck = slowest_step(self.clock.seconds())
                self._emit("tiles", item.key, len(item.indices), bottleneck)
            sink.put(item)

    def _claim(self, entries: Sequence[SlideEntry]) -> Iterator[ClaimedSlide]:
        """Yields slides that are not done and that no other process holds.

        Runs in the stream's prepare thread.
        """
        for entry in entries:
            if self._stopping:
                return
            try:
                claimed = self._claim_one(entry)
            except OutputError:
                raise
            except (StoreError, InvalidInputError) as error:
                self._close_slide(entry, record_failure(self.out, entry, "open", error))
                continue
            if claimed is None:
                continue
            if not claimed.work.missing:
                self._skip(claimed)
                continue
            steps = _steps_before_tiles(claimed.work.missing)
            self._emit("opening", claimed, 0, ", ".join(steps) or "stored results")
            yield claimed

    def _claim_one(self, entry: SlideEntry) -> ClaimedSlide | None:
        """Locks a slide and reads its ledger; returns None if another process holds the lock."""
        path = self.out / SLIDES / entry.slide_id / LOCK_NAME
        lock = self._foreign_locks.pop(entry.slide_id, FileLock(path))
        if not lock.acquire():
            self._foreign_locks[entry.slide_id] = lock
            self._held_elsewhere.append(entry)
            return None
        self._locks[entry.slide_id] = lock
        self._claimed_at[entry.slide_id] = time.monotonic()
        if self._leftover_files is None:
            self._leftover_files = _find_leftover_files(self.out)
        with output_errors(lock.path):
            sweep_slide(entry.slide_id, lock.path.parent, self._leftover_files)
        return claim_slide(
            entry,
            self._stages,
            out=self.out,
            spec=self.spec,
            slide_encoders={
                encoder.name: encoder for encoder in self.models.slide_encoders
            },
        )

    def _skip(self, claimed: ClaimedSlide) -> None:
        """Ends a slide whose results are complete; quality rules may still exclude it."""
        work = claimed.work
        try:
            if claimed.ledger_is_old:
                # Save the identity of the slide file, so that the next run need not hash the
                # whole file again. No result has changed, so the ledger keeps its time stamp.
                work.ledger.save(keep_time=work.ledger.path.exists())
            check_quality(work)
        except OutputError:
            raise
        except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded
            end = SlideEnd(entry=work.entry, error=error, stage=work.stage_title)
        else:
            end = SlideEnd(entry=work.entry, facts=work.facts())
        self._record_end(end, status="skipped")

    def _record_end(self, end: SlideEnd, *, status: Status = "done") -> None:
        """Writes or removes the slide's failure record, and closes the slide."""
        entry = end.entry
        if end.error is not None:
            end.error.add_note(f"slide {entry.slide_id!r}, stage {end.stage}")
            result = record_failure(self.out, entry, end.stage, end.error)
        else:
            # remove the failure record of an earlier run
            with output_errors(self.out):
                failure_path(self.out, entry.slide_id).unlink(missing_ok=True)
            result = SlideResult.of(entry, status, dict(end.facts))
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
        slide: ClaimedSlide | PreparedSlide,
        num_tiles: int,
        text: str = "",
    ) -> None:
        slide_id = slide.entry.slide_id
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


def encoder_requests(
    prepared: PreparedSlide, encoders: Sequence["TileEncoder"]
) -> list["Wanted"]:
    """Returns the request to each encoder: 'tokens' (with embeddings), 'embeddings' or ''."""
    requests: list[Wanted] = []
    for encoder in encoders:
        stages_of_encoder = [
            stage for stage in prepared.streamed if encoder_of(stage) == encoder.label
        ]
        if any(isinstance(stage, TokensStage) for stage in stages_of_encoder):
            requests.append("tokens")
        elif stages_of_encoder:
            requests.append("embeddings")
        else:
            requests.append("")
    return requests


def _steps_before_tiles(missing: Sequence[AnyStage]) -> list[str]:
    """Titles of the missing stages that run before tiles are read, each title once."""
    titles = [
        stage.title
        for stage in missing
        if isinstance(stage, SlideStage)
        or (isinstance(stage, TilesStage) and not stage.has_pixel_filters)
    ]
    return list(dict.fromkeys(titles))


def _find_leftover_files(out: Path) -> dict[str, list[Path]]:
    """Finds the temporary files that killed processes left in shared folders, by slide.

    A shared folder holds one file of each slide: `out/GRID/STAGE`.
    """
    shared_folders: list[Path] = []
    for folder in out.glob("*"):
        if folder.name not in (SLIDES, RECORDS):
            shared_folders += folder.glob("*")
    return unfinished(shared_folders)
