"""Identity of a slide's pixels, and its facts for ledger, summary and pages, as plain values."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from thinsection.slide import Slide
from thinsection.slide.annotations import ROLES, RegionsConfig
from thinsection.slide.cohort import SlideEntry
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, SlideLedger, stage_key
from thinsection.types import Document


@dataclass(frozen=True, kw_only=True)
class Source:
    """Identity of a slide's pixels, and hashes of its annotation files."""

    key: str
    # hash of the annotation of each setting: 'tissue', 'roi'
    annotation_hashes: Mapping[str, str] = field(default_factory=dict)


def annotation_sums(config: RegionsConfig, entry: SlideEntry) -> dict[str, str]:
    """Hash of the annotation file of a slide, by role. Raises InvalidInputError: there is none."""
    return {
        role: file_sum(config.files(role, entry)[0])
        for role in ROLES
        if getattr(config, role)
    }


def source_key(
    content: str,
    entry: SlideEntry,
    annotation_hashes: Mapping[str, str] | None = None,
) -> Source:
    """Identity of a slide's pixels: its file, and the image, resolution and channels set for it."""
    chosen: Document = {}
    if entry.look is not None:
        chosen["look"] = asdict(entry.look)
    if entry.image is not None:
        chosen["image"] = entry.image
    key = stage_key(slide=content, mpp=entry.slide_mpp, **chosen)
    return Source(key=key, annotation_hashes=annotation_hashes or {})


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
        "image": entry.image,
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
    """Facts of the slide and of its stages; later stages win, and warnings are joined.

    With stages of several tile grids, their tiles are added up, and warnings name the grid. Tiles
    count once in each grid, also where the embeddings of another tool repeat their number.
    """
    merged: Document = {}
    recorded = {
        name: ledger.stages[name] for name in addresses if name in ledger.stages
    }
    grids = dict.fromkeys(map(grid_of, recorded))
    has_several_grids = len(grids.keys() - {""}) > 1
    warnings = [ledger.damage, ledger.slide.get("warnings") or ""]
    merged.update(ledger.slide)
    num_tiles: dict[str, int] = {}  # by grid
    for address, record in recorded.items():
        merged.update(record.facts)
        grid = grid_of(address)
        if "num_tiles" in record.facts:
            num_tiles.setdefault(grid, record.facts["num_tiles"])
        if address == f"{grid}/tiles":
            num_tiles[grid] = record.facts.get("num_tiles", 0)
        warning = record.facts.get("warnings") or ""
        if warning and grid and has_several_grids:
            warning = f"{grid}: {warning}"
        warnings.append(warning)
    if "num_tiles" in merged:
        merged["num_tiles"] = sum(num_tiles.values())
    different = dict.fromkeys(text for text in warnings if text)
    return merged | {"warnings": "; ".join(different)}


def grid_of(address: str) -> str:
    """Tile grid in the address of a stage; '' for a stage that belongs to none."""
    grid = address.partition("/")[0]
    return "" if grid == SLIDES else grid


def cohort_facts(entry: SlideEntry, ledger: SlideLedger) -> Document:
    """Columns of the cohort; `more` keeps columns that only an earlier cohort had."""
    facts = {name: getattr(entry, name) for name in OF_COHORTS}
    facts = {name: value for name, value in facts.items() if value is not None}
    return facts | {"more": {**ledger.slide.get("more", {}), **entry.more}}
