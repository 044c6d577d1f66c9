"""Checks on the shape of the mask: fat, holes, specks, spurs, fragments."""

from dataclasses import dataclass
from typing import ClassVar

from thinsection.arrays.morphology import dilated_by_square, drop_small, fill_small, opened_by_disk
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length


@dataclass(frozen=True, kw_only=True)
class Fat(QcCheck):
    """Removes groups of many small holes, as fat is."""

    kind: ClassVar[str] = "fat"
    name: str = "fatlike"
    max_cell: str = area("64 px")  # a hole smaller than this may be a fat cell
    min_cell: str = area("9 px")  # a hole smaller than this is noise
    kernel: str = length("10 px")  # edge of the square that joins neighbouring holes
    min_area: str = area("1000 px")  # joined holes must cover more than this

    def __call__(self, view: QcView) -> Outcome:
        ns, mask = view.ns, view.mask_use
        filled = fill_small(ns, mask, view.area_px(self.max_cell))
        cells = drop_small(ns, filled & ~mask, view.area_px(self.min_cell))
        joined = dilated_by_square(ns, cells, max(1, round(view.length_px(self.kernel))))
        found = drop_small(ns, joined, int(view.area_px(self.min_area)) + 1)  # more, not at least
        return view.left_regions(mask & ~found, "fatlike_tissue_removed", found)


@dataclass(frozen=True, kw_only=True)
class FillHoles(QcCheck):
    """Gives small holes back to the mask."""

    kind: ClassVar[str] = "fill_holes"
    fills: ClassVar[bool] = True
    name: str = "small_filled"
    min_area: str = area("1000 px")

    def __call__(self, view: QcView) -> Outcome:
        new = fill_small(view.ns, view.mask_use, view.area_px(self.min_area))
        return view.left_regions(new, "small_tissue_filled", new & ~view.mask_use)


@dataclass(frozen=True, kw_only=True)
class DropSpecks(QcCheck):
    """Removes small pieces of the mask, and counts them."""

    kind: ClassVar[str] = "drop_specks"
    name: str = "small_removed"
    min_area: str = area("64 px")

    def __call__(self, view: QcView) -> Outcome:
        new = drop_small(view.ns, view.mask_use, view.area_px(self.min_area))
        return view.left_regions(new, "small_tissue_removed")


@dataclass(frozen=True, kw_only=True)
class Spurs(QcCheck):
    """Removes what is thinner than a disk."""

    kind: ClassVar[str] = "spurs"
    name: str = "spur"
    radius: str = length("5 px")

    def __call__(self, view: QcView) -> Outcome:
        new = opened_by_disk(view.ns, view.mask_use, view.length_px(self.radius))
        return view.left(new, "spur_pixels")


@dataclass(frozen=True, kw_only=True)
class Fragments(QcCheck):
    """Removes pieces of tissue too small to be of use; one column."""

    kind: ClassVar[str] = "fragments"
    name: str = "areathresh"
    min_area: str = area("10000 px")

    def __call__(self, view: QcView) -> Outcome:
        new = drop_small(view.ns, view.mask_use, view.area_px(self.min_area))
        return view.left(new, "areaThresh")


@dataclass(frozen=True, kw_only=True)
class CountPieces(QcCheck):
    """Counts the 8-connected pieces of tissue that are left: their mean and largest area in px."""

    kind: ClassVar[str] = "count_pieces"
    name: str = "tissue_pieces"

    def __call__(self, view: QcView) -> Outcome:
        share = float(view.mask_use.mean())
        return Outcome(scores=view.region_scores(self.name, view.mask_use, share))
