"""A chunk of slides through one process: claim, prepare, stream, encode, write."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.errors import InvalidInputError, OutputError, StoreError
from thinsection.files.atomic import writing
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
from thinsection.pipeline.slide_states import ClaimedSlide, FinishedSlide, PreparedSlide
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
from thinsection.usage.analysis import held_up

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.encode.embed import BatchEncoder, Wanted

_POLL_S = 1.0  # between looks at slides that other processes hold


@dataclass(kw_only=True)
class SlideJob:
    """Slides through one process up to a goal; any number of them may work on one folder.

    Memory: the stream's budget, the encoders, and one slide's embeddings while it is pooled.
    """

    out: Path  # results folder
    spec: RunSpec
    models: LoadedModels
    # where busy and waiting time is added up
    clock: StageClock = field(default_factory=StageClock)
    on_event: OnEvent = lambda event: None  # progress, from any thread
    _stages: tuple[AnyStage, ...] = field(init=False)
    _results: dict[str, SlideResult] = field(default_factory=dict, init=False)
    _locks: dict[str, FileLock] = field(default_factory=dict, init=False)
    _held_elsewhere: list[SlideEntry] = field(default_factory=list, init=False)
    # of slides that others hold: each watches whether its lock is touched
    _foreign_locks: dict[str, FileLock] = field(default_factory=dict, init=False)
    _announced_holders: dict[str, str] = field(default_factory=dict, init=False)
    # files that killed processes left in folders of all slides, by slide; None: not looked yet
    _unfinished: dict[str, list[Path]] | None = field(default=None, init=False)
    _ending: bool = field(default=False, init=False)  # no further slide is begun
    _claimed_at: dict[str, float] = field(default_factory=dict, init=False)
    _ended_at: float = field(default=0.0, init=False)  # when the last slide ended

    def __post_init__(self) -> None:
        self._stages = stages_of(self.spec, self.models.identities)

    def process(self, entries: Sequence[SlideEntry]) -> list[SlideResult]:
        """A result per slide, in their order; a bad one is a failed result, never an exception."""
        with heartbeat(self._locks.values()):
            self._work_through(entries)
            while self._held_elsewhere:
                waiting = self._held_elsewhere
                for entry in waiting:
                    self._tell_waiting(entry)
                threading.Event().wait(_POLL_S)
                self._work_through(waiting)
        return [self._results[entry.slide_id] for entry in entries]

    def _work_through(self, entries: Sequence[SlideEntry]) -> None:
        """One pass over slides; those that others hold are left in `_held_elsewhere`."""
        self._held_elsewhere = []
        self._unfinished = (
            None  # a process that held a slide may have been killed since
        )
        encoders = self.models.encoders
        batches = None
        if encoders:
            from thinsection.encode import embed

            batches = embed.BatchEncoder[PreparedSlide, Item](
                encoders, clock=self.clock
            )
        dims = {encoder.label: encoder.dim for encoder in encoders}
        stream = self._open_stream(entries)
        with (
            ResultSink(dims=dims, on_end=self._take_end, clock=self.clock) as sink,
            stream,
        ):
            try:
                self._pump(stream, batches, sink)
            except BaseException:
                self._ending = True
                raise

    def _open_stream(
        self, entries: Sequence[SlideEntry]
    ) -> TileStream[ClaimedSlide, PreparedSlide]:
        """The stream of the slides' tiles."""
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
        wholes = Scratch(parse_bytes(spec.stream.memory) - stream_bytes)
        target = self.models.identities.stain_target
        return TileStream(
            self._claim(entries),
            SlidePreparer(spec=spec, wholes=wholes, target=target),
            budget=budget,
            batch_size=batch_size,
            allocate=allocate,
            filters=load_filters(spec.tiles.tile_filter),
            prefetch_slides=spec.stream.prefetch_slides,
            clock=self.clock,
        )

    def _pump(
        self,
        stream: TileStream[ClaimedSlide, PreparedSlide],
        batches: "BatchEncoder[PreparedSlide, Item] | None",
        sink: ResultSink,
    ) -> None:
        """Hands the stream's events on, with embeddings in the place of the tiles they are of."""
        for event in stream:
            if isinstance(event, SlideStarted):
                self._tell("started", event.key, event.num_tiles)
                continue
            if isinstance(event, TileBatch):
                wanted = wanted_of(event.key, self.models.encoders)
                if batches is not None and any(wanted):
                    self._hand_over(batches.submit(event, wanted), sink)
                    continue
                event.release()  # only which tiles the filters kept is asked for
            self._hand_over(batches.mark(event) if batches else [event], sink)
        if batches is not None:
            self._hand_over(batches.flush(), sink)

    def _hand_over(self, items: Iterable[Item], sink: ResultSink) -> None:
        for item in items:
            if not isinstance(item, TileBatch | SlideFinished | SlideFailed):
                pace = held_up(self.clock.seconds())
                self._tell("tiles", item.key, len(item.indices), pace)
            sink.put(item)

    def _claim(self, entries: Sequence[SlideEntry]) -> Iterator[ClaimedSlide]:
        """Slides that are not done and that nobody else holds; runs in the prepare thread."""
        for entry in entries:
            if self._ending:
                return
            try:
                claimed = self._claim_one(entry)
            except OutputError:
                raise
            except (StoreError, InvalidInputError) as error:
                self._end(entry, record_failure(self.out, entry, "open", error))
                continue
            if claimed is None:
                continue
            if not claimed.work.missing:
                self._skip(claimed)
                continue
            steps = _steps_before_tiles(claimed.work.missing)
            self._tell("opening", claimed, 0, ", ".join(steps) or "what is stored")
            yield claimed

    def _claim_one(self, entry: SlideEntry) -> ClaimedSlide | None:
        """The slide under its lock; None where another process holds it."""
        path = self.out / SLIDES / entry.slide_id / LOCK_NAME
        lock = self._foreign_locks.pop(entry.slide_id, FileLock(path))
        if not lock.acquire():
            self._foreign_locks[entry.slide_id] = lock
            self._held_elsewhere.append(entry)
            return None
        self._locks[entry.slide_id] = lock
        self._claimed_at[entry.slide_id] = time.monotonic()
        if self._unfinished is None:
            self._unfinished = _unfinished_files(self.out)
        with writing(lock.path):
            sweep_slide(entry.slide_id, lock.path.parent, self._unfinished)
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
        """Ends a slide of which nothing is missing; rules of quality control may exclude it."""
        work = claimed.work
        try:
            if claimed.ledger_is_old:  # so that every byte is compared once only
                work.ledger.save(keep_time=work.ledger.path.exists())
            check_quality(work)
        except OutputError:
            raise
        except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded
            end = FinishedSlide(entry=work.entry, error=error, stage=work.stage_title)
        else:
            end = FinishedSlide(entry=work.entry, facts=work.facts())
        self._take_end(end, status="skipped")

    def _take_end(self, end: FinishedSlide, *, status: Status = "done") -> None:
        """Records the end of a slide, and tells of it."""
        entry = end.entry
        if end.error is not None:
            end.error.add_note(f"slide {entry.slide_id!r}, stage {end.stage}")
            self._end(entry, record_failure(self.out, entry, end.stage, end.error))
            return
        with writing(self.out):  # one of an earlier run
            failure_path(self.out, entry.slide_id).unlink(missing_ok=True)
        self._end(entry, SlideResult.of(entry, status, facts=dict(end.facts)))

    def _end(self, entry: SlideEntry, result: SlideResult) -> None:
        lock = self._locks.pop(entry.slide_id, None)
        if lock is not None:
            lock.release()
        now = time.monotonic()
        if result.status != "skipped":
            # slides overlap: the time that this one took beyond the one before
            begun = max(self._ended_at, self._claimed_at.get(entry.slide_id, now))
            result = replace(result, seconds=round(now - begun, 2))
        self._ended_at = now
        self._results[entry.slide_id] = result
        self.on_event(RunEvent(kind="ended", slide_id=entry.slide_id, result=result))

    def _tell(
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

    def _tell_waiting(self, entry: SlideEntry) -> None:
        """Says who holds a slide, once for each slide and holder."""
        lock = self._foreign_locks[entry.slide_id]
        holder = str(lock.owner())
        if self._announced_holders.get(entry.slide_id) == holder:
            return
        self._announced_holders[entry.slide_id] = holder
        self.on_event(
            RunEvent(kind="waiting", slide_id=entry.slide_id, text=lock.describe())
        )


def wanted_of(
    prepared: PreparedSlide, encoders: Sequence["TileEncoder"]
) -> list["Wanted"]:
    """Request to each encoder: '' for nothing, 'embeddings', or 'tokens' for both."""
    wanted: list[Wanted] = []
    for encoder in encoders:
        fed = [s for s in prepared.streamed if encoder_of(s) == encoder.label]
        if any(isinstance(stage, TokensStage) for stage in fed):
            wanted.append("tokens")
        else:
            wanted.append("embeddings" if fed else "")
    return wanted


def _steps_before_tiles(missing: Sequence[AnyStage]) -> list[str]:
    """Titles of the missing stages that are made before tiles are read, once each."""
    titles = [
        stage.title
        for stage in missing
        if isinstance(stage, SlideStage)
        or (isinstance(stage, TilesStage) and not stage.has_pixel_filters)
    ]
    return list(dict.fromkeys(titles))


def _unfinished_files(out: Path) -> dict[str, list[Path]]:
    """Files that killed processes left in the folders of all slides, by slide."""
    grids = [path for path in out.glob("*") if path.name not in (SLIDES, RECORDS)]
    return unfinished([folder for grid in grids for folder in grid.glob("*")])
