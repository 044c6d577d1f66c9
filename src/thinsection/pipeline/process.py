"""A chunk of slides through one process: claim, prepare, stream, encode, write."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.errors import (
    BudgetError,
    InvalidInputError,
    OutputError,
    StoreError,
    require,
)
from thinsection.files.atomic import writing
from thinsection.files.lock import (
    LOCK_NAME,
    FileLock,
    heartbeat,
    sweep_slide,
    unfinished,
)
from thinsection.pipeline import results as tables
from thinsection.pipeline.models import LoadedModels
from thinsection.pipeline.records import RECORDS
from thinsection.pipeline.results import SlideResult, Status, record_failure
from thinsection.pipeline.sink import Item, ResultSink, encoder_of
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.graph import Models, stages_of
from thinsection.stages.leaves import MeasuresStage
from thinsection.stages.masks import QcStage
from thinsection.stages.regions import drawn_sums
from thinsection.stages.spec import RunSpec
from thinsection.stages.stage import SlideWork, Stage, source_key
from thinsection.stages.tiles import (
    FeaturesStage,
    TilesStage,
    TokensStage,
    unknown_tiles,
)
from thinsection.store.identity import Identity, WholeSum, file_times
from thinsection.store.ledger import SLIDES, load_ledger
from thinsection.store.tiles_h5 import tile_attributes
from thinsection.stream import StageClock, TileBatch, TileStream
from thinsection.stream.batches import (
    Scratch,
    SlideFailed,
    SlideFinished,
    SlideStarted,
    SlideTiles,
)
from thinsection.tiles import TileTable, load_filters
from thinsection.tiles.transforms import StainLook, fit_stain
from thinsection.types import format_bytes, parse_bytes
from thinsection.usage.analysis import held_up

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.encode.embed import BatchEncoder, Wanted

_POLL_S = 1.0  # how often a slide that another process holds is looked at again


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Progress of a run; may be emitted from any thread."""

    kind: (
        str  # opening, started, tiles, ended; waiting: another process holds the slide
    )
    slide_id: str
    num_tiles: int = 0  # of 'started': to come; of 'tiles': done
    # of 'opening': what is done before tiles are; of 'tiles': what sets their pace;
    # of 'waiting': who holds the slide
    text: str = ""
    result: SlideResult | None = None  # of 'ended'


OnEvent = Callable[[RunEvent], None]


