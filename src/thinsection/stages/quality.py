"""Quality control of a slide: its checks' masks and scores, and what of the tissue is left."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt

from thinsection.config import user_cache_dir
from thinsection.errors import QcExclusion
from thinsection.files.atomic import TMP_MARK
from thinsection.qc import (
    Pipeline,
    QcResult,
    parse_rule,
    pipeline_identity,
    qc_fail,
    run_qc,
    tile_qc_columns,
)
from thinsection.qc.checks.check import Score
from thinsection.qc.pipeline import preset_names
from thinsection.qc.tissue import TissueMask
from thinsection.report.qc_files import load_qc, write_qc
from thinsection.slide.geometry import mean_mpp
from thinsection.stages.labels import join_label, short_hash, slug
from thinsection.stages.stage import Output, Reads, SlideWork, Stage
from thinsection.store.ledger import SLIDES
from thinsection.tiles import TileTable


@dataclass(frozen=True, kw_only=True)
class CheckedTissue(TissueMask):
    """What passed quality control, in the place of the default tissue mask.

    Attributes:
        qc: masks of the checks, scores and warnings.
    """

    qc: QcResult


@dataclass(frozen=True, kw_only=True)
class QcStage(Stage):
    """`slides/ID/qc_NAME/`: masks, pictures, `qc.json`; value: a `CheckedTissue`.

    Attributes:
        pipeline: of `load_pipeline`.
        source: the preset's name or the TOML file that it came from.
        rules: a slide for which one holds is left out; they are no part of the result.
        reader: that was asked for.
        device: where the checks are computed.
        cache_dir: of the pixel models; None is the user's.
    """

    title: ClassVar[str] = "qc"

    pipeline: Pipeline
    source: str
    rules: tuple[str, ...] = ()
    reader: str = "auto"
    device: str = "cpu"
    cache_dir: Path | None = None

    @property
    def reads(self) -> Reads:
        return "slide"

    @property
    def label(self) -> str:
        """What of a grid's name says which checks made its mask: 'qc-default'."""
        return join_label(f"qc-{self.name}", "" if self.reader == "auto" else self.reader)

    @property
    def name(self) -> str:
        """The preset's name, or that of the file with a hash of what it says."""
        if self.source in preset_names():
            return self.source
        return f"{slug(Path(self.source).stem)}-{short_hash(self.pipeline.as_mapping())}"

    @property
    def address(self) -> str:
        return join_label(f"{SLIDES}/qc_{self.name}", "" if self.reader == "auto" else self.reader)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"qc": pipeline_identity(self.pipeline), "reader": self.reader}

    def folder(self, slide_id: str) -> str:
        """Where the files of a slide lie, relative to the results folder."""
        return f"{SLIDES}/{slide_id}/{self.address.removeprefix(f'{SLIDES}/')}"

    def run(self, work: SlideWork) -> Output:
        """Runs the checks.

        Memory: that of `run_qc`.
        """
        assert work.slide is not None
        result = run_qc(
            work.slide,
            self.pipeline,
            device=self.device,
            cache_dir=self.cache_dir or user_cache_dir(),
            slide_mpp=mean_mpp(work.entry.slide_mpp),
        )
        folder = self.folder(work.entry.slide_id)
        write_qc(result, work.path(folder), key=self.key(work.source))
        names = sorted(p.name for p in work.path(folder).iterdir() if TMP_MARK not in p.name)
        facts = {
            "tissue_fraction": round(float(result.mask_use.mean()), 6),
            "pixels_to_use": result.scores["pixels_to_use"],
            "warnings": "; ".join(result.warnings),
        }
        files = tuple(f"{folder}/{name}" for name in names)
        return Output(files=files, facts=facts, value=_checked(result))

    def load(self, work: SlideWork) -> CheckedTissue:
        """What the files say; equal to what the checks found."""
        return _checked(load_qc(work.path(self.folder(work.entry.slide_id))))

    def check_rules(self, work: SlideWork) -> None:
        """Leaves the slide out where a rule holds.

        Raises:
            QcExclusion: names the rule and the value.
        """
        row = self.row(work)
        for rule in self.rules:
            if qc_fail(row, rule):
                column = parse_rule(rule).column
                raise QcExclusion(f"left out by {rule!r}: {column} is {row[column]}")

    def row(self, work: SlideWork) -> Mapping[str, Score]:
        """The slide's line of qc.csv."""
        found: CheckedTissue = work.value(self)
        return found.qc.row

    def tile_columns(self, work: SlideWork, table: TileTable) -> Mapping[str, npt.NDArray]:
        """Per check, the share of each tile that it took."""
        found: CheckedTissue = work.value(self)
        columns = tile_qc_columns(found.qc, table.coords_l0, table.plan.size_l0[0])
        return {f"qc_{name}": share for name, share in columns.items()}


def _checked(result: QcResult) -> CheckedTissue:
    return CheckedTissue(
        mask=result.mask_use,
        frame=result.frame,
        mask_mpp=(result.mpp_th, result.mpp_th),
        thumbnail=result.rgb,
        threshold=None,
        qc=result,
    )
