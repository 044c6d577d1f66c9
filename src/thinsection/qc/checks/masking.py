"""Checks that narrow the mask as HistoQC does: by light, colour, and the mask's own shape."""

import math

import numpy as np

from thinsection.arrays import Array, filters, morphology
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length

_KMEANS_STEPS = 100


class Intensity(QcCheck, kind="intensity"):
    """Keeps pixels in a range of brightness, and of standard deviation over R, G and B."""

    name: str = "bright"
    # open limits of luma, [0, 1]; None sets none
    lower_gray: float | None = None
    upper_gray: float | None = None
    # open limits of the standard deviation over R, G, B, 0 to 255; None sets none
    lower_std: float | None = None
    upper_std: float | None = None
    # True keeps the pixels outside these ranges
    invert: bool = False

    def __call__(self, view: QcView) -> Outcome:
        kept = _between(view.gray, self.lower_gray, self.upper_gray)
        if self.lower_std is not None or self.upper_std is not None:
            spread = filters.channel_std(view.ns, view.rgb)
            kept &= _between(spread, self.lower_std, self.upper_std)
        return view.left(view.mask_use & (kept ^ self.invert), self.name)

    @property
    def removes_glass(self) -> bool:
        return not self.invert


def _between(values: Array, lower: float | None, upper: float | None) -> Array:
    above = values > (-math.inf if lower is None else lower)
    return above & (values < (math.inf if upper is None else upper))


class Otsu(QcCheck, kind="otsu", removes_glass=True):
    """Keeps pixels that are darker than Otsu's threshold of the work image."""

    name: str = "otsu"
    # True computes a threshold for each px, from a disk around it
    local: bool = False
    # radius of that disk
    radius: str = length("15 px")
    # True keeps the pixels that are not darker
    invert: bool = False

    def __call__(self, view: QcView) -> Outcome:
        if self.local:
            disk = morphology.disk_footprint(view.length_px(self.radius))
            below = view.gray8 < filters.local_otsu(view.ns, view.gray8, disk)
        else:
            below = view.gray < filters.otsu_threshold(view.ns, view.gray)
        return view.left(view.mask_use & (below ^ self.invert), self.name)


class BrightestCluster(QcCheck, kind="brightest_cluster", removes_glass=True):
    """Removes the brightest of three clusters of grey values (k-means with a fixed start)."""

    name: str = "brightest_cluster"
    # number of clusters; px darker than half-way between the brightest two are kept
    num_clusters: int = 3

    def __call__(self, view: QcView) -> Outcome:
        counts = view.ns.xp.bincount(view.gray8.ravel(), minlength=256)
        counts = view.ns.download(counts)
        values = np.arange(256) / 255.0
        present = values[counts > 0]
        centers = np.linspace(present[0], present[-1], self.num_clusters)
        for _ in range(_KMEANS_STEPS):
            cluster = np.abs(values[:, None] - centers).argmin(axis=1)
            weight = np.bincount(cluster, counts, minlength=self.num_clusters)
            total = np.bincount(cluster, counts * values, minlength=self.num_clusters)
            moved = np.where(weight > 0, total / np.maximum(weight, 1), centers)
            if np.allclose(moved, centers, atol=1e-6):
                break
            centers = moved
        limit = float(centers[-2:].mean()) if len(present) > 1 else math.inf
        return view.left(view.mask_use & (view.gray < limit), self.name)


class LocalMinimum(QcCheck, kind="local_minimum", removes_glass=True):
    """Keeps pixels that have a dark pixel nearby."""

    name: str = "bright"
    # column with the removed share; the default is HistoQC's name
    column: str = "brightestPixels"
    # radius of the disk in which the darkest px is looked for
    radius: str = length("5 px")
    # the darkest px must be at most this, 0 to 255
    upper_gray: int = 210
    # False keeps the pixels without a dark pixel nearby (HistoQC's default is True, as here)
    invert: bool = True

    def __call__(self, view: QcView) -> Outcome:
        disk = morphology.disk_footprint(view.length_px(self.radius))
        bright = filters.local_minimum(view.ns, view.gray8, disk) > self.upper_gray
        return view.left(view.mask_use & (bright ^ self.invert), self.column)

    @property
    def share_column(self) -> str:
        return self.column


