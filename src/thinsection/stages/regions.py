"""What people drew on a slide, as stages: regions that keep and name tiles, and tissue."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt

from thinsection.arrays.polygons import coverage, rasterised
from thinsection.errors import require
from thinsection.qc.tissue import TISSUE_COLOR, Shares, TissueMask, work_frame
from thinsection.slide.annotations import ROLES, Regions, RegionsConfig, read_regions
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.labels import join_label, short_hash, slug
from thinsection.stages.masks import TissueStage
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.store.geojson import annotation, write_features
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES
from thinsection.tiles import TileTable
from thinsection.types import CoordsL0, Size

ROI_SHARE = "roi_fraction"  # column: the share of a tile that the regions cover
_COLORS = (TISSUE_COLOR, (200, 0, 0), (150, 200, 150), (0, 110, 220), (240, 160, 0))


def drawn_sums(config: RegionsConfig, entry: SlideEntry) -> dict[str, str]:
    """Hash of what was drawn on a slide, by role. Raises InvalidInputError: nothing was."""
    return {role: file_sum(config.file(role, entry)) for role in ROLES if getattr(config, role)}


@dataclass(frozen=True, kw_only=True)
class RegionsStage(Stage):
    """`slides/ID/ROLE_NAME.geojson`; value: the `Regions`.

    The file's bytes are in the key; where it lies, and the classes, in the name.
    """

    title: ClassVar[str] = "regions"
    reads = "slide"

    config: RegionsConfig
    role: str  # 'tissue' or 'roi'

    @property
    def drawn(self) -> str:
        return self.role

    @property
    def settings(self) -> Mapping[str, Any]:
        return {name: v for name, v in asdict(self.config).items() if name not in ROLES}

    @property
    def label(self) -> str:
        """What of a grid's name says what was drawn: 'roi-drawn-1a2b3c'."""
        given = getattr(self.config, self.role)
        return f"{self.role}-{slug(Path(given).stem)}-{short_hash([given, self.settings])}"

    @property
    def address(self) -> str:
        return f"{SLIDES}/{self.label}"

    def run(self, work: SlideWork) -> Output:
        """Reads the file of the slide."""
        name = f"{SLIDES}/{work.entry.slide_id}/{self.label}.geojson"
        found = self._read(work, self.config.file(self.role, work.entry))
        colors = _COLORS * len(found.classes)
        drawn = zip(found.classes.items(), colors)
        write_features(work.path(name), [annotation(g, n, color) for (n, g), color in drawn])
        # the pixels tell an edit from another slide
        facts = {"pixels": str(work.source), "warnings": "; ".join(found.notes)}
        return Output(files=(name,), facts=facts, value=found)

    def load(self, work: SlideWork) -> Regions:
        """The stored polygons."""
        (name,) = work.ledger.stages[self.address].files
        return self._read(work, work.path(name))

    def _read(self, work: SlideWork, path: Path) -> Regions:
        size = work.ledger.slide["width"], work.ledger.slide["height"]
        slide_id, mend = work.entry.slide_id, self.config.mend_regions
        found = read_regions(path, size, slide_id=slide_id, mend=mend)
        named = {name or self.role: area for name, area in found.classes.items()}
        return Regions(classes=named, notes=found.notes)

    def area(self, work: SlideWork) -> Any:
        """The included classes less the excluded ones."""
        config, found = self.config, work.value(self)
        return found.area(config.include_class, config.exclude_class)

    def tile_columns(self, work: SlideWork, table: TileTable) -> Mapping[str, npt.NDArray]:
        """The share of each tile in each class, and of `--roi` in all that is included."""
        boxes, classes = (table.coords_l0, table.plan.size_l0), work.value(self).classes
        named = {f"class_{slug(name)}": area for name, area in classes.items() if name != self.role}
        got = f"{', '.join(map(repr, classes))} in {work.entry.slide_id!r}"
        require(
            len(named) == len(classes.keys() - {self.role}), "classes must differ as names", got
        )
        areas = {ROI_SHARE: self.area(work)} | named if self.role == "roi" else named
        return {name: coverage(area, *boxes) for name, area in areas.items()}


@dataclass(frozen=True, kw_only=True)
class DrawnTissue(TissueMask):
    """The polygons, beside their px at the detector's resolution, which are for pictures."""

    area: Any  # shapely's

    def fractions(self, coords_l0: CoordsL0, size_l0: Size) -> Shares:
        return coverage(self.area, coords_l0, size_l0)


@dataclass(frozen=True, kw_only=True)
class DrawnTissueStage(TissueStage):
    """Tissue as somebody drew it, in the place of our detector's answer."""

    regions: RegionsStage

    @property
    def label(self) -> str:
        return join_label(self.regions.label, super().label)

    def find(self, work: SlideWork) -> DrawnTissue:
        """The polygons and their px."""
        assert work.slide is not None
        area, where = self.regions.area(work), work_frame(work.slide, self.config.mask_mpp)
        return DrawnTissue(mask=rasterised(area, where["frame"]), area=area, **where)

    def load(self, work: SlideWork) -> DrawnTissue:
        """The stored polygons and mask."""
        return DrawnTissue(**vars(super().load(work)), area=self.regions.area(work))

    def tile_columns(self, work: SlideWork, table: TileTable) -> Mapping[str, npt.NDArray]:
        """Each class's share of each tile."""
        return self.regions.tile_columns(work, table)
