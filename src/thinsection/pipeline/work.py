"""One slide on its way through a run, from the claim of its lock to the prepared tiles."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from thinsection.errors import BudgetError, QcExclusion
from thinsection.files.atomic import atomic_path
from thinsection.files.sources import FsspecSource
from thinsection.pipeline.qc_batch import slide_key
from thinsection.qc import (
    Pipeline,
    QcResult,
    parse_rule,
    qc_fail,
    run_qc,
    tile_qc_columns,
)
from thinsection.qc.coverage import box_fractions
from thinsection.qc.tissue import TissueMask, tissue_mask
from thinsection.report.qc_files import write_qc
from thinsection.slide import Slide, open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.geometry import ReadPlan, plan_read
from thinsection.stages import naming
from thinsection.stages.config import QcConfig, RunConfig
from thinsection.store.geojson import write_mask_geojson
from thinsection.store.ledger import SlideLedger, StageRecord, fingerprint_reads
from thinsection.stream import PrepareFailed, SlideTiles, scratch_bytes
from thinsection.tiles import TileTable, tile_grid
from thinsection.tiles.filters import MASK_FILTER
from thinsection.units import format_bytes


@dataclass(kw_only=True)
class SlideWork:
    """What is known of a slide while it is worked on.

    Attributes:
        entry: of the cohort.
        folder: DIR/<slide_id>.
        keys: stage -> key of the ledger.
        ledger: as it stands.
        pipeline: of quality control; None where it is off.
        table, tissue, qc, facts, warnings: set by `prepare`.
    """

    entry: SlideEntry
    folder: Path
    keys: dict[str, str]
    ledger: SlideLedger
    pipeline: Pipeline | None = None
    table: TileTable | None = None
    tissue: TissueMask | None = None
    qc: QcResult | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stage: str = "open"
    source: FsspecSource | None = None

    def fetched(self) -> dict[str, int]:
        """Bytes and requests of a slide by URL so far, its fingerprint's too; none of a file."""
        if self.source is None:
            return {}
        sampled, requests = fingerprint_reads(self.source.size)
        return {
            "fetched_bytes": self.source.fetched_bytes + sampled,
            "file_bytes": self.source.size,
            "requests": self.source.requests + requests,
        }

    def begin(self, stage: str) -> None:
        """Forgets an earlier result of the stage before its files are replaced.

        Else a kill between the new file and the new ledger could leave the old key beside it.
        """
        self.stage = stage
        if stage in self.ledger.stages and self.ledger.stages[stage].key != self.keys[stage]:
            stages = {k: v for k, v in self.ledger.stages.items() if k != stage}
            self.ledger = replace(self.ledger, stages=stages)
            self.ledger.save()

    def finish(self, stage: str, files: tuple[str, ...], facts: dict[str, Any]) -> None:
        """Records a stage whose files are in place."""
        sizes = {name: (self.folder / name).stat().st_size for name in files}
        record = StageRecord(key=self.keys[stage], files=sizes, facts=facts)
        self.ledger = self.ledger.with_stage(stage, record)
        self.ledger.save()