class Flat(QcCheck, kind="flat"):
    """Removes large areas without texture: smears, bubbles, glass."""

    name: str = "flat_areas"
    # edge of the square around a px whose mean is computed
    kernel: str = length("10 px")
    # a px is flat if its gray value, in [0, 1], differs from that mean by less
    max_difference: float = 0.01
    # smaller flat areas are kept, and smaller textured spots inside flat areas are removed
    min_area: str = area("500 px")

    def __call__(self, view: QcView) -> Outcome:
        least_px = view.area_px(self.min_area)
        edge_px = max(1, round(view.length_px(self.kernel)))
        mean = filters.box_mean(view.ns, view.gray, edge_px)
        flat = abs(mean - view.gray) < self.max_difference
        flat = morphology.drop_small(view.ns, flat, least_px)
        textured = morphology.drop_small(view.ns, ~flat, least_px)
        return view.left(view.mask_use & textured, self.name)


class Blurry(QcCheck, kind="blurry"):
    """Removes pixels far from edges in the image, as HistoQC does; `focus` finds blur better."""

    name: str = "blurry"
    # nominal resolution of the image that the check reads, µm/px (2.5x)
    image_mpp: float = 4.0
    # sigma of the Gaussian that averages |Laplacian|, in px of that image
    sigma: float = 100.0
    # px are blurry if the averaged |Laplacian| is at most this
    max_edge: float = 0.15

    def __call__(self, view: QcView) -> Outcome:
        edges = filters.laplacian(view.ns, view.gray_at(self.image_mpp))
        view.ns.xp.abs(edges, out=edges)
        nearby = filters.gaussian(view.ns, edges, self.sigma, shape=view.gray.shape)
        sharp = view.mask_use & (nearby > self.max_edge)
        return view.left_regions(sharp, f"{self.name}_removed")

    @property
    def share_column(self) -> str:
        return f"{self.name}_removed_percent"

    @property
    def image_mpps(self) -> tuple[float, ...]:
        return (self.image_mpp,)


class Fat(QcCheck, kind="fat", share_column="fatlike_tissue_removed_percent"):
    """Removes groups of many small holes, which are typical of fat."""

    name: str = "fatlike"
    # a hole smaller than this may be a fat cell
    max_cell: str = area("64 px")
    # a hole smaller than this is noise
    min_cell: str = area("9 px")
    # edge of the square that joins neighbouring holes
    kernel: str = length("10 px")
    # groups of joined holes that cover no more than this are not fat
    min_area: str = area("1000 px")

    def __call__(self, view: QcView) -> Outcome:
        ns = view.ns
        mask = view.mask_use
        holes = morphology.fill_small(ns, mask, view.area_px(self.max_cell)) & ~mask
        cells = morphology.drop_small(ns, holes, view.area_px(self.min_cell))
        edge_px = max(1, round(view.length_px(self.kernel)))
        joined = morphology.dilated_by_square(ns, cells, edge_px)
        fat = morphology.drop_small(ns, joined, int(view.area_px(self.min_area)) + 1)
        return view.left_regions(mask & ~fat, "fatlike_tissue_removed", fat)


class FillHoles(QcCheck, kind="fill_holes", fills=True):
    """Fills small holes in the mask."""

    name: str = "small_filled"
    min_area: str = area("1000 px")

    def __call__(self, view: QcView) -> Outcome:
        new = morphology.fill_small(view.ns, view.mask_use, view.area_px(self.min_area))
        return view.left_regions(new, "small_tissue_filled", new & ~view.mask_use)


class DropSpecks(
    QcCheck, kind="drop_specks", share_column="small_tissue_removed_percent"
):
    """Removes small pieces of the mask, and counts them."""

    name: str = "small_removed"
    min_area: str = area("64 px")

    def __call__(self, view: QcView) -> Outcome:
        new = morphology.drop_small(view.ns, view.mask_use, view.area_px(self.min_area))
        return view.left_regions(new, "small_tissue_removed")


class Fragments(QcCheck, kind="fragments", share_column="areaThresh"):
    """Removes pieces of tissue that are too small to be of use."""

    name: str = "areathresh"
    min_area: str = area("10000 px")

    def __call__(self, view: QcView) -> Outcome:
        new = morphology.drop_small(view.ns, view.mask_use, view.area_px(self.min_area))
        return view.left(new, self.share_column)


class Spurs(QcCheck, kind="spurs", share_column="spur_pixels"):
    """Removes parts of the mask that are narrower than a disk."""

    name: str = "spur"
    radius: str = length("5 px")

    def __call__(self, view: QcView) -> Outcome:
        radius_px = view.length_px(self.radius)
        new = morphology.opened_by_disk(view.ns, view.mask_use, radius_px)
        return view.left(new, self.share_column)
