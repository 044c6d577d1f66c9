"""What each px of the work image shows: tissue, glass, a fold, ink, a bubble, dirt; by two nets.

The features of a small one are made so that they mean the same on any slide: optical density
against the slide's own glass; against the tissue around a px, and the slide's usual tissue; ridges
and borders of its logarithm, so that a fold of pale tissue is as much of a fold as one of dense
tissue. None is of the slide as a whole: a net that knows which slide it looks at learns slides by
heart. The other is `convnet`'s; where both agree they are right on slides that taught neither.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property, partial, reduce
from itertools import chain, islice
from operator import add
from pathlib import Path
from typing import NamedTuple

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.qc.checks.by_example import layers, load_model
from thinsection.qc.checks.convnet import WHOLE, convnet_squares

INKS = ("blue", "green", "red", "black", "brown")
_OTHERS = ("glass", "tissue", "fold", "bubble", "coverslip", "dust", "edge")
CLASSES = (*_OTHERS, *(f"pen_{ink}" for ink in INKS))
_EDGE, _INKS = CLASSES.index("edge"), slice(-len(INKS), None)  # side by side
_MODEL = (
    Path(__file__).parent / "models" / "artefacts.npz"
)  # by tests/support/artefact_training.py
_UM = 8.0  # of the features' px: sigmas below are in px of this size
_WHITE_PERCENTILE = 97
_COARSE = 4  # px of 8 µm per px of the grid on which surroundings are measured
_GLASS_DENSITY = (
    0.03  # below which, a little smoothed, a px is glass and the net is not asked
)
_TISSUE_DENSITY = 0.1  # from which on a px counts for what the slide's tissue is like
_BAND_PX = 1 << 17  # px of a band of rows
_BLOCK_PX = 1 << 15  # px that the nets look at at once
_TEAL = 1.05  # times its density in blue light is the most that teal has in green light
_DARK_TISSUE, _INK_AGAINST_DARK = (
    0.7,
    1.5,
)  # usual density, natural log; times that of ink
_AGAINST_USUAL = 33  # which plane is the log of `near` over the usual density
_NEAR = slice(3, 6)  # which planes are the smoothed densities of red, green and blue
_SHARES = {
    "bubble": 0.0,
    "coverslip": 0.0,
    "fold": 0.7,
}  # of the small net in the mean; else half


def artefact_maps(ns: ArrayNamespace, rgb: Array, mpp_th: float) -> Mapping[str, Array]:
    """P of each class at each px, in 255ths, uint8 (H, W), of uint8 (H, W, 3) at mpp_th µm/px.

    The mean over both nets. Memory: 25 bytes a px, 50 more of one that is not plain glass, a band.
    """
    if (model := load_model(_MODEL)) is None:
        rule = f"the package must bring {_MODEL.name}"
        raise FileNotFoundError(f"{rule}, got no file; install it anew")
    xp, edge, size = ns.xp, max(1, round(_UM / mpp_th)), rgb.shape[:2]
    features = Features(ns, rgb, mpp_th)
    density = features.densities()
    coarse = (
        density if edge == 1 else (filters.block_means(ns, p, edge) for p in density)
    )
    squares, place = convnet_squares(ns, list(coarse))
    out = xp.zeros((len(CLASSES), math.prod(size)), dtype=xp.uint8)
    out[0] = 255
    own = xp.asarray([_SHARES.get(name, 0.5) for name in CLASSES], dtype=xp.float32)
    for band in features.bands:
        asked, flat = features.asked(band)
        for part in (slice(n, n + _BLOCK_PX) for n in range(0, len(asked), _BLOCK_PX)):
            some = [plane[part] for plane in flat]
            power = xp.exp(layers(ns, model, some).clip(-40, 40))
            power /= power.sum(axis=1, keepdims=True)
            row, column = asked[part] // size[1] // edge, asked[part] % size[1] // edge
            square = squares[place[row // 2, column // 2], row % 2 * 2 + column % 2]
            both = own * power + (1 - own) / WHOLE * square
            # of what is ink or the slide's edge the small net, which sees no shapes, says which
            inks = power[:, _INKS] / (power[:, _EDGE:].sum(axis=1, keepdims=True) + 0.1)
            inks *= both[:, _EDGE, None]
            both[:, _INKS] += inks
            both[:, _EDGE] -= inks.sum(axis=1)
            red, green, blue = some[_NEAR]
            p = dict(zip(CLASSES, both.T))
            # ink that lets green through better than blue is no blue ink, however thin it lies
            _move(p, "pen_blue", "pen_green", green < _TEAL * blue)
            # on a dark slide, what is no darker than its usual tissue is no black or red ink
            against = xp.exp(some[_AGAINST_USUAL])
            usual = (red + green + blue) / 3 > _DARK_TISSUE * against
            for name in ("pen_black", "pen_red"):
                _move(p, name, "tissue", usual & (against < _INK_AGAINST_DARK))
            out[:, asked[part]] = both.T * 255 + 0.5
    return {name: p.reshape(size) for name, p in zip(CLASSES, out)}


def _move(p: dict[str, Array], old: str, new: str, where: Array) -> None:
    """Gives P of one class to another, in place."""
    p[new] += where * p[old]
    p[old] *= ~where


class Features:
    """The small net's planes, by bands of rows; what is wide is kept on grids, of the whole slide.

    Memory: 10 bytes a px of uint8 RGB (H, W, 3) for the grids, 200 for a px of a band.
    """

    def __init__(self, ns: ArrayNamespace, rgb: Array, mpp_th: float) -> None:
        xp, scale, (height, width, _) = ns.xp, _UM / mpp_th, rgb.shape
        self._ns, self._rgb, self._mpp_th, self._scale = ns, rgb, mpp_th, scale
        some = [rgb[::4, ::4, c] for c in range(3)]
        white = [
            max(float(xp.percentile(plane, _WHITE_PERCENTILE)), 60.0) for plane in some
        ]
        tables = [-xp.log(xp.maximum(xp.arange(256), 4) / level) for level in white]
        self._tables = [table.astype(xp.float32).clip(-0.1, 4) for table in tables]
        self._edges = [max(1, round(px * scale)) for px in (2, 4)]
        step = math.lcm(*self._edges)
        step *= max(1, _BAND_PX // (width * step))
        self.bands = [
            slice(top, min(top + step, height)) for top in range(0, height, step)
        ]
        some = [table[plane] for table, plane in zip(self._tables, some, strict=True)]
        tissue = (_sum(some) / 3 > _TISSUE_DENSITY) & (
            _sum(some) / 3 < 1.2
        )  # no glass, not black
        known = bool(tissue.any())
        self._usual = [xp.median(p[tissue]) if known else xp.float32(0.3) for p in some]

    @cached_property
    def _grids(self) -> "tuple[list[_Grid], list[_Grid], list[_Grid]]":
        """What is smooth, against which a px is held, and the rest."""
        ns, xp, (edge, wide_edge) = self._ns, self._ns.xp, self._edges
        bands = zip(*(self._means(rows) for rows in self.bands), strict=True)
        means = [xp.concatenate(band) for band in bands]
        fine = [_Grid(ns, plane, edge, self._scale) for plane in means[:4]]
        wide = [_Grid(ns, plane, wide_edge, self._scale) for plane in means[4:]]
        cover, *around = (grid.smooth(24) for grid in wide[:4])
        near = [*(grid.smooth(6) for grid in fine[:3]), cover]
        around = [p._replace(means=p.means / (cover.means + 0.02)) for p in around]
        some = [*fine[3].ridges(6), *wide[4].ridges(12)]
        some += [fine[3].band(width) for width in (5, 9, 16)]
        yy, xx, xy = (grid.smooth(6).means for grid in wide[5:])
        # how coherent the gradients around a px are, [0, 1], and how strong
        flow = (
            xp.sqrt((yy - xx) ** 2 + 4 * xy * xy) / (yy + xx + 1e-4),
            xp.sqrt(yy + xx),
        )
        return near, around, [*some, *(cover._replace(means=plane) for plane in flow)]

    def densities(self, rows: slice = slice(None)) -> Iterator[Array]:
        """Optical densities of some rows in red, green and blue, against the slide's glass."""
        return (table[self._rgb[rows, :, c]] for c, table in enumerate(self._tables))

    def asked(self, rows: slice) -> tuple[Array, list[Array]]:
        """Which px of a band, by their place in the image, the net is asked about; planes there."""
        planes = self.planes(rows)
        first = list(islice(planes, _NEAR.stop))
        asked = self._ns.xp.flatnonzero(_sum(first[_NEAR]) / 3 > _GLASS_DENSITY)
        some = chain(first, planes) if len(asked) else ()
        flat = [plane.reshape(-1)[asked].clip(-7.9, 7.9) for plane in some]
        return asked + rows.start * first[0].shape[1], flat

    def planes(self, rows: slice) -> Iterator[Array]:
        """The planes of a band (rows, W), one by one."""
        ns, xp, scale, usual = self._ns, self._ns.xp, self._scale, self._usual
        smooth, wide, others = self._grids
        density, total, log, inside = self._around_band(rows, 12 * scale)
        near = [filters.gaussian(ns, plane, 1.5 * scale)[inside] for plane in density]
        shape = (rows, near[0].shape[1])
        yield from (
            *(plane[inside] for plane in density),
            *near,
        )  # `_NEAR` says where `near` is
        yield from (plane.spread(*shape) for plane in smooth)
        around = [plane.spread(*shape) for plane in wide]
        near_total, around_total, usual_total = (
            _sum(p) / 3 for p in (near, around, usual)
        )
        yield xp.log(
            (near_total + 0.04).clip(0.005) / (around_total + 0.04).clip(0.005)
        )
        for planes in (around, usual):
            yield from (
                share - other for share, other in zip(_shares(near), _shares(planes))
            )
        yield from (_balance(ns, near), _balance(ns, around))
        texture = filters.box_deviation(ns, total, 5)[inside]
        yield from (texture, texture / (near_total + 0.05).clip(0.02))
        for sigma in (1.2, 3):
            yield from (
                plane[inside] for plane in filters.ridges(ns, log, sigma * scale)
            )
        yield from (plane.spread(*shape) for plane in others)
        yield _from_border(ns, self._rgb.shape[:2], self._mpp_th, rows)
        yield xp.log(
            (near_total + 0.04).clip(0.005) / (usual_total + 0.04)
        )  # `_AGAINST_USUAL`
        yield xp.log((around_total + 0.04).clip(0.005) / (usual_total + 0.04))

    def _around_band(
        self, rows: slice, reach: float
    ) -> tuple[list[Array], Array, Array, slice]:
        """Densities, their mean and its logarithm of a band and px around it; which are its own."""
        first = max(0, rows.start - math.ceil(reach) - 1)
        density = [*self.densities(slice(first, rows.stop + math.ceil(reach) + 1))]
        total = _sum(density) / 3
        log = self._ns.xp.log(total.clip(0) + 0.06)
        return density, total, log, slice(rows.start - first, rows.stop - first)

    def _means(self, rows: slice) -> list[Array]:
        """Of a band, what is measured on blocks of px."""
        density, total, log, inside = self._around_band(rows, 6 * self._scale)
        kernel = partial(filters.gaussian_kernel, 1.5 * self._scale)
        down = filters.separable(self._ns, log, kernel(order=1), kernel())
        along = filters.separable(self._ns, log, kernel(), kernel(order=1))
        weight = (total / _TISSUE_DENSITY).clip(0, 1)
        planes = [*density, log, weight, *(plane * weight for plane in density)]
        planes += [log, down * down, along * along, down * along]
        edges = self._edges[:1] * 4 + self._edges[1:] * 8
        means = partial(filters.block_means, self._ns)
        return [
            means(plane[inside], edge)
            for plane, edge in zip(planes, edges, strict=True)
        ]


