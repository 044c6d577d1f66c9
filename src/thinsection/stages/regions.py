"""What people drew on a slide, as stages: the tissue, or regions that keep and name tiles."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt

from thinsection.arrays.polygons import coverage, rasterised
from thinsection.qc.tissue import TISSUE_COLOR, Color, Shares, TissueMask, work_frame
from thinsection.slide.annotations import Regions, RegionsConfig, read_regions
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.labels import join_label, short_hash, slug
from thinsection.stages.masks import TissueStage
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.store.geojson import annotation, write_features
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES
from thinsection.tiles import TileTable
from thinsection.types import CoordsL0, Size

ROLES = ("tissue", "roi")
ROI_SHARE = "roi_fraction"  # column: the share of a tile that the regions cover
_COLORS: tuple[Color, ...] = ((200, 0, 0), (150, 200, 150), (0, 110, 220), (240, 160, 0))


def drawn_sums(config: RegionsConfig, entry: SlideEntry) -> dict[str, str]:
    """Hash of what was drawn on a slide, by role. Raises InvalidInputError: nothing was."""
    return {role: file_sum(config.file(role, entry)) for role in ROLES if getattr(config, role)}


def drawn_label(config: RegionsConfig, role: str) -> str:
    """Part of a folder's name: the file or folder, and a hash of its path and the classes."""
    given = getattr(config, role)
    path = Path(given)
    rest = {name: value for name, value in asdict(config).items() if name not in ROLES}
    said = [str(path.resolve()) if path.exists() else given, *rest.values()]
    return f"{role}-{slug(path.stem)}-{short_hash(said)}"


@dataclass(frozen=True, kw_only=True)
class DrawnTissue(TissueMask):
    """The polygons, beside their mask at the detector's resolution."""

    regions: Regions
    area: Any  # shapely's: the included classes less the excluded ones

    def fractions(self, coords_l0: CoordsL0, size_l0: Size) -> Shares:
        return coverage(self.area, coords_l0, size_l0)


@dataclass(frozen=True, kw_only=True)
class _Drawn(Stage):
    """Of one file a slide: its bytes are in the key, its path in the folder's name."""

    regions: RegionsConfig = field(default_factory=RegionsConfig)

    @property
    def settings(self) -> Mapping[str, Any]:
        own = {name: v for name, v in asdict(self.regions).items() if name not in ROLES}
        return {**super().settings, "regions": own}

    def read(self, work: SlideWork, path: Path) -> Regions:
        size = work.ledger.slide["width"], work.ledger.slide["height"]
        slide_id, mend = work.entry.slide_id, self.regions.mend_regions
        found = read_regions(path, size, slide_id=slide_id, mend=mend)
        named = {name or self.drawn: area for name, area in found.classes.items()}
        return Regions(classes=named, notes=found.notes)

    def area(self, found: Regions) -> Any:
        return found.area(self.regions.include_class, self.regions.exclude_class)

    def facts(self, work: SlideWork, found: Regions) -> dict[str, str]:
        """What an edit is known by, and what was left out."""
        return {"pixels": str(work.source), "warnings": "; ".join(found.notes)}

    def write_regions(self, path: Path, found: Regions) -> None:
        colors = [TISSUE_COLOR, *_COLORS]
        parts = enumerate(found.classes.items())
        write_features(path, [annotation(g, n, colors[i % len(colors)]) for i, (n, g) in parts])

    def shares(self, found: Regions, table: TileTable) -> dict[str, npt.NDArray]:
        """Column `class_NAME` for each class: the share of each tile."""
        boxes, named = (table.coords_l0, table.plan.size_l0), found.classes.items()
        return {f"class_{slug(n)}": coverage(g, *boxes) for n, g in named if n != self.drawn}


@dataclass(frozen=True, kw_only=True)
class DrawnTissueStage(_Drawn, TissueStage):
    """Tissue as somebody drew it, in the place of our detector's answer."""

    drawn: ClassVar[str] = "tissue"

    @property
    def label(self) -> str:
        return join_label(drawn_label(self.regions, self.drawn), super().label)

    def find(self, work: SlideWork) -> DrawnTissue:
        """The polygons; their px at the detector's resolution are for pictures."""
        assert work.slide is not None
        found = self.read(work, self.regions.file(self.drawn, work.entry))
        area, where = self.area(found), work_frame(work.slide, self.config.mask_mpp)
        mask = rasterised(area, where["frame"])
        return DrawnTissue(mask=mask, regions=found, area=area, **where)

    def run(self, work: SlideWork) -> Output:
        """Reads the file of the slide."""
        output = super().run(work)
        found: Regions = output.value.regions
        self.write_regions(work.path(output.files[1]), found)
        facts = {**output.facts, **self.facts(work, found)}
        return Output(files=output.files, facts=facts, value=output.value)

    def load(self, work: SlideWork) -> DrawnTissue:
        """The stored polygons and mask."""
        outlines = self._names(work.entry.slide_id)[1]
        found = self.read(work, work.path(outlines))
        return DrawnTissue(**vars(super().load(work)), regions=found, area=self.area(found))

    def tile_columns(self, work: SlideWork, table: TileTable) -> Mapping[str, npt.NDArray]:
        """Each class's share of each tile."""
        return self.shares(work.value(self).regions, table)


@dataclass(frozen=True, kw_only=True)
class RoiStage(_Drawn):
    """`slides/ID/roi_NAME.geojson`; value: the `Regions`."""

    title: ClassVar[str] = "roi"
    drawn: ClassVar[str] = "roi"
    reads = "slide"

    @property
    def label(self) -> str:
        """What of a grid's name says which regions keep its tiles."""
        return drawn_label(self.regions, self.drawn)

    @property
    def address(self) -> str:
        return f"{SLIDES}/{self.label}"

    def _name(self, work: SlideWork) -> str:
        return f"{SLIDES}/{work.entry.slide_id}/{self.label}.geojson"

    def run(self, work: SlideWork) -> Output:
        """Reads the file of the slide."""
        found, name = self.read(work, self.regions.file(self.drawn, work.entry)), self._name(work)
        self.write_regions(work.path(name), found)
        return Output(files=(name,), facts=self.facts(work, found), value=found)

    def load(self, work: SlideWork) -> Regions:
        """The stored polygons."""
        return self.read(work, work.path(self._name(work)))

    def tile_columns(self, work: SlideWork, table: TileTable) -> Mapping[str, npt.NDArray]:
        """The share of each tile in the regions, and in each class of them."""
        found: Regions = work.value(self)
        share = coverage(self.area(found), table.coords_l0, table.plan.size_l0)
        return {ROI_SHARE: share, **self.shares(found, table)}
