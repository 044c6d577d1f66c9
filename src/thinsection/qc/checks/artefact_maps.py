"""What each px of the work image shows: tissue, glass, a fold, ink, a bubble, dirt; by two nets.

The features of a small one are made so that they mean the same on any slide: optical density
against the slide's own glass; against the tissue around a px, and the slide's usual tissue; ridges
and borders of its logarithm, so that a fold of pale tissue is as much of a fold as one of dense
tissue. None is of the slide as a whole: a net that knows which slide it looks at learns slides by
heart. The other is `convnet`'s; where both agree they are right on slides that taught neither.
"""

import math
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add
from pathlib import Path

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.qc.checks.by_example import layers, load_model
from thinsection.qc.checks.convnet import WHOLE, convnet_squares

INKS = ("blue", "green", "red", "black", "brown")
_OTHERS = ("glass", "tissue", "fold", "bubble", "coverslip", "dust", "edge")
CLASSES = (*_OTHERS, *(f"pen_{ink}" for ink in INKS))
_EDGE, _INKS = CLASSES.index("edge"), slice(-len(INKS), None)  # side by side
_MODEL = Path(__file__).parent / "models" / "artefacts.npz"  # by tests/support/artefact_training.py
_UM = 8.0  # of the features' px: sigmas below are in px of this size
_WHITE_PERCENTILE = 97
_COARSE = 4  # px of 8 µm per px of the grid on which surroundings are measured
_GLASS_DENSITY = 0.03  # below which, a little smoothed, a px is glass and the net is not asked
_TISSUE_DENSITY = 0.1  # from which on a px counts for what the slide's tissue is like
_STEPS = 4096  # of a feature's unit, as it waits: all are below 6, and float16 is slow on many CPUs
_BAND_PX = 1 << 15  # px that the nets look at at once
_TEAL = 1.05  # times its density in blue light is the most that teal has in green light
_DARK_TISSUE, _INK_AGAINST_DARK = 0.7, 1.5  # usual density, natural log; times that of ink
_AGAINST_USUAL = 33  # which plane is the log of `near` over the usual density
_NEAR = slice(3, 6)  # which planes are the smoothed densities of red, green and blue
_SHARES = {"bubble": 0.0, "coverslip": 0.0, "fold": 0.7}  # of the small net in the mean; else half