def prepare(
    work: SlideWork, config: RunConfig, *, scratch_limit: int
) -> SlideTiles | PrepareFailed:
    """Opens a slide, finds its tissue and lays its grid; a bad slide comes back as `PrepareFailed`.

    Runs in the stream's prepare thread while other slides are decoded and encoded.
    """
    slide: Slide | None = None
    try:
        entry = work.entry
        reader = config.slides.reader
        slide = open_slide(entry.slide_path, reader=reader, slide_mpp=entry.slide_mpp)
        work.source = getattr(slide, "source", None)
        work.facts = naming.slide_facts(entry, slide)
        work.ledger = replace(work.ledger, slide=work.facts)
        plan_tiles(slide, config)  # a missing mpp is said before any pixel is read
        if work.pipeline is None:
            work.stage = "tissue"
            work.tissue = tissue_mask(slide, config.tissue)
        else:
            work.stage = "qc"
            work.qc = check_quality(work, slide, work.pipeline, config.qc)
            work.tissue = work.qc.tissue
        write_tissue(work)
        work.stage = "tile"
        work.table = lay_tiles(work, slide, config)
        if scratch_bytes(work.table.plan) > scratch_limit:
            raise BudgetError(
                f"one tile must be read from at most {format_bytes(scratch_limit)}, got "
                f"{work.table.plan.size_lv} px; the slide lacks pyramid levels near this "
                "tile_mpp: ask for a finer one"
            )
        work.attributes = naming.tile_attributes(
            entry, slide, work.table, overlap=config.tiles.overlap
        )
    except Exception as error:  # noqa: BLE001 - the per-slide boundary; recorded with its traceback
        if slide is not None:
            slide.close()
        return PrepareFailed(key=work, stage=work.stage, error=error)
    return SlideTiles(key=work, slide=slide, table=work.table)


def plan_tiles(slide: Slide, config: RunConfig) -> ReadPlan:
    """The read plan of a slide under the run's tile settings."""
    return plan_read(
        slide.levels,
        slide.slide_mpp,
        tile_px=config.tiles.tile_px,
        tile_mpp=config.tiles.mpp,
        overlap=config.tiles.overlap,
        slide=Path(slide.slide_path).name,
    )


def check_quality(work: SlideWork, slide: Slide, pipeline: Pipeline, config: QcConfig) -> QcResult:
    """Runs the QC pipeline, writes its files, and leaves the slide out where a rule says so.

    Raises:
        QcExclusion: a rule of `qc_fail` holds.
    """
    result = run_qc(slide, pipeline, device=config.qc_device)
    write_qc(result, work.folder, key=slide_key(work.entry, pipeline))
    work.warnings += result.warnings
    row = result.row
    for rule in config.qc_fail:
        if qc_fail(row, rule):
            column = parse_rule(rule).column
            raise QcExclusion(f"left out by {rule!r}: {column} is {row[column]}")
    return result


def lay_tiles(work: SlideWork, slide: Slide, config: RunConfig) -> TileTable:
    """The tile table of a slide, with a warning where it is empty."""
    tissue = work.tissue
    assert tissue is not None
    masked = MASK_FILTER in config.tiles.tile_filter
    table = tile_grid(slide, config.tiles, tissue=(tissue.mask, tissue.frame) if masked else None)
    if not masked:
        fraction = box_fractions(tissue.mask, tissue.frame, table.coords_l0, table.plan.size_l0)
        table = table.with_columns({"tissue_fraction": fraction})
    if work.qc is not None:
        columns = tile_qc_columns(work.qc, table.coords_l0, table.plan.size_l0[0])
        table = table.with_columns({f"qc_{name}": share for name, share in columns.items()})
    if len(table) == 0:
        work.warnings.append(
            "no tile holds enough tissue" if tissue.mask.any() else "no tissue was found"
        )
    return table


def write_tissue(work: SlideWork) -> None:
    """Writes the mask as PNG and GeoJSON and the thumbnail, and records the stage."""
    tissue = work.tissue
    assert tissue is not None
    names = (naming.TISSUE_PNG, naming.TISSUE_GEOJSON, naming.THUMBNAIL)
    if work.ledger.done("tissue", work.keys["tissue"]):
        return
    work.begin("tissue")
    with atomic_path(work.folder / naming.TISSUE_PNG) as tmp:
        Image.fromarray(tissue.mask.astype(np.uint8) * 255).save(tmp)
    with atomic_path(work.folder / naming.THUMBNAIL) as tmp:
        Image.fromarray(tissue.thumbnail).save(tmp, quality=85)
    path = work.folder / naming.TISSUE_GEOJSON
    write_mask_geojson(path, tissue.mask, tissue.frame, name="Tissue")
    facts = {"tissue_fraction": round(tissue.tissue_fraction, 6), "threshold": tissue.threshold}
    work.finish("tissue", names, facts)