@dataclass(kw_only=True)
class SlideJob:
    """Slides through one process up to a goal; any number of them may work on one folder.

    Memory: the stream's budget, the encoders, and one slide's embeddings while it is pooled.
    """

    out: Path  # results folder
    spec: RunSpec
    models: LoadedModels
    clock: StageClock = field(
        default_factory=StageClock
    )  # where busy and waiting time is added up
    on_event: OnEvent = lambda event: None  # progress, from any thread
    stages: tuple[Stage, ...] = field(init=False)
    results: dict[str, SlideResult] = field(default_factory=dict, init=False)
    locks: dict[str, FileLock] = field(default_factory=dict, init=False)
    held_elsewhere: list[SlideEntry] = field(default_factory=list, init=False)
    foreign_locks: dict[str, FileLock] = field(
        default_factory=dict, init=False
    )  # of slides that others hold: each watches whether its lock is touched
    told_holders: dict[str, str] = field(default_factory=dict, init=False)
    ending: bool = field(default=False, init=False)  # no further slide is begun
    claimed: dict[str, float] = field(
        default_factory=dict, init=False
    )  # when slides were begun
    ended_at: float = field(default=0.0, init=False)  # when the last one ended

    def __post_init__(self) -> None:
        self.stages = stages_of(self.spec, self.models.identities)

    def process(self, entries: Sequence[SlideEntry]) -> list[SlideResult]:
        """A result per slide, in their order; a bad one is a failed result, never an exception."""
        with heartbeat(self.locks.values()):
            self._pass(entries)
            while waiting := self.held_elsewhere:
                for entry in waiting:
                    self._tell_waiting(entry)
                threading.Event().wait(_POLL_S)
                self._pass(waiting)
        return [self.results[entry.slide_id] for entry in entries]

    def _tell_waiting(self, entry: SlideEntry) -> None:
        """Says who holds a slide, once for each slide and holder."""
        lock = self.foreign_locks[entry.slide_id]
        holder = str(lock.owner())
        if self.told_holders.get(entry.slide_id) == holder:
            return
        self.told_holders[entry.slide_id] = holder
        self.on_event(
            RunEvent(kind="waiting", slide_id=entry.slide_id, text=lock.describe())
        )

    def _pass(self, entries: Sequence[SlideEntry]) -> None:
        """One pass over slides; those that others hold are left in `held_elsewhere`."""
        self.held_elsewhere = []
        encoders, batches, allocate = self.models.encoders, None, None
        if encoders:
            from thinsection.encode import embed

            batches = embed.BatchEncoder(encoders, clock=self.clock)
            allocate = embed.pinned_allocator(encoders)
        on_gpu = any(encoder.device.type != "cpu" for encoder in encoders)
        batch_size = self.spec.batch_size(on_gpu=on_gpu)
        budget = self.spec.stream_budget(batch_size)
        taken = budget.slots * budget.batch_bytes + budget.scratch_bytes
        wholes = Scratch(parse_bytes(self.spec.stream.memory) - taken)
        stream = TileStream(
            self._claim(entries),
            partial(
                prepare,
                spec=self.spec,
                wholes=wholes,
                target=self.models.identities.stain_target,
            ),
            budget=budget,
            batch_size=batch_size,
            allocate=allocate,
            filters=load_filters(self.spec.tiles.tile_filter),
            prefetch_slides=self.spec.stream.prefetch_slides,
            clock=self.clock,
        )
        dims = {encoder.label: encoder.dim for encoder in encoders}
        with (
            ResultSink(dims=dims, on_end=self._ended, clock=self.clock) as sink,
            stream,
        ):
            try:
                self._pump(stream, batches, sink)
            except BaseException:
                self.ending = True
                raise

    def _pump(
        self, stream: TileStream, batches: "BatchEncoder | None", sink: ResultSink
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
                self._tell(
                    "tiles", item.key, len(item.indices), held_up(self.clock.seconds())
                )
                item.key.warnings += [
                    n for n in item.notes if n not in item.key.warnings
                ]
            sink.put(item)

    def _tell(self, kind: str, work: SlideWork, num_tiles: int, text: str = "") -> None:
        slide_id = work.entry.slide_id
        self.on_event(
            RunEvent(kind=kind, slide_id=slide_id, num_tiles=num_tiles, text=text)
        )

    def _claim(self, entries: Sequence[SlideEntry]) -> Iterator[SlideWork]:
        """Slides that are not done and that nobody else holds; runs in the prepare thread."""
        left: dict[str, list[Path]] | None = (
            None  # what killed processes left in shared folders
        )
        for entry in entries:
            if self.ending:
                return
            path = self.out / SLIDES / entry.slide_id / LOCK_NAME
            lock = self.foreign_locks.pop(entry.slide_id, FileLock(path))
            try:
                if not lock.acquire():
                    self.foreign_locks[entry.slide_id] = lock
                    self.held_elsewhere.append(entry)
                    continue
                self.locks[entry.slide_id] = lock
                self.claimed[entry.slide_id] = time.monotonic()
                if left is None:
                    grids = [
                        p for p in self.out.glob("*") if p.name not in (SLIDES, RECORDS)
                    ]
                    left = unfinished(
                        [folder for grid in grids for folder in grid.glob("*")]
                    )
                with writing(lock.path):
                    sweep_slide(entry.slide_id, lock.path.parent, left)
                work = slide_work(entry, self.stages, self.out, self.spec)
                work.slide_encoders = {
                    encoder.name: encoder for encoder in self.models.slide_encoders
                }
            except OutputError:
                raise
            except (StoreError, InvalidInputError) as error:
                self._end(entry, record_failure(self.out, entry, "open", error))
                continue
            if work.missing:
                titles = dict.fromkeys(
                    s.title for s in work.missing if s.reads == "slide"
                )
                self._tell("opening", work, 0, ", ".join(titles) or "what is stored")
                yield work
                continue
            failure: Exception | None = None
            try:
                if work.ledger_is_old:  # so that every byte is compared once only
                    work.ledger.save(keep_time=work.ledger.path.exists())
                check_quality(work)
            except OutputError:
                raise
            except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded
                failure = error
            self._ended(work, work.at, failure, status="skipped")

    def _ended(
        self,
        work: SlideWork,
        stage: str,
        error: Exception | None,
        *,
        status: Status = "done",
    ) -> None:
        entry = work.entry
        work.drop_kept()
        if error is not None:
            error.add_note(f"slide {entry.slide_id!r}, stage {stage}")
            self._end(entry, record_failure(self.out, entry, stage, error))
            return
        with writing(self.out):  # one of an earlier run
            tables.failure_path(self.out, entry.slide_id).unlink(missing_ok=True)
        self._end(
            entry, SlideResult.of(entry, status, facts=work.facts() | work.fetched())
        )

    def _end(self, entry: SlideEntry, result: SlideResult) -> None:
        if lock := self.locks.pop(entry.slide_id, None):
            lock.release()
        now = time.monotonic()
        if (
            result.status != "skipped"
        ):  # slides overlap: what this one took beyond the one before
            begun = max(self.ended_at, self.claimed.get(entry.slide_id, now))
            result = replace(result, seconds=round(now - begun, 2))
        self.ended_at, self.results[entry.slide_id] = now, result
        self.on_event(RunEvent(kind="ended", slide_id=entry.slide_id, result=result))


def prepare(
    work: SlideWork, spec: RunSpec, wholes: Scratch, *, target: StainLook | None
) -> SlideTiles | SlideFailed:
    """Does what needs the slide but no tiles, and says which tiles are to be read.

    Runs in the stream's prepare thread while other slides are decoded and encoded. A slide that
    lacks only what is made from stored files is not opened. A bad slide comes back as
    `SlideFailed`. `target` is of stain normalisation; None where it is off. `wholes` is the memory
    for images that are decoded whole: they wait for those before them.
    """
    grid = next((stage for stage in work.stages if isinstance(stage, TilesStage)), None)
    tiles = None
    try:
        work.at = "open"
        work.check_stale()
        if any(stage.reads != "store" for stage in work.missing):
            _open(work, spec.slides.reader, grid, wholes)
        check_quality(work)
        if work.slide is not None and grid is not None:
            tiles = _tiles(work, grid, spec, target)
        return tiles or SlideTiles(key=work, slide=None, table=None)
    except OutputError:  # no slide's own: it ends the run
        raise
    except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded with its traceback
        return SlideFailed(key=work, stage=work.at, error=error)
    finally:
        if (
            work.slide is not None and tiles is None
        ):  # nobody needs its tiles: closed at once
            work.slide.close()


def check_quality(work: SlideWork) -> None:
    """Raises QcExclusion where a rule of the run's quality control holds: rule and value."""
    for stage in work.stages:
        if isinstance(stage, QcStage) and stage.rules:
            work.at = stage.title
            stage.check_rules(work)


def _open(
    work: SlideWork, reader: str, grid: TilesStage | None, wholes: Scratch
) -> None:
    """Opens the slide, finds its tissue. BudgetError: decoded whole it would exceed the memory."""
    slide = work.entry.open(reader)
    work.opened(slide)
    held, name = slide.held_bytes, Path(slide.slide_path).name
    rule = f"memory must leave {format_bytes(held)} for an image that is decoded whole"
    got = f"{format_bytes(int(wholes.total))} beside the tiles in {name!r}"
    got += "; raise --memory, lower --batch-size, or convert it to a tiled TIFF"
    require(held <= wholes.total, rule, got, error=BudgetError)
    if held:
        slide.on_close.enter_context(wholes.taken(held))
    if grid is not None:
        grid.config.plan(slide)  # a missing mpp is said before any pixel is read
    for stage in [s for s in work.missing if s.reads == "slide" and s is not grid]:
        work.perform(stage)


def _tiles(
    work: SlideWork, grid: TilesStage, spec: RunSpec, target: StainLook | None
) -> SlideTiles | None:
    """The grid, and which of its tiles are read; None where none is."""
    work.at, slide, missing = grid.title, work.slide, grid in work.missing
    assert slide is not None
    streamed = missing and grid.reads == "tiles"
    table: TileTable = grid.candidates(work) if missing else work.value(grid)
    work.attributes = tile_attributes(
        work.entry.slide_id, slide, table, config=grid.config
    )
    if streamed:
        work.values["candidates"] = table
    elif missing:
        work.record(grid, lambda: grid.write(work, table))
    for stage in [
        s for s in work.missing if isinstance(s, FeaturesStage) and not streamed
    ]:
        if (found := stage.reuse(work, table)) is not None:
            work.finish(stage, found)
    wanting = [stage for stage in work.missing if stage.reads == "tiles"]
    if not wanting:
        return None
    embedding = [stage for stage in wanting if isinstance(stage, FeaturesStage)]
    if embedding == wanting:
        table = unknown_tiles(work, embedding, table)
    transform = None
    if target is not None and len(table):
        tissue = work.value(grid.mask)
        transform = fit_stain(slide, tissue, spec.encoding.stain, target=target)
        if transform.warning:
            work.warnings.append(transform.warning)
    if not work.ledger.source["whole"] and spec.slides.fingerprint == "times":
        work.hashing = None if work.remote else WholeSum(work.entry.slide_path)
    measures = next((s for s in work.missing if isinstance(s, MeasuresStage)), None)
    measure = measures.begin(work, table) if measures else None
    return SlideTiles(
        key=work, slide=slide, table=table, transform=transform, measure=measure
    )


def slide_work(
    entry: SlideEntry, stages: tuple[Stage, ...], out: Path, spec: RunSpec
) -> SlideWork:
    """A slide as its ledger tells it, with what is missing of these stages.

    Raises StoreError: the slide's file cannot be read; InvalidInputError: nobody drew on it.
    """
    ledger, options = load_ledger(out, entry.slide_id), spec.output
    compares_times = spec.slides.fingerprint != "samples"
    times = file_times(entry.slide_path) if compares_times else ""
    identity = Identity.of(entry.slide_path, ledger.source, spec.slides.fingerprint)
    source = source_key(identity.source, entry, drawn_sums(spec.regions, entry))
    work = SlideWork(entry=entry, out=out, source=source, ledger=ledger, stages=stages)
    work.times = times
    known_source = ledger.source == asdict(identity)
    known_cohort = ledger.slide == work.ledger.slide
    work.ledger_is_old = bool(ledger.stages) and not (known_source and known_cohort)
    work.ledger, work.overwrite = (
        replace(work.ledger, source=asdict(identity)),
        options.overwrite,
    )
    work.missing = [
        stage for stage in stages if not options.resume or not work.done(stage)
    ]
    return work


def skipped_result(
    entry: SlideEntry, *, out: Path, spec: RunSpec, models: Models | None = None
) -> SlideResult | None:
    """The result of a slide that is done with the same settings and file; None where it is not.

    Without `models`: for goals that need none. Rules of quality control are for whoever has the
    slide's lock.
    """
    if not spec.qc.qc_fail and tables.read_failure(out, entry.slide_id) is None:
        with suppress(StoreError, InvalidInputError):
            stages = stages_of(spec, models or Models())
            work = slide_work(entry, stages, out, spec)
            if not (work.missing or work.ledger_is_old):
                return SlideResult.of(entry, "skipped", facts=work.facts())
    return None


def wanted_of(work: SlideWork, encoders: Sequence["TileEncoder"]) -> list["Wanted"]:
    """What a slide lacks of each encoder: '' nothing, 'embeddings', or 'tokens' for both."""
    lacks = [
        {type(s) for s in work.missing if encoder_of(s) == e.label} for e in encoders
    ]
    return [
        "tokens" if TokensStage in of else "embeddings" if of else "" for of in lacks
    ]
