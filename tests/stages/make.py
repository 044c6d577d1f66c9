"""A slide at work, without a run around it."""

from pathlib import Path

from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.stage import SlideWork, Stage, source_key
from thinsection.stages.tiles import TilesStage
from thinsection.store.identity import fingerprint
from thinsection.store.ledger import SlideLedger, load_ledger
from thinsection.store.tiles_h5 import tile_attributes
from thinsection.tiles import TileTable


def work_of(path: Path, out: Path, *stages: Stage) -> SlideWork:
    """The slide, opened, with an empty ledger. Whoever asks closes it."""
    entry = SlideEntry(
        slide_id=path.stem, slide_path=str(path), patient_id="p7", label="LUAD"
    )
    source = source_key(fingerprint(path), entry)
    ledger = SlideLedger(out=out, slide_id=path.stem)
    work = SlideWork(entry=entry, out=out, source=source, ledger=ledger, stages=stages)
    work.opened(open_slide(path))
    return work


def lay_grid(work: SlideWork, stage: TilesStage) -> TileTable:
    """Performs a grid whose tiles need no look at their px."""
    assert work.slide is not None
    table = stage.candidates(work)
    slide_id, config = work.entry.slide_id, stage.config
    work.attributes = tile_attributes(slide_id, work.slide, table, config=config)
    work.begin(stage)
    work.finish(stage, stage.write(work, table))
    return table


def later(work: SlideWork, *, entry: SlideEntry | None = None) -> SlideWork:
    """The same slide in another process: only what is on disk, and the cohort's entry, is known."""
    return SlideWork(
        entry=entry or work.entry,
        out=work.out,
        source=work.source,
        ledger=load_ledger(work.out, work.entry.slide_id),
        stages=work.stages,
    )
