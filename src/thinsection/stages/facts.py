"""Facts of a slide for its ledger, the summary and the pages, as plain values."""

from collections.abc import Iterable

from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.store.ledger import SlideLedger
from thinsection.types import Document

OF_COHORTS = ("patient_id", "label", "split")


def slide_facts(slide: Slide, entry: SlideEntry, ledger: SlideLedger) -> Document:
    """Facts of an opened slide, without the columns that the ledger copies from the cohort."""
    mpp_x, mpp_y = slide.slide_mpp or (None, None)
    levels = [
        {"size": list(level.size), "downsample": level.downsample}
        for level in slide.levels
    ]
    facts: Document = {
        "slide_id": entry.slide_id,
        "slide_path": entry.slide_path,
        "reader": slide.reader,
        "width": slide.size[0],
        "height": slide.size[1],
        "levels": levels,
        "mpp_x": mpp_x,
        "mpp_y": mpp_y,
        "objective_power": slide.objective_power,
        "vendor": slide.vendor,
        "rendering": slide.rendering,
        "warnings": "; ".join(slide.notes),
    }
    for name in (*OF_COHORTS, "more"):
        facts[name] = ledger.slide.get(name)
    return facts


def ledger_facts(ledger: SlideLedger, addresses: Iterable[str]) -> Document:
    """Facts of the slide and of its stages; later stages win, and warnings are joined."""
    merged: Document = {}
    warnings = [ledger.damage]
    recorded = [ledger.stages[name] for name in addresses if name in ledger.stages]
    for facts in (ledger.slide, *(record.facts for record in recorded)):
        merged.update(facts)
        warnings.append(facts.get("warnings") or "")
    different = dict.fromkeys(text for text in warnings if text)
    return merged | {"warnings": "; ".join(different)}


def cohort_facts(entry: SlideEntry, ledger: SlideLedger) -> Document:
    """Columns of the cohort; `more` keeps columns that only an earlier cohort had."""
    facts = {name: getattr(entry, name) for name in OF_COHORTS}
    facts = {name: value for name, value in facts.items() if value is not None}
    return facts | {"more": {**ledger.slide.get("more", {}), **entry.more}}
