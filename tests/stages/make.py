"""A slide at work, without a run around it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinsection.slide import Slide, open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.stage import SlideWork, Stage
from thinsection.stages.tiles import TilesStage
from thinsection.store.identity import fingerprint, source_key
from thinsection.store.ledger import SlideLedger, load_ledger
from thinsection.tiles import TileTable


@dataclass(frozen=True)
class Opened:
    """A slide at work, opened."""

    work: SlideWork
    slide: Slide

    def perform(self, stage: Stage[Any]) -> None:
        """Runs a stage that reads the slide or the store, and records it."""
        self.work.perform(stage)


def open_work(path: Path, out: Path, *stages: Stage[Any]) -> Opened:
    """The slide, opened, with an empty ledger. Whoever asks closes it."""
    entry = SlideEntry(
        slide_id=path.stem, slide_path=str(path), patient_id="p7", label="LUAD"
    )
    source = source_key(fingerprint(path), entry)
    ledger = SlideLedger(out=out, slide_id=path.stem)
    work = SlideWork(entry=entry, out=out, source=source, ledger=ledger, stages=stages)
    slide = open_slide(path)
    work.note_opened(slide)
    return Opened(work, slide)


def attributes_of(opened: Opened, stage: TilesStage) -> dict[str, Any]:
    """Attributes of the files of a grid's tiles."""
    return stage.attributes(opened.work, opened.slide, opened.work.value(stage))


def lay_grid(opened: Opened, stage: TilesStage) -> TileTable:
    """Performs a grid whose tiles need no look at their px."""
    opened.work.perform(stage)
    return opened.work.value(stage)


def later(work: SlideWork, *, entry: SlideEntry | None = None) -> SlideWork:
    """The same slide in another process: only what is on disk, and the cohort's entry, is known."""
    return SlideWork(
        entry=entry or work.entry,
        out=work.out,
        source=work.source,
        ledger=load_ledger(work.out, work.entry.slide_id),
        stages=work.stages,
    )
