"""Prepares a slide before its tiles are read: claims it, opens it, and lays its tile grid."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from thinsection.errors import (
    BudgetError,
    InvalidInputError,
    OutputError,
    QcExclusion,
    StoreError,
    ThinsectionError,
)
from thinsection.pipeline.results import SlideResult, read_failure
from thinsection.pipeline.slide_states import ClaimedSlide, PreparedSlide
from thinsection.pool.encoder import SlideEncoder
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.features import FeaturesStage, find_known_rows
from thinsection.stages.leaves import QcOverlayStage
from thinsection.stages.masks import QcStage
from thinsection.stages.measures import MeasuresStage, TileMeasures
from thinsection.stages.regions import annotation_sums
from thinsection.stages.source import source_key
from thinsection.stages.spec import RunSpec
from thinsection.stages.stage import (
    AnyStage,
    SlideStage,
    SlideWork,
    StoreStage,
    TileStage,
)
from thinsection.stages.tiles import TilesStage
from thinsection.store.identity import Identity, WholeSum
from thinsection.store.ledger import LEDGER_NAME, SLIDES, load_ledger
from thinsection.store.tiles_h5 import tile_attributes
from thinsection.stream.batches import Prepared, SlideFailed, SlideTiles
from thinsection.stream.threads import MemoryAllowance
from thinsection.tiles import TileTable
from thinsection.tiles.transforms import StainLook, fit_stain
from thinsection.types import format_bytes


def claim_slide(
    entry: SlideEntry,
    stages: tuple[AnyStage, ...],
    *,
    out: Path,
    spec: RunSpec,
    slide_encoders: Mapping[str, SlideEncoder] | None = None,
) -> ClaimedSlide:
    """Slide with its ledger, and the list of stages that are not done.

    Raises StoreError: the slide's file cannot be read; InvalidInputError: it has no drawing.
    """
    ledger = load_ledger(out, entry.slide_id)
    fingerprint = spec.slides.fingerprint
    identity = Identity.read(entry.slide_path, ledger.source, fingerprint)
    source = source_key(identity.source, entry, annotation_sums(spec.regions, entry))
    work = SlideWork(
        entry=entry,
        out=out,
        source=source,
        ledger=ledger,
        stages=stages,
        overwrite=spec.output.overwrite,
        slide_encoders=slide_encoders,
    )
    same_source = ledger.source == asdict(identity)
    same_cohort = ledger.slide == work.ledger.slide
    work.ledger = replace(work.ledger, source=asdict(identity))
    work.find_missing(resume=spec.output.resume)
    return ClaimedSlide(
        work=work,
        times="" if fingerprint == "samples" else identity.times,
        ledger_is_old=bool(ledger.stages) and not (same_source and same_cohort),
    )


def finished_work(
    entry: SlideEntry, stages: tuple[AnyStage, ...], *, out: Path, spec: RunSpec
) -> SlideWork | None:
    """Work of a slide that is done with the same settings and file; None if it is not done.

    `stages` are all stages of the run. Rules of quality control are not checked here, as that
    needs the slide's lock. Nothing is read of a slide without earlier results.
    """
    if not (out / SLIDES / entry.slide_id / LEDGER_NAME).is_file():
        return None
    if spec.qc.qc_fail or read_failure(out, entry.slide_id) is not None:
        return None
    with suppress(StoreError, InvalidInputError):
        claimed = claim_slide(entry, stages, out=out, spec=spec)
        if not (claimed.work.missing or claimed.ledger_is_old):
            return claimed.work
    return None


def skipped_result(work: SlideWork) -> SlideResult:
    """Result of `finished_work`."""
    return SlideResult.of(work.entry, "skipped", work.facts())


def check_quality(work: SlideWork) -> None:
    """Raises QcExclusion, with rule and value, if a quality-control rule of the run applies.

    An excluded slide gets no overview, so the marks of the checks are drawn here.
    """
    for stage in work.stages:
        if not isinstance(stage, QcStage) or not stage.rules:
            continue
        work.stage_title = stage.title
        try:
            stage.check_rules(work)
        except QcExclusion:
            overlay = QcOverlayStage(qc=stage)
            if not work.is_done(overlay):
                work.perform(overlay)
            work.stage_title = stage.title
            raise


@dataclass(frozen=True, kw_only=True)
class SlidePreparer:
    """Does the work on a slide that needs no tiles, and chooses the tiles to read.

    The stream's prepare thread calls it while other slides are decoded and encoded. If a slide
    lacks only results that are made from stored files, it is not opened. A bad slide comes back as
    `SlideFailed`.
    """

    spec: RunSpec
    # memory for images that are decoded whole; they wait until earlier ones are released
    memory_for_whole_images: MemoryAllowance
    # colours of stain normalisation; None if it is off
    stain_target: StainLook | None

    def __call__(self, claimed: ClaimedSlide) -> list[Prepared[PreparedSlide]]:
        """Prepares a slide: an item for each grid with tiles to read, then the error, if any."""
        work = claimed.work
        slide = None
        parts: list[SlideTiles[PreparedSlide]] = []
        try:
            work.stage_title = "open"
            work.check_stale()
            grids = [stage for stage in work.stages if isinstance(stage, TilesStage)]
            failure = None
            if not all(isinstance(stage, StoreStage) for stage in work.missing):
                slide = _open(
                    work, self.spec.slides.reader, self.memory_for_whole_images
                )
                _read_slide(work, slide, grids)
            check_quality(work)
            if slide is not None:
                parts, failure = self._lay_grids(claimed, slide, grids)
            return self._in_order(claimed, slide, parts, failure)
        except OutputError:  # not the fault of one slide, so it ends the run
            raise
        except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded
            parts = []
            return [_failed(claimed, error)]
        finally:
            if slide is not None and not parts:  # no stage needs its tiles
                slide.close()

    def _lay_grids(
        self, claimed: ClaimedSlide, slide: Slide, grids: Sequence[TilesStage]
    ) -> tuple[list[SlideTiles[PreparedSlide]], SlideFailed[PreparedSlide] | None]:
        """Tiles to read of each grid, and the first error of a grid; the others are still read."""
        parts = []
        failure = None
        for grid in grids:
            if not any(grid.holds(stage) for stage in claimed.work.missing):
                continue
            try:
                prepared = _lay_grid(claimed, slide, grid)
                if prepared.streamed_stages:
                    parts.append(_tiles_to_read(prepared, slide))
            except OutputError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of a grid; recorded
                failure = failure or _failed(claimed, error)
        self._normalise(parts)
        return parts, failure

    def _normalise(self, parts: Sequence[SlideTiles[PreparedSlide]]) -> None:
        """Sets the stain normalisation of a slide, which is the same for all grids."""
        read_parts = [part for part in parts if part.num_tiles]
        if self.stain_target is None or not read_parts:
            return
        first = read_parts[0]
        work = first.key.work
        grid = next(stage for stage in work.stages if isinstance(stage, TilesStage))
        tissue = work.value(grid.mask)
        stain = self.spec.encoding.stain
        assert first.slide is not None
        transform = fit_stain(first.slide, tissue, stain, target=self.stain_target)
        for part in read_parts:
            part.transform = transform
            if transform.warning:
                part.key = replace(part.key, warnings=(transform.warning,))

    def _in_order(
        self,
        claimed: ClaimedSlide,
        slide: Slide | None,
        parts: Sequence[SlideTiles[PreparedSlide]],
        failure: SlideFailed[PreparedSlide] | None,
    ) -> list[Prepared[PreparedSlide]]:
        """Parts of a slide, of which the last closes it, and the error of a grid."""
        work = claimed.work
        items = list(parts)
        if not items and (failure is None or any(work.ready_stages())):
            prepared = PreparedSlide(claimed=claimed, slide=slide)
            items.append(SlideTiles(key=prepared, slide=None, table=None))
        num_tiles = sum(item.num_tiles for item in items)
        for place, item in enumerate(items):
            is_end = place == len(items) - 1
            item.owned = is_end
            item.key = replace(
                item.key,
                num_tiles_of_slide=num_tiles if place == 0 else None,
                is_last=is_end and failure is None,
            )
        if slide is not None and parts and self._hashes_whole(work, slide):
            whole_sum = WholeSum(work.entry.slide_path)
            items[-1].key = replace(items[-1].key, whole_sum=whole_sum)
        return [*items, failure] if failure is not None else [*items]

    def _hashes_whole(self, work: SlideWork, slide: Slide) -> bool:
        """True for a local file that was never hashed completely."""
        compares_times = self.spec.slides.fingerprint == "times"
        return (
            compares_times and slide.source is None and not work.ledger.source["whole"]
        )


def _tiles_to_read(prepared: PreparedSlide, slide: Slide) -> SlideTiles[PreparedSlide]:
    """Tiles of a grid that the stream reads, and how it measures them."""
    work = prepared.work
    table = prepared.table
    assert table is not None
    features = [s for s in prepared.streamed_stages if isinstance(s, FeaturesStage)]
    if len(features) == len(prepared.streamed_stages):
        known_rows = find_known_rows(work, features, table)
        prepared = replace(prepared, known_rows=known_rows)
        if known_rows:
            # all of them lack the same tiles
            first = known_rows[features[0].address]
            table = table.select(first.lacking)
    if any(isinstance(stage, MeasuresStage) for stage in prepared.streamed_stages):
        measures = TileMeasures(num_tiles=len(table), tile_px=table.plan.tile_px)
        prepared = replace(prepared, measures=measures)
    return SlideTiles(
        key=prepared,
        slide=slide,
        table=table,
        measure=prepared.measures,
    )


def _failed(claimed: ClaimedSlide, error: Exception) -> SlideFailed[PreparedSlide]:
    """The error of a slide, in the stage at work."""
    failed = PreparedSlide(claimed=claimed)
    return SlideFailed(key=failed, stage=claimed.work.stage_title, error=error)


def _open(
    work: SlideWork, reader: str, memory_for_whole_images: MemoryAllowance
) -> Slide:
    """Opens the slide. Raises BudgetError: decoded as a whole it would exceed the memory."""
    slide = work.entry.open(reader)
    try:
        work.note_metadata(slide)
        held = slide.held_bytes
        if held > memory_for_whole_images.total:
            available = int(memory_for_whole_images.total)
            raise BudgetError(
                f"memory must leave {format_bytes(held)} for an image that is decoded as a "
                f"whole, got {format_bytes(available)} beside the tiles in "
                f"{Path(slide.slide_path).name!r}; raise --memory, lower --batch-size, or "
                "convert the image to a tiled TIFF"
            )
        if held:
            slide.on_close.enter_context(memory_for_whole_images.taken(held))
    except BaseException:
        slide.close()
        raise
    return slide


def _read_slide(work: SlideWork, slide: Slide, grids: Sequence[TilesStage]) -> None:
    """Runs missing stages that read the slide: tissue or quality control, regions, networks."""
    _check_resolutions(slide, grids)
    for stage in list(work.missing):
        if isinstance(stage, SlideStage):
            work.perform_on(slide, stage)


def _check_resolutions(slide: Slide, grids: Sequence[TilesStage]) -> None:
    """Raises an error before any pixel is read if no grid fits the slide's resolution."""
    errors = []
    for grid in grids:
        try:
            grid.config.plan(slide)
        except ThinsectionError as error:
            errors.append(error)
    if errors and len(errors) == len(grids):
        raise errors[0]


