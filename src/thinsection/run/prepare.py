"""Prepares a slide before its tiles are read: claims it, opens it, and makes its tile grids."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from thinsection.errors import (
    BudgetError,
    InvalidInputError,
    OutputError,
    StoreError,
    ThinsectionError,
)
from thinsection.pool.encoder import SlideEncoder
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.stages.config import RunConfig
from thinsection.stages.stage import AnyStage, GridTiles, SlideWork
from thinsection.stages.tiles import TilesStage
from thinsection.store.identity import Identity, WholeFileHash, source_key
from thinsection.store.ledger import LEDGER_NAME, SLIDES, load_ledger
from thinsection.store.outcome import read_failure
from thinsection.store.tile_tables import RowMerger
from thinsection.tiles import TileTable
from thinsection.tiles.budget import MemoryAllowance
from thinsection.tiles.stream import Prepared, SlideFailed
from thinsection.tiles.transforms import StainConfig, StainStatistics, fit_stain
from thinsection.types import format_bytes


def load_work(
    entry: SlideEntry,
    stages: tuple[AnyStage, ...],
    *,
    out: Path,
    spec: RunConfig,
    slide_encoders: Mapping[str, SlideEncoder] | None = None,
) -> SlideWork:
    """Reads the ledger of a slide and finds the stages that are not done; takes no lock.

    Raises StoreError: the slide's file cannot be read; InvalidInputError: an annotation file is
    missing, or its corrections of quality control are not valid.
    """
    ledger = load_ledger(out, entry.slide_id)
    fingerprint_mode = spec.slides.fingerprint
    identity = Identity.read(entry.slide_path, ledger.source, fingerprint_mode)
    annotation_hashes = {
        stage.annotation_setting: stage.annotation_hash(entry, ledger)
        for stage in stages
        if stage.annotation_setting
    }
    source = source_key(identity.source, entry, annotation_hashes)
    work = SlideWork(
        entry=entry,
        out=out,
        source=source,
        ledger=ledger,
        stages=stages,
        overwrite=spec.output.overwrite,
        slide_encoders=slide_encoders,
        times="" if fingerprint_mode == "samples" else identity.times,
    )
    # `work.ledger` also has the facts of the cohort row; compare it with what is stored
    same_source = ledger.source == asdict(identity)
    same_cohort = ledger.slide == work.ledger.slide
    work.ledger = replace(work.ledger, source=asdict(identity))
    work.find_missing(resume=spec.output.resume)
    work.has_new_facts = bool(ledger.stages) and not (same_source and same_cohort)
    return work


def finished_work(
    entry: SlideEntry, stages: tuple[AnyStage, ...], *, out: Path, spec: RunConfig
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
        work = load_work(entry, stages, out=out, spec=spec)
        if not (work.missing or work.has_new_facts):
            return work
    return None


def check_quality(work: SlideWork) -> None:
    """Lets every stage check its result; one of them may raise QcExclusion."""
    for stage in work.stages:
        stage.judge(work)


@dataclass(frozen=True, kw_only=True)
class SlidePreparer:
    """Does the work on a slide that needs no tiles, and chooses the tiles to read.

    The stream's prepare thread calls it while other slides are decoded and encoded. If a slide
    lacks only results that are made from stored files, it is not opened. A bad slide comes back as
    `SlideFailed`.
    """

    slides: SlidesConfig
    stain: StainConfig
    grids: tuple[TilesStage, ...]  # all tile grids of the run
    # embedding dimension of each encoder, by the encoder's label
    dims: Mapping[str, int]
    # memory for images that are decoded whole; they wait until earlier ones are released
    memory_for_whole_images: MemoryAllowance
    # colours of stain normalisation; None if it is off
    stain_target: StainStatistics | None

    def __call__(self, work: SlideWork) -> list[Prepared[GridTiles]]:
        """Prepares a slide: an item for each grid with tiles to read.

        If one grid fails, the others are still read; `work.failure` then ends the slide.
        """
        slide = None
        parts: list[GridTiles] = []
        try:
            work.stage_title = "open"
            work.check_stale()
            if any(stage.reads != "store" for stage in work.missing):
                slide = _open(work, self.slides.reader, self.memory_for_whole_images)
                _check_resolutions(slide, self.grids)
                with slide.keeping_decoded(self._tile_levels(work, slide), work.out):
                    # tissue, quality control, segmentations
                    self._perform_ready(work)
            check_quality(work)
            if slide is not None:
                parts = self._make_grids(work, slide)
                # stages that read the slide and need a finished grid
                self._perform_ready(work)
            return self._stream_items(work, slide, parts)
        except OutputError:  # not the fault of one slide, so it ends the run
            raise
        except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded
            parts = []
            return [_failed(work, work.stage_title, error)]
        finally:
            # parts keep the slide open; without any (no tiles to read, or a failure) close it here
            if slide is not None and not parts:
                slide.close()

    def _tile_levels(self, work: SlideWork, slide: Slide) -> set[int]:
        """Levels from which tiles are read after the stages that need none."""
        levels = set()
        for grid in self.grids:
            reads_tiles = [
                stage
                for stage in work.missing
                if stage.reads == "tiles" and grid.has_in_folder(stage)
            ]
            if not reads_tiles:
                continue
            # `_check_resolutions` has raised the error of a slide that no grid fits
            with suppress(ThinsectionError):
                levels.add(grid.config.plan(slide).level)
        return {level for level in levels if level < len(slide.levels)}

    def _perform_ready(self, work: SlideWork) -> None:
        """Runs the missing stages that read the slide, without the grids.

        `_make_grids` makes the grids, since the error of one grid must not end the slide.
        """
        for stage in work.ready("slide"):
            if stage not in self.grids:
                work.perform(stage)

    def _make_grids(self, work: SlideWork, slide: Slide) -> list[GridTiles]:
        """Tiles to read of each grid; notes the first error of a grid."""
        parts = []
        for grid in self.grids:
            if not any(grid.has_in_folder(stage) for stage in work.missing):
                continue
            try:
                tiles = self._make_grid(work, slide, grid)
                if tiles.writers:
                    parts.append(tiles)
            except OutputError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of a grid; recorded
                work.failure = work.failure or (work.stage_title, error)
        self._normalise(work, slide, parts)
        return parts

    def _make_grid(self, work: SlideWork, slide: Slide, grid: TilesStage) -> GridTiles:
        """Tiles of a grid that the stream reads, and the writers of the results made from them."""
        work.stage_title = grid.title
        if grid in work.missing and grid.reads == "slide":
            work.perform(grid)
        # A grid with pixel filters reads 'tiles'. It stays missing until the stream has filtered
        # all its candidates.
        if grid in work.missing:
            table = grid.candidates(work, slide)
        else:
            table = work.value(grid)
            # take results of the same tiles that are stored under another grid's name
            for stage in list(work.missing):
                if stage.reads == "tiles" and grid.has_in_folder(stage):
                    output = stage.reuse(work, table)
                    if output is not None:
                        work.record(stage, output)
        stages = [
            stage
            for stage in work.missing
            if stage.reads == "tiles" and grid.has_in_folder(stage)
        ]
        attributes = grid.attributes(work, slide, table)
        stored_rows = _find_stored_rows(work, stages, table)
        if stored_rows:
            # the same tiles are stored for every stage, so any of the mergers tells which to read
            merger = next(iter(stored_rows.values()))
            table = table.select(merger.row_in_file < 0)
        tiles = GridTiles(
            slide=slide,
            table=table,
            work=work,
            attributes=attributes,
            dims=self.dims,
            stages=tuple(stages),
            stored_rows=stored_rows,
        )
        tiles.writers = tuple(stage.open(tiles) for stage in stages)
        tiles.measures = tuple(
            writer.measure for writer in tiles.writers if writer.reads_pixels
        )
        return tiles

    def _normalise(
        self, work: SlideWork, slide: Slide, parts: Sequence[GridTiles]
    ) -> None:
        """Sets the stain normalisation of a slide, which is the same for all grids."""
        read_parts = [part for part in parts if part.num_tiles]
        if self.stain_target is None or not read_parts:
            return
        tissue = work.value(self.grids[0].mask)
        transform = fit_stain(slide, tissue, self.stain, target=self.stain_target)
        for part in read_parts:
            part.transform = transform
            if transform.warning:
                part.notes = (transform.warning,)

    def _stream_items(
        self, work: SlideWork, slide: Slide | None, parts: Sequence[GridTiles]
    ) -> list[Prepared[GridTiles]]:
        """Items for the stream, with the first and the last marked; the last closes the slide.

        A slide without tiles to read gives one empty item. It gives a `SlideFailed` instead if a
        grid has failed and no stage is left to do.
        """
        items = list(parts)
        if not items:
            if work.failure is not None and not any(work.ready("store")):
                return [_failed(work, *work.failure)]
            items.append(GridTiles(slide=None, table=None, work=work))
        work.num_tiles = sum(item.num_tiles for item in items)
        for number, item in enumerate(items):
            item.is_first = number == 0
            item.is_last = number == len(items) - 1
            item.closes_slide = item.is_last
        if slide is not None and parts and slide.source is None:
            # `slide.source` is None for a local file; hash it completely if that was never done
            compares_times = self.slides.fingerprint == "times"
            if compares_times and not work.ledger.source["whole"]:
                work.file_hash_job = WholeFileHash(work.entry.slide_path)
        return [*items]


def _failed(work: SlideWork, stage: str, error: Exception) -> SlideFailed[GridTiles]:
    source = GridTiles(slide=None, table=None, work=work)
    return SlideFailed(source=source, stage=stage, error=error)


def _find_stored_rows(
    work: SlideWork, stages: Sequence[AnyStage], table: TileTable
) -> dict[str, RowMerger]:
    """Stored rows of embeddings by the address of their stage; empty unless every stage has some.

    If one stage lacks the row of a tile, the tile is encoded for all stages, since it is read once
    for all of them. If a stage has several files, the one that shares most tiles with the table is
    used.

    Memory: 200 bytes per tile of the table and of each file.
    """
    files = {
        stage.address: stage.stored_embedding_files(work, table) for stage in stages
    }
    if not all(files.values()):
        return {}
    stored_rows = {}
    for address, paths in files.items():
        mergers = [RowMerger(path, table.coords_l0) for path in paths]
        stored_rows[address] = min(mergers, key=lambda merger: merger.num_to_encode)
    to_encode = np.any(
        [merger.row_in_file < 0 for merger in stored_rows.values()], axis=0
    )
    for merger in stored_rows.values():
        merger.row_in_file[to_encode] = -1
    return stored_rows


def _open(
    work: SlideWork, reader: str, memory_for_whole_images: MemoryAllowance
) -> Slide:
    """Opens the slide. Raises BudgetError: decoded as a whole it would exceed the memory."""
    slide = work.entry.open(reader)
    try:
        work.note_opened(slide)
        held = slide.held_bytes
        if held > memory_for_whole_images.total:
            available = int(memory_for_whole_images.total)
            raise BudgetError(
                f"memory must leave {format_bytes(held)} for an image that is decoded as a "
                f"whole, got {format_bytes(available)} after the tile buffers in "
                f"{Path(slide.slide_path).name!r}; raise memory=..., lower batch_size=..., or "
                "convert the image to a tiled TIFF"
            )
        if held:
            slide.on_close.enter_context(memory_for_whole_images.taken(held))
    except BaseException:
        slide.close()
        raise
    return slide


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
