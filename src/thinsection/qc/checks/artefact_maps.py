"""Classes of the work image's px: tissue, glass, a fold, ink, a bubble, dirt; by two nets.

The features of a small one are made so that they mean the same on any slide: optical
density against the slide's own glass; against the tissue around a px, and the slide's
usual tissue; ridges and borders of its logarithm, so that a fold of pale tissue is as
much of a fold as one of dense tissue. None is of the slide as a whole: a net that knows
which slide it looks at learns slides by heart. The other is `convnet`'s; where both agree
they are right on slides that taught neither.
"""

from collections.abc import Mapping
from pathlib import Path

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.qc.checks.artefact_features import (
    AGAINST_USUAL,
    FEATURE_UM,
    NEAR,
    Features,
)
from thinsection.qc.checks.convnet import WHOLE, convnet_squares
from thinsection.qc.checks.pixel_model import layers, load_model

INKS = ("blue", "green", "red", "black", "brown")
CLASSES = (
    "glass",
    "tissue",
    "fold",
    "bubble",
    "coverslip",
    "dust",
    "edge",
    "pen_blue",
    "pen_green",
    "pen_red",
    "pen_black",
    "pen_brown",
)
# µm/px; on coarser pictures the networks cannot tell an artefact from tissue.
COARSEST_MPP = 12.0
# The slide's edge and the inks stand side by side.
_EDGE = CLASSES.index("edge")
_INKS = slice(-len(INKS), None)
_MODEL = Path(__file__).parent / "models" / "artefacts.npz"
# Px that the nets look at at once.
_BLOCK_PX = 1 << 15
# Teal has at most so many times its density in blue light in green light.
_TEAL = 1.05
# Usual density of a dark slide's tissue, natural log; ink has so many times that.
_DARK_TISSUE = 0.7
_INK_AGAINST_DARK = 1.5
# Shares of the small net in the mean of both; it is half of all other classes.
_SMALL_NET_SHARES = {"bubble": 0.0, "coverslip": 0.0, "fold": 0.7}


def artefact_maps(ns: ArrayNamespace, rgb: Array, mpp_th: float) -> Mapping[str, Array]:
    """P of each class at each px, in 255ths, uint8 (H, W): the mean over both nets.

    Args:
        ns: device.
        rgb: uint8 (H, W, 3).
        mpp_th: µm per px of it.

    Memory: 25 bytes a px, 50 more of one that is not plain glass, a band.
    """
    model = load_model(_MODEL)
    if model is None:
        raise FileNotFoundError(
            f"the package must contain {_MODEL.name}, got no such file; install the package "
            "again"
        )
    xp = ns.xp
    height, width = rgb.shape[:2]
    edge = max(1, round(FEATURE_UM / mpp_th))
    features = Features(ns, rgb, mpp_th)
    squares, square_of = convnet_squares(ns, _coarse_density(ns, features, edge))
    shares = [_SMALL_NET_SHARES.get(name, 0.5) for name in CLASSES]
    small_share = xp.asarray(shares, dtype=xp.float32)
    out = xp.zeros((len(CLASSES), height * width), dtype=xp.uint8)
    out[0] = 255
    for band in features.bands:
        asked, planes = features.asked(band)
        for start in range(0, len(asked), _BLOCK_PX):
            block = slice(start, start + _BLOCK_PX)
            px = asked[block]
            values = [plane[block] for plane in planes]
            small = xp.exp(layers(ns, model, values).clip(-40, 40))
            small /= small.sum(axis=1, keepdims=True)
            row = px // width // edge
            column = px % width // edge
            square = squares[square_of[row // 2, column // 2], row % 2 * 2 + column % 2]
            both = small_share * small + (1 - small_share) / WHOLE * square
            _share_inks(both, small)
            _correct_inks(ns, both, values)
            out[:, px] = both.T * 255 + 0.5
    return {name: p.reshape(height, width) for name, p in zip(CLASSES, out)}


def _coarse_density(ns: ArrayNamespace, features: Features, edge: int) -> list[Array]:
    """Densities on blocks of px; of the whole image one is in memory at a time."""
    if edge == 1:
        return list(features.densities())
    return [filters.block_means(ns, plane, edge) for plane in features.densities()]


def _share_inks(both: Array, small: Array) -> None:
    """Divides P of ink or the slide's edge by the small net, which sees no shapes."""
    inks = small[:, _INKS] / (small[:, _EDGE:].sum(axis=1, keepdims=True) + 0.1)
    inks *= both[:, _EDGE, None]
    both[:, _INKS] += inks
    both[:, _EDGE] -= inks.sum(axis=1)


def _correct_inks(ns: ArrayNamespace, both: Array, values: list[Array]) -> None:
    """Moves P of ink to a class that the density of a px allows, in place."""
    p = dict(zip(CLASSES, both.T))
    red, green, blue = values[NEAR]
    # ink that lets green through better than blue is no blue ink, however thin it lies
    _move(p, "pen_blue", "pen_green", green < _TEAL * blue)
    # on a dark slide, px that are no darker than its usual tissue are no black or red ink
    against_usual = ns.xp.exp(values[AGAINST_USUAL])
    is_usual = (red + green + blue) / 3 > _DARK_TISSUE * against_usual
    is_usual &= against_usual < _INK_AGAINST_DARK
    _move(p, "pen_black", "tissue", is_usual)
    _move(p, "pen_red", "tissue", is_usual)


def _move(p: dict[str, Array], old: str, new: str, where: Array) -> None:
    """Gives P of one class to another, in place."""
    p[new] += where * p[old]
    p[old] *= ~where