def _lay_grid(claimed: ClaimedSlide, slide: Slide, grid: TilesStage) -> PreparedSlide:
    """Slide with its grid, and the stages that its tiles feed."""
    work = claimed.work
    work.stage_title = grid.title
    is_missing = grid in work.missing
    table = grid.candidates(work, slide) if is_missing else work.value(grid)
    attributes = tile_attributes(work.entry.slide_id, slide, table, config=grid.config)
    streamed: list[AnyStage] = []
    if is_missing and grid.has_pixel_filters:
        streamed.append(grid)
    elif is_missing:
        work.make_and_record(grid, lambda: grid.write(work, slide, table, attributes))
    if not streamed:
        _reuse_files(work, grid, table)
    for stage in work.missing:
        if isinstance(stage, TileStage) and grid.holds(stage):
            streamed.append(stage)
    return PreparedSlide(
        claimed=claimed,
        slide=slide,
        table=table,
        attributes=attributes,
        streamed_stages=tuple(streamed),
    )


def _reuse_files(work: SlideWork, grid: TilesStage, table: TileTable) -> None:
    """Reuses embeddings of the same tiles that are stored under another grid's name."""
    for stage in list(work.missing):
        if isinstance(stage, FeaturesStage) and stage.tiles == grid:
            output = stage.reuse(work, table)
            if output is not None:
                work.record(stage, output)
