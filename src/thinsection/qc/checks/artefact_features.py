"""Features of px for the small net of `artefact_maps`, band by band."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain, islice
from operator import add

from thinsection.arrays import Array, ArrayNamespace, filters

# Of the features' px: sigmas below are in px of this size.
FEATURE_UM = 8.0
# Planes of the smoothed densities of red, green and blue.
NEAR = slice(3, 6)
# The plane of the log of the smoothed density over the usual one.
AGAINST_USUAL = 33

_WHITE_PERCENTILE = 97
# Px of 8 µm per px of the grids on which surroundings are measured.
_FINE_PX = 2
_COARSE_PX = 4
# Px that are thinner, a little smoothed, are glass: the net is not asked.
_GLASS_DENSITY = 0.03
# Density of px that count for the slide's usual tissue; denser ones are black.
_TISSUE_DENSITY = 0.1
_BLACK_DENSITY = 1.2
# Usual density of a slide without tissue.
_NO_TISSUE = 0.3
# Of a band of rows.
_BAND_PX = 1 << 17
# Directions in which a band of density may run: (dy, dx).
_DIRECTIONS = ((0, 1), (1, 0), (0.7, 0.7), (0.7, -0.7))


class Features:
    """The small net's planes, by bands of rows; wide ones lie on grids of the whole slide.

    Memory: 10 bytes a px of uint8 RGB (H, W, 3) for the grids, 200 for a px of a band.
    """

    def __init__(self, ns: ArrayNamespace, rgb: Array, mpp_th: float) -> None:
        xp = ns.xp
        height, width, _ = rgb.shape
        self._ns = ns
        self._rgb = rgb
        self._mpp_th = mpp_th
        self._scale = FEATURE_UM / mpp_th  # px in 8 µm
        self._fine_edge = max(1, round(_FINE_PX * self._scale))
        self._coarse_edge = max(1, round(_COARSE_PX * self._scale))
        # a band is a whole number of blocks of both grids
        step = math.lcm(self._fine_edge, self._coarse_edge)
        step *= max(1, _BAND_PX // (width * step))
        self.bands = [
            slice(top, min(top + step, height)) for top in range(0, height, step)
        ]
        # density of each channel by value, and its usual one, from every fourth px
        self._tables: list[Array] = []
        sampled: list[Array] = []
        for channel in range(3):
            plane = rgb[::4, ::4, channel]
            white = max(float(xp.percentile(plane, _WHITE_PERCENTILE)), 60.0)
            table = -xp.log(xp.maximum(xp.arange(256), 4) / white)
            table = table.astype(xp.float32).clip(-0.1, 4)
            self._tables.append(table)
            sampled.append(table[plane])
        mean = _sum(sampled) / 3
        tissue = (mean > _TISSUE_DENSITY) & (mean < _BLACK_DENSITY)
        self._usual = [xp.float32(_NO_TISSUE)] * 3
        if bool(tissue.any()):
            self._usual = [xp.median(plane[tissue]) for plane in sampled]

    @cached_property
    def _surroundings(self) -> "_Surroundings":
        ns = self._ns
        xp = ns.xp
        bands = zip(*(self._means(rows) for rows in self.bands), strict=True)
        means = [xp.concatenate(band) for band in bands]
        fine = [_Grid(ns, plane, self._fine_edge, self._scale) for plane in means[:4]]
        coarse = [
            _Grid(ns, plane, self._coarse_edge, self._scale) for plane in means[4:]
        ]
        red, green, blue, log = fine
        cover, *tissue = [grid.smooth(24) for grid in coarse[:4]]
        around = [
            replace(grid, means=grid.means / (cover.means + 0.02)) for grid in tissue
        ]
        shapes = [*log.ridges(6), *coarse[4].ridges(12)]
        shapes += [log.band(width) for width in (5, 9, 16)]
        # how coherent the gradients around a px are, [0, 1], and how strong
        yy, xx, xy = (grid.smooth(6).means for grid in coarse[5:])
        coherence = xp.sqrt((yy - xx) ** 2 + 4 * xy * xy) / (yy + xx + 1e-4)
        strength = xp.sqrt(yy + xx)
        shapes += [replace(cover, means=coherence), replace(cover, means=strength)]
        smooth = [red.smooth(6), green.smooth(6), blue.smooth(6), cover]
        return _Surroundings(smooth=smooth, around=around, shapes=shapes)

    def densities(self, rows: slice = slice(None)) -> Iterator[Array]:
        """Optical densities of some rows in red, green and blue, against the glass."""
        for channel, table in enumerate(self._tables):
            yield table[self._rgb[rows, :, channel]]

    def asked(self, rows: slice) -> tuple[Array, list[Array]]:
        """Px of a band that the net is asked about, by place in the image; planes there."""
        planes = self.planes(rows)
        first = list(islice(planes, NEAR.stop))
        asked = self._ns.xp.flatnonzero(_sum(first[NEAR]) / 3 > _GLASS_DENSITY)
        flat = []
        if len(asked):
            for plane in chain(first, planes):
                flat.append(plane.reshape(-1)[asked].clip(-7.9, 7.9))
        return asked + rows.start * first[0].shape[1], flat

    def planes(self, rows: slice) -> Iterator[Array]:
        """The planes of a band (rows, W), one by one; `NEAR`, `AGAINST_USUAL` name some."""
        ns = self._ns
        xp = ns.xp
        scale = self._scale
        usual = self._usual
        band = self._read_band(rows, 12 * scale)
        inside = band.inside
        near = [
            filters.gaussian(ns, plane, 1.5 * scale)[inside] for plane in band.density
        ]
        width = near[0].shape[1]
        for plane in band.density:
            yield plane[inside]
        yield from near
        for grid in self._surroundings.smooth:
            yield grid.spread(rows, width)
        around = [grid.spread(rows, width) for grid in self._surroundings.around]
        near_total = _sum(near) / 3
        around_total = _sum(around) / 3
        usual_total = _sum(usual) / 3
        near_floored = (near_total + 0.04).clip(0.005)
        around_floored = (around_total + 0.04).clip(0.005)
        yield xp.log(near_floored / around_floored)
        for planes in (around, usual):
            for share, other in zip(_shares(near), _shares(planes)):
                yield share - other
        yield _balance(ns, near)
        yield _balance(ns, around)
        texture = filters.box_deviation(ns, band.total, 5)[inside]
        yield texture
        yield texture / (near_total + 0.05).clip(0.02)
        for sigma in (1.2, 3):
            for plane in filters.ridges(ns, band.log, sigma * scale):
                yield plane[inside]
        for grid in self._surroundings.shapes:
            yield grid.spread(rows, width)
        yield _border_distance(ns, self._rgb.shape[:2], self._mpp_th, rows)
        yield xp.log(near_floored / (usual_total + 0.04))
        yield xp.log(around_floored / (usual_total + 0.04))

    def _read_band(self, rows: slice, reach: float) -> "_Band":
        """A band with the px around it that filters look at."""
        first = max(0, rows.start - math.ceil(reach) - 1)
        last = rows.stop + math.ceil(reach) + 1
        density = list(self.densities(slice(first, last)))
        total = _sum(density) / 3
        return _Band(
            density=density,
            total=total,
            log=self._ns.xp.log(total.clip(0) + 0.06),
            inside=slice(rows.start - first, rows.stop - first),
        )

    def _means(self, rows: slice) -> list[Array]:
        """Means over blocks of a band: four on the fine grid, then eight on the coarse."""
        ns = self._ns
        band = self._read_band(rows, 6 * self._scale)
        bell = filters.gaussian_kernel(1.5 * self._scale)
        slope = filters.gaussian_kernel(1.5 * self._scale, order=1)
        down = filters.separable(ns, band.log, slope, bell)
        along = filters.separable(ns, band.log, bell, slope)
        weight = (band.total / _TISSUE_DENSITY).clip(0, 1)
        fine = [*band.density, band.log]
        coarse = [weight, *(plane * weight for plane in band.density)]
        coarse += [band.log, down * down, along * along, down * along]
        means = []
        for plane in fine:
            means.append(filters.block_means(ns, plane[band.inside], self._fine_edge))
        for plane in coarse:
            means.append(filters.block_means(ns, plane[band.inside], self._coarse_edge))
        return means


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """Densities of a band and the px around it."""

    density: list[Array]  # of red, green and blue
    total: Array  # their mean
    log: Array  # its logarithm
    inside: slice  # rows of the band itself


@dataclass(frozen=True, slots=True)
class _Grid:
    """Means over blocks of some px, for wide features."""

    ns: ArrayNamespace
    means: Array
    edge: int  # of a block, px
    scale: float  # px in 8 µm

    def smooth(self, sigma: float) -> "_Grid":
        sigma *= self.scale / self.edge
        return replace(self, means=filters.gaussian(self.ns, self.means, sigma))

    def ridges(self, sigma: float) -> "list[_Grid]":
        planes = filters.ridges(self.ns, self.means, sigma * (self.scale / self.edge))
        return [replace(self, means=plane) for plane in planes]

    def band(self, width: float) -> "_Grid":
        """Height of a px above the lower of two on opposite sides, `width` away, at best.

        The border of a dense region is higher on one side only and gets nothing.
        """
        xp = self.ns.xp
        grid = self.smooth(width / 5).means
        height, breadth = grid.shape
        reach = max(1, round(width * self.scale / self.edge))
        padded = xp.pad(grid, reach, mode="edge")
        best = xp.full_like(grid, -10)
        for dy, dx in _DIRECTIONS:
            y = round(dy * reach)
            x = round(dx * reach)
            before = padded[reach - y :, reach - x :][:height, :breadth]
            after = padded[reach + y :, reach + x :][:height, :breadth]
            best = xp.maximum(best, grid - xp.maximum(before, after))
        return replace(self, means=best)

    def spread(self, rows: slice, width: int) -> Array:
        """The values at every px of some rows, the first of which begins a block."""
        means = self.means[rows.start // self.edge : -(-rows.stop // self.edge)]
        enlarged = means.repeat(self.edge, axis=0).repeat(self.edge, axis=1)
        return enlarged[: rows.stop - rows.start, :width]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """Grids of the whole slide."""

    smooth: list[_Grid]  # density of red, green, blue, and share of tissue
    around: list[_Grid]  # density of the tissue around a px
    shapes: list[_Grid]  # ridges, bands and gradients


def _sum(planes: Sequence[Array]) -> Array:
    return reduce(add, planes)


def _shares(planes: Sequence[Array]) -> list[Array]:
    """The red's and the blue's share of the density."""
    total = (_sum(planes) + 0.1).clip(0.02)
    return [planes[0] / total, planes[2] / total]


def _balance(ns: ArrayNamespace, planes: Sequence[Array]) -> Array:
    """Spread of the density over red, green and blue, relative to its sum: 0 is gray."""
    low, high = filters.extremes(ns, planes)
    return (high - low) / (_sum(planes) + 0.1).clip(0.02)


def _border_distance(
    ns: ArrayNamespace, shape: tuple[int, int], mpp_th: float, rows: slice
) -> Array:
    """mm to the image's border, at most 1, of some rows."""
    xp = ns.xp
    down = xp.arange(shape[0], dtype=xp.float32)
    along = xp.arange(shape[1], dtype=xp.float32)
    down = xp.minimum(down, down[::-1])
    along = xp.minimum(along, along[::-1])
    distance_px = xp.minimum(down[rows, None], along[None])
    return (distance_px * (mpp_th / 1000)).clip(0, 1)
