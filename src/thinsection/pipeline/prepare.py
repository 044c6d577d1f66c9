"""One slide from its file to the tiles that are still to be read: what comes before the stream."""

from thinsection.slide import open_slide
from thinsection.stages.config import RunConfig
from thinsection.stages.features import FeaturesStage
from thinsection.stages.masks import QcStage
from thinsection.stages.stage import SlideWork
from thinsection.stages.tiles import TilesStage
from thinsection.store.tiles_h5 import tile_attributes
from thinsection.stream import SlideFailed, SlideTiles
from thinsection.tiles import TileTable
from thinsection.tiles.transforms import StainLook, fit_stain


def prepare(
    work: SlideWork, config: RunConfig, *, target: StainLook | None
) -> SlideTiles | SlideFailed:
    """Does what needs the slide but no tiles, and says which tiles are to be read.

    Runs in the stream's prepare thread while other slides are decoded and encoded. A slide that
    lacks only what is made from stored files is not opened. A bad slide comes back as
    `SlideFailed`.

    Args:
        work: under the slide's lock, with what is missing.
        config: of the run.
        target: of stain normalisation; None where it is off.
    """
    try:
        work.at = "open"
        work.check_stale()
        if all(stage.reads == "store" for stage in work.missing):
            check_quality(work)
            return SlideTiles(key=work, slide=None, table=None)
        entry = work.entry
        slide = open_slide(entry.slide_path, reader=config.slides.reader, slide_mpp=entry.slide_mpp)
        work.opened(slide)
        grid = next((s for s in work.stages if isinstance(s, TilesStage)), None)
        if grid is not None:  # a missing mpp is said before any pixel is read
            grid.config.plan(slide)
        masks = [s for s in work.missing if s.reads == "slide" and not isinstance(s, TilesStage)]
        for stage in masks:
            work.perform(stage)
        check_quality(work)
        if grid is None:
            return _nothing_to_read(work)
        return _tiles(work, grid, config, target)
    except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded with its traceback
        if work.slide is not None:
            work.slide.close()
        return SlideFailed(key=work, stage=work.at, error=error)


def check_quality(work: SlideWork) -> None:
    """Leaves the slide out where a rule of the run's quality control holds.

    Raises:
        QcExclusion: names the rule and the value.
    """
    for stage in work.stages:
        if isinstance(stage, QcStage) and stage.rules:
            work.at = stage.title
            stage.check_rules(work)


def _tiles(
    work: SlideWork, grid: TilesStage, config: RunConfig, target: StainLook | None
) -> SlideTiles:
    """The grid, and which of its tiles are read."""
    work.at = grid.title
    slide = work.slide
    assert slide is not None
    streamed = grid in work.missing and grid.reads == "tiles"
    table: TileTable
    if streamed:
        table = work.values["candidates"] = grid.candidates(work)
    elif grid in work.missing:
        table = grid.candidates(work)
    else:
        table = work.value(grid)
    overlap = grid.config.overlap
    work.attributes = tile_attributes(work.entry.slide_id, slide, table, overlap=overlap)
    if grid in work.missing and not streamed:
        work.begin(grid)
        work.finish(grid, grid.write(work, table))
    if not streamed:
        for stage in [s for s in work.missing if isinstance(s, FeaturesStage)]:
            found = stage.reuse(work, table)
            if found is not None:
                work.finish(stage, found)
    if not any(stage.reads == "tiles" for stage in work.missing):
        return _nothing_to_read(work)
    transform = None
    if target is not None and len(table):
        transform = fit_stain(slide, work.value(grid.mask), config.stain, target=target)
        if transform.warning:
            work.warnings.append(transform.warning)
    return SlideTiles(key=work, slide=slide, table=table, transform=transform)


def _nothing_to_read(work: SlideWork) -> SlideTiles:
    """For a slide whose tiles nobody needs: it is closed at once."""
    assert work.slide is not None
    work.slide.close()
    return SlideTiles(key=work, slide=None, table=None)