def artefact_maps(ns: ArrayNamespace, rgb: Array, mpp_th: float) -> Mapping[str, Array]:
    """P of each class at each px, in 255ths, uint8 (H, W), of uint8 (H, W, 3) at mpp_th µm/px.

    The mean over both nets. Memory: 110 bytes a px, and 70 of one that is not plain glass.
    """
    if (model := load_model(_MODEL)) is None:
        rule = f"the package must bring {_MODEL.name}"
        raise FileNotFoundError(f"{rule}, got no file; install it anew")
    xp, edge, size = ns.xp, max(1, round(_UM / mpp_th)), rgb.shape[:2]
    density = densities(ns, rgb)
    near = [filters.gaussian(ns, plane, 1.5 * _UM / mpp_th) for plane in density]
    asked = xp.flatnonzero(_sum(near) / 3 > _GLASS_DENSITY)
    coarse = xp.stack([filters.block_means(ns, plane, edge) for plane in density], axis=2)
    planes = features(ns, density, near, mpp_th)
    del density, near  # which are let go of with their last plane
    asked_of = (plane.reshape(-1)[asked].clip(-7.9, 7.9) for plane in planes)
    flat = [xp.rint(plane * xp.float32(_STEPS)).astype(xp.int16) for plane in asked_of]
    squares, place = convnet_squares(ns, coarse)
    out = xp.zeros((len(CLASSES), math.prod(size)), dtype=xp.uint8)
    out[0] = 255
    own = xp.asarray([_SHARES.get(name, 0.5) for name in CLASSES], dtype=xp.float32)
    for start in range(0, len(asked), _BAND_PX):
        part = slice(start, start + _BAND_PX)
        some = [plane[part] / xp.float32(_STEPS) for plane in flat]
        power = xp.exp(layers(ns, model, some).clip(-40, 40))
        power /= power.sum(axis=1, keepdims=True)
        row, column = asked[part] // size[1] // edge, asked[part] % size[1] // edge
        square = squares[place[row // 2, column // 2], row % 2 * 2 + column % 2]
        both = own * power + (1 - own) / WHOLE * square
        # of what is ink or the slide's edge the small net, which sees no shapes, says which it is
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


def densities(ns: ArrayNamespace, rgb: Array) -> list[Array]:
    """Optical densities (H, W) of red, green and blue against the slide's glass, of uint8 RGB."""
    xp = ns.xp
    white = [max(float(xp.percentile(rgb[::4, ::4, c], _WHITE_PERCENTILE)), 60.0) for c in range(3)]
    table = [-xp.log(xp.maximum(xp.arange(256), 4) / level) for level in white]
    return [table[c].astype(xp.float32)[rgb[..., c]].clip(-0.1, 4) for c in range(3)]


def features(
    ns: ArrayNamespace, density: list[Array], near: list[Array], mpp_th: float
) -> Iterator[Array]:
    """The small net's planes (H, W), one by one; `near` are the densities, a little smoothed."""
    xp, scale = ns.xp, _UM / mpp_th
    total = _sum(density) / 3
    yield from (*density, *near)  # `_NEAR` says where `near` is
    yield from (_Coarse(ns, plane, scale, 2).smooth(6) for plane in density)
    weight = (total / _TISSUE_DENSITY).clip(0, 1)
    cover = _Coarse(ns, weight, scale).smooth(24)
    yield cover
    around = [_Coarse(ns, p * weight, scale).smooth(24) / (cover + 0.02) for p in density]
    some = [plane[::4, ::4] for plane in density]
    tissue = (_sum(some) / 3 > _TISSUE_DENSITY) & (_sum(some) / 3 < 1.2)  # neither glass nor black
    known = bool(tissue.any())
    usual = [xp.median(p[tissue]) if known else xp.float32(0.3) for p in some]
    near_total, around_total, usual_total = (_sum(planes) / 3 for planes in (near, around, usual))
    yield xp.log((near_total + 0.04).clip(0.005) / (around_total + 0.04).clip(0.005))
    for planes in (around, usual):
        yield from (share - other for share, other in zip(_shares(near), _shares(planes)))
    yield from (_balance(ns, near), _balance(ns, around))
    del density, near, around, planes, weight, cover
    texture = filters.box_deviation(ns, total, 5)
    yield from (texture, texture / (near_total + 0.05).clip(0.02))
    del texture
    log = xp.log(total.clip(0) + 0.06)
    for sigma in (1.2, 3):
        yield from filters.ridges(ns, log, sigma * scale)
    yield from (*_Coarse(ns, log, scale, 2).ridges(6), *_Coarse(ns, log, scale).ridges(12))
    yield from (_band(ns, log, scale, width) for width in (5, 9, 16))
    yield from (*_flow(ns, log, scale), _from_border(ns, total.shape, mpp_th))
    yield xp.log((near_total + 0.04).clip(0.005) / (usual_total + 0.04))  # `_AGAINST_USUAL`
    yield xp.log((around_total + 0.04).clip(0.005) / (usual_total + 0.04))


def _sum(planes: list[Array]) -> Array:
    return reduce(add, planes)


def _shares(planes: list[Array]) -> list[Array]:
    """The red's and the blue's share of the density."""
    total = (_sum(planes) + 0.1).clip(0.02)
    return [planes[0] / total, planes[2] / total]


def _balance(ns: ArrayNamespace, planes: list[Array]) -> Array:
    """Spread of the density over red, green and blue, relative to its sum: 0 is gray."""
    high, low = (reduce(pick, planes) for pick in (ns.xp.maximum, ns.xp.minimum))
    return (high - low) / (_sum(planes) + 0.1).clip(0.02)


def _band(ns: ArrayNamespace, image: Array, scale: float, width: float) -> Array:
    """How far a px lies above the lower of two px on opposite sides, `width` px away, at best.

    The border of a dense region is higher on one side only and gets nothing.
    """
    xp, edge = ns.xp, max(1, round(2 * scale))
    blocks = filters.block_means(ns, image, edge)
    grid = filters.gaussian(ns, blocks, width / 5 * scale / edge)
    reach = max(1, round(width * scale / edge))
    padded = xp.pad(grid, reach, mode="edge")
    height, breadth = grid.shape
    best = xp.full_like(grid, -10)
    for dy, dx in ((0, 1), (1, 0), (0.7, 0.7), (0.7, -0.7)):
        y, x = round(dy * reach), round(dx * reach)
        sides = [padded[reach + s * y :, reach + s * x :][:height, :breadth] for s in (-1, 1)]
        best = xp.maximum(best, grid - xp.maximum(*sides))
    return _spread(best, edge, image.shape)


def _flow(ns: ArrayNamespace, image: Array, scale: float) -> list[Array]:
    """Coherence of the gradients around each px, [0, 1], and their strength."""
    none, first = (filters.gaussian_kernel(1.5 * scale, order=order) for order in (0, 1))
    down = filters.separable(ns, image, first, none)
    along = filters.separable(ns, image, none, first)
    grids = [_Coarse(ns, plane, scale) for plane in (down * down, along * along, down * along)]
    yy, xx, xy = (grid.smooth(6) for grid in grids)
    return [ns.xp.sqrt((yy - xx) ** 2 + 4 * xy * xy) / (yy + xx + 1e-4), ns.xp.sqrt(yy + xx)]


def _from_border(ns: ArrayNamespace, shape: tuple[int, int], mpp_th: float) -> Array:
    """mm to the image's border, at most 1."""
    down, along = (ns.xp.arange(edge, dtype=ns.xp.float32) for edge in shape)
    down, along = ns.xp.minimum(down, down[::-1]), ns.xp.minimum(along, along[::-1])
    return (ns.xp.minimum(down[:, None], along[None]) * (mpp_th / 1000)).clip(0, 1)


class _Coarse:
    """A plane on a grid of some px of 8 µm, for what is wide."""

    def __init__(self, ns: ArrayNamespace, plane: Array, scale: float, px: int = _COARSE) -> None:
        self._ns, self._shape = ns, plane.shape
        self._edge = max(1, round(px * scale))
        self._scale, self._means = scale / self._edge, filters.block_means(ns, plane, self._edge)

    def smooth(self, sigma: float) -> Array:
        return self._fine(filters.gaussian(self._ns, self._means, sigma * self._scale))

    def ridges(self, sigma: float) -> list[Array]:
        return list(map(self._fine, filters.ridges(self._ns, self._means, sigma * self._scale)))

    def _fine(self, plane: Array) -> Array:
        return _spread(plane, self._edge, self._shape)


def _spread(plane: Array, edge: int, shape: tuple[int, int]) -> Array:
    """A grid's values at every px."""
    return plane.repeat(edge, axis=0).repeat(edge, axis=1)[: shape[0], : shape[1]]