def _sum(planes: list[Array]) -> Array:
    return reduce(add, planes)


def _shares(planes: list[Array]) -> list[Array]:
    """The red's and the blue's share of the density."""
    total = (_sum(planes) + 0.1).clip(0.02)
    return [planes[0] / total, planes[2] / total]


def _balance(ns: ArrayNamespace, planes: list[Array]) -> Array:
    """Spread of the density over red, green and blue, relative to its sum: 0 is gray."""
    low, high = filters.extremes(ns, planes)
    return (high - low) / (_sum(planes) + 0.1).clip(0.02)


def _from_border(
    ns: ArrayNamespace, shape: tuple[int, int], mpp_th: float, rows: slice
) -> Array:
    """mm to the image's border, at most 1, of some rows."""
    down, along = (ns.xp.arange(edge, dtype=ns.xp.float32) for edge in shape)
    down, along = ns.xp.minimum(down, down[::-1]), ns.xp.minimum(along, along[::-1])
    return (ns.xp.minimum(down[rows, None], along[None]) * (mpp_th / 1000)).clip(0, 1)


class _Grid(NamedTuple):
    """Means over blocks of some px, for what is wide."""

    ns: ArrayNamespace
    means: Array
    edge: int  # of a block, px
    scale: float  # px in 8 µm

    def smooth(self, sigma: float) -> "_Grid":
        sigma *= self.scale / self.edge
        return self._replace(means=filters.gaussian(self.ns, self.means, sigma))

    def ridges(self, sigma: float) -> "list[_Grid]":
        found = filters.ridges(self.ns, self.means, sigma * (self.scale / self.edge))
        return [self._replace(means=plane) for plane in found]

    def band(self, width: float) -> "_Grid":
        """How far a px lies above the lower of two on opposite sides, `width` away, at best.

        The border of a dense region is higher on one side only and gets nothing.
        """
        xp, grid = self.ns.xp, self.smooth(width / 5).means
        reach = max(1, round(width * self.scale / self.edge))
        padded = xp.pad(grid, reach, mode="edge")
        height, breadth = grid.shape
        best = xp.full_like(grid, -10)
        for dy, dx in ((0, 1), (1, 0), (0.7, 0.7), (0.7, -0.7)):
            y, x = round(dy * reach), round(dx * reach)
            sides = [
                padded[reach + s * y :, reach + s * x :][:height, :breadth]
                for s in (-1, 1)
            ]
            best = xp.maximum(best, grid - xp.maximum(*sides))
        return self._replace(means=best)

    def spread(self, rows: slice, width: int) -> Array:
        """The values at every px of some rows, the first of which begins a block."""
        some = self.means[rows.start // self.edge : -(-rows.stop // self.edge)]
        whole = some.repeat(self.edge, axis=0).repeat(self.edge, axis=1)
        return whole[: rows.stop - rows.start, :width]
