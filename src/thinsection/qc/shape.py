"""Checks on the shape of the mask: fat, holes, specks, spurs, fragments."""

from dataclasses import dataclass

from thinsection.arrays.morphology import (
    dilated_by_square,
    drop_small,
    fill_small,
    measure_regions,
    opened_by_disk,
)
from thinsection.qc.sizes import area_px, length_px
from thinsection.qc.view import Outcome, QcView, region_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Fat:
    """Removes tissue full of small holes, as fat is.

    Attributes:
        name: of the check.
        max_cell: a hole smaller than this may be a fat cell.
        min_cell: a hole smaller than this is noise.
        kernel: edge of the square that joins neighbouring holes.
        min_area: joined holes must cover more than this.
    """

    name: str = "fatlike"
    max_cell: str = "64 px"
    min_cell: str = "9 px"
    kernel: str = "10 px"
    min_area: str = "1000 px"


def fat(view: QcView, params: Fat) -> Outcome:
    """Removes groups of many small holes."""
    ns, mpp = view.ns, view.mpp_th
    filled = fill_small(ns, view.mask_use, area_px(params.max_cell, mpp, key="max_cell"))
    cells = drop_small(ns, filled & ~view.mask_use, area_px(params.min_cell, mpp, key="min_cell"))
    edge = max(1, round(length_px(params.kernel, mpp, key="kernel")))
    joined = dilated_by_square(ns, cells, edge)
    least = area_px(params.min_area, mpp, key="min_area")
    found = drop_small(ns, joined, int(least) + 1)  # more than, not at least
    new = view.mask_use & ~found
    scores = region_scores("fatlike_tissue_removed", measure_regions(ns, found), view.share(new))
    return Outcome(mask_use=new, touched=found, scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillHoles:
    """Fills holes of the mask.

    Attributes:
        name: of the check.
        min_area: smaller holes are filled.
    """

    name: str = "small_filled"
    min_area: str = "1000 px"


def fill_holes(view: QcView, params: FillHoles) -> Outcome:
    """Gives small holes back to the mask."""
    least = area_px(params.min_area, view.mpp_th, key="min_area")
    new = fill_small(view.ns, view.mask_use, least)
    filled = new & ~view.mask_use
    regions = measure_regions(view.ns, filled)
    scores = region_scores("small_tissue_filled", regions, view.share(new))
    return Outcome(mask_use=new, touched=filled, scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSpecks:
    """Removes small pieces of the mask.

    Attributes:
        name: of the check.
        min_area: smaller pieces are removed.
    """

    name: str = "small_removed"
    min_area: str = "64 px"


def drop_specks(view: QcView, params: DropSpecks) -> Outcome:
    """Removes specks, and counts them."""
    least = area_px(params.min_area, view.mpp_th, key="min_area")
    new = drop_small(view.ns, view.mask_use, least)
    removed = view.mask_use & ~new
    regions = measure_regions(view.ns, removed)
    scores = region_scores("small_tissue_removed", regions, view.share(new))
    return Outcome(mask_use=new, touched=removed, scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spurs:
    """Removes what is thinner than a disk.

    Attributes:
        name: of the check.
        radius: of the disk.
    """

    name: str = "spur"
    radius: str = "5 px"


def spurs(view: QcView, params: Spurs) -> Outcome:
    """Opens the mask by a disk."""
    radius = length_px(params.radius, view.mpp_th, key="radius")
    new = opened_by_disk(view.ns, view.mask_use, radius)
    touched = view.mask_use & ~new
    return Outcome(mask_use=new, touched=touched, scores={"spur_pixels": view.share(new)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragments:
    """Removes pieces of tissue too small to be of use.

    Attributes:
        name: of the check.
        min_area: smaller pieces are removed.
    """

    name: str = "areathresh"
    min_area: str = "10000 px"


def fragments(view: QcView, params: Fragments) -> Outcome:
    """Removes small fragments; one column."""
    new = drop_small(view.ns, view.mask_use, area_px(params.min_area, view.mpp_th, key="min_area"))
    touched = view.mask_use & ~new
    return Outcome(mask_use=new, touched=touched, scores={"areaThresh": view.share(new)})


@dataclass(frozen=True, slots=True, kw_only=True)
class CountPieces:
    """Counts the pieces of tissue that are left."""

    name: str = "tissue_pieces"


def count_pieces(view: QcView, params: CountPieces) -> Outcome:
    """8-connected pieces of the mask: how many, and their mean and largest area in px."""
    regions = measure_regions(view.ns, view.mask_use)
    scores = region_scores(params.name, regions, float(view.mask_use.mean()))
    return Outcome(scores=scores)
