"""A slide at work, without a run around it."""

from pathlib import Path

from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.naming import slide_facts, tile_attributes
from thinsection.stages.stage import SlideWork, Stage, source_key
from thinsection.stages.tiles import TilesStage
from thinsection.store.ledger import SlideLedger, fingerprint, load_ledger
from thinsection.tiles import TileTable


def work_of(path: Path, out: Path, *stages: Stage) -> SlideWork:
    """The slide, opened, with an empty ledger. Whoever asks closes it."""
    entry = SlideEntry(slide_id=path.stem, slide_path=str(path), patient_id="p7", label="LUAD")
    source = source_key(fingerprint(path), entry)
    ledger = SlideLedger(out=out, slide_id=path.stem)
    work = SlideWork(entry=entry, out=out, source=source, ledger=ledger, stages=stages)
    slide = open_slide(path)
    work.opened(slide, slide_facts(entry, slide))
    return work


def lay_grid(work: SlideWork, stage: TilesStage) -> TileTable:
    """Performs a grid whose tiles need no look at their px."""
    assert work.slide is not None
    table = stage.candidates(work)
    work.attributes = tile_attributes(work.entry, work.slide, table, overlap=stage.config.overlap)
    work.begin(stage)
    work.finish(stage, stage.write(work, table))
    return table


def later(work: SlideWork) -> SlideWork:
    """The same slide in another process: only what is on disk is known."""
    return SlideWork(
        entry=work.entry,
        out=work.out,
        source=work.source,
        ledger=load_ledger(work.out, work.entry.slide_id),
        stages=work.stages,
    )
