"""Checks on how bright, coloured or flat a px and its surroundings are."""

import math
from dataclasses import dataclass

import numpy as np

from thinsection.arrays import Array, filters
from thinsection.arrays.colour import channel_std
from thinsection.arrays.morphology import disk_footprint, drop_small, measure_regions
from thinsection.qc.sizes import area_px, length_px
from thinsection.qc.view import Outcome, QcView, region_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """Keeps px whose gray and colour spread lie between two limits each.

    Attributes:
        name: of the check, its column and its picture.
        lower_gray, upper_gray: open limits of luma, [0, 1]; None sets none.
        lower_std, upper_std: open limits of the standard deviation over R, G, B, 0 to 255.
        invert: True keeps the others.
    """

    name: str = "bright"
    lower_gray: float | None = None
    upper_gray: float | None = None
    lower_std: float | None = None
    upper_std: float | None = None
    invert: bool = False


def intensity(view: QcView, params: Intensity) -> Outcome:
    """Removes glass, or what is too dark."""
    kept = _between(view.gray, params.lower_gray, params.upper_gray)
    if params.lower_std is not None or params.upper_std is not None:
        std = channel_std(view.ns, view.rgb)
        kept &= _between(std, params.lower_std, params.upper_std)
    return keep_only(view, ~kept if params.invert else kept, params.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Otsu:
    """Keeps px darker than Otsu's threshold.

    Attributes:
        name: of the check.
        local: True takes the threshold in a disk around each px.
        radius: of that disk.
        invert: True keeps the others.
    """

    name: str = "otsu"
    local: bool = False
    radius: str = "15 px"
    invert: bool = False


def otsu(view: QcView, params: Otsu) -> Outcome:
    """Removes what is brighter than Otsu's threshold of the work image."""
    if params.local:
        disk = disk_footprint(length_px(params.radius, view.mpp_th, key="radius"))
        gray = _as_uint8(view)
        below = gray < filters.local_otsu(view.ns, gray, disk)
    else:
        below = view.gray < filters.otsu_threshold(view.ns, view.gray)
    return keep_only(view, ~below if params.invert else below, params.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrightestCluster:
    """Removes the brightest of three clusters of gray values.

    Attributes:
        name: of the check.
        num_clusters: how many clusters.
    """

    name: str = "brightestPixels"
    num_clusters: int = 3


def brightest_cluster(view: QcView, params: BrightestCluster) -> Outcome:
    """Removes px of the brightest k-means cluster (k-means on the 256-bin histogram: no seed)."""
    counts = view.ns.download(view.ns.xp.bincount(_as_uint8(view).ravel(), minlength=256))
    values = np.arange(256) / 255.0
    present = values[counts > 0]
    centers = np.linspace(present[0], present[-1], params.num_clusters)
    for _ in range(100):
        cluster = np.abs(values[:, None] - centers[None, :]).argmin(axis=1)
        weight = np.bincount(cluster, counts, minlength=params.num_clusters)
        total = np.bincount(cluster, counts * values, minlength=params.num_clusters)
        moved = np.where(weight > 0, total / np.maximum(weight, 1), centers)
        if np.allclose(moved, centers, atol=1e-6):
            break
        centers = moved
    limit = float(centers[-2:].mean()) if len(present) > 1 else math.inf
    return keep_only(view, view.gray < limit, "brightestPixels")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMinimum:
    """Keeps px with something dark nearby.

    Attributes:
        name: of the check.
        radius: of the disk in which the darkest px counts.
        upper_gray: the darkest px must be at most this, 0 to 255.
        invert: False keeps the others (HistoQC's own default is True, as here).
    """

    name: str = "bright"
    radius: str = "5 px"
    upper_gray: int = 210
    invert: bool = True


def local_minimum(view: QcView, params: LocalMinimum) -> Outcome:
    """Removes px whose whole surroundings are bright."""
    disk = disk_footprint(length_px(params.radius, view.mpp_th, key="radius"))
    bright = filters.local_minimum(view.ns, _as_uint8(view), disk) > params.upper_gray
    return keep_only(view, ~bright if params.invert else bright, "brightestPixels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Removes areas without texture: smears, bubbles, glass.

    Attributes:
        name: of the check.
        kernel: edge of the square whose mean is taken.
        max_difference: a px is flat if it is closer to that mean, gray in [0, 1].
        min_area: smaller flat areas, and holes in them, do not count.
    """

    name: str = "flat_areas"
    kernel: str = "10 px"
    max_difference: float = 0.01
    min_area: str = "500 px"


def flat(view: QcView, params: Flat) -> Outcome:
    """Removes large areas whose px equal their surroundings' mean."""
    edge = max(1, round(length_px(params.kernel, view.mpp_th, key="kernel")))
    least = area_px(params.min_area, view.mpp_th, key="min_area")
    mean = filters.box_mean(view.ns, view.gray, edge)
    found = drop_small(view.ns, abs(mean - view.gray) < params.max_difference, least)
    found = ~drop_small(view.ns, ~found, least)
    return remove(view, found, params.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blurry:
    """HistoQC's blur check, kept for comparison; `focus` finds blur.

    Attributes:
        name: of the check, prefix of its columns.
        image_mpp: nominal mpp of the image it looks at, µm/px (2.5x).
        sigma: of the Gaussian over |Laplacian|, in px of that image.
        max_edge: blurry where the blurred |Laplacian| is at most this.
    """

    name: str = "blurry"
    image_mpp: float = 4.0
    sigma: float = 100.0
    max_edge: float = 0.15


def blurry(view: QcView, params: Blurry) -> Outcome:
    """Removes px far from any edge, by a wide average of |Laplacian|."""
    edges = filters.laplacian(view.ns, view.gray_at(params.image_mpp))
    view.ns.xp.abs(edges, out=edges)
    shape = (view.gray.shape[0], view.gray.shape[1])
    near = filters.gaussian(view.ns, edges, params.sigma, shape=shape)
    return remove_regions(view, near <= params.max_edge, params.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalised:
    """A histogram-equalised gray picture for the report."""

    name: str = "equalised"


def equalised(view: QcView, params: Equalised) -> Outcome:
    """Measures nothing; leaves the picture as table `equalised`, uint8 (H, W)."""
    share = filters.equalised(view.ns, _as_uint8(view))
    picture = view.ns.download((share * 255).astype(view.ns.xp.uint8))
    return Outcome(tables={params.name: picture})


def keep_only(view: QcView, kept: Array, column: str) -> Outcome:
    """The outcome of a check that keeps some px: what it took from the mask, and its share."""
    new = view.mask_use & kept
    return Outcome(mask_use=new, touched=view.mask_use & ~kept, scores={column: view.share(new)})


def remove(view: QcView, found: Array, name: str, *, enforce: bool = False) -> Outcome:
    """The outcome of a check that removes what it found, with one column."""
    new = view.mask_use & ~found
    return Outcome(
        mask_use=new,
        touched=view.mask_use & found,
        scores={name: view.share(new)},
        enforce=enforce,
    )


def remove_regions(view: QcView, found: Array, name: str) -> Outcome:
    """The outcome of a check that removes what it found, with the columns of its regions."""
    new, touched = view.mask_use & ~found, view.mask_use & found
    regions = measure_regions(view.ns, touched)
    return Outcome(
        mask_use=new,
        touched=touched,
        scores=region_scores(f"{name}_removed", regions, view.share(new)),
    )


def _between(values: Array, lower: float | None, upper: float | None) -> Array:
    above = values > (-math.inf if lower is None else lower)
    return above & (values < (math.inf if upper is None else upper))


def _as_uint8(view: QcView) -> Array:
    return (view.gray * 255).astype(view.ns.xp.uint8)
