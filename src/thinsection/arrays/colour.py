"""Colour on either device, with scikit-image's definitions: sRGB uint8 in, float64 out."""

import math

from thinsection.arrays.namespace import Array, ArrayNamespace
from thinsection.errors import InvalidInputError

_GRAY = (0.2125, 0.7154, 0.0721)  # luma weights of R, G, B
_YUV = (  # rows: Y, U, V
    (0.299, 0.587, 0.114),
    (-0.14714119, -0.28886916, 0.43601035),
    (0.61497538, -0.51496512, -0.10001026),
)
_FLOOR = 1e-6  # transmitted share below which a px counts as black, so that its log is finite
_NAMES = ("hed", "hdx", "fgx", "bex", "rbd", "gdx", "hax", "bro", "bpx", "ahx", "hpx")
STAINS = tuple(f"{name}_from_rgb" for name in _NAMES)


def gray_from_rgb(ns: ArrayNamespace, rgb: Array) -> Array:
    """Luma in [0, 1], float64 (H, W), of uint8 (H, W, 3)."""
    red, green, blue = (rgb[..., c] / 255.0 * weight for c, weight in enumerate(_GRAY))
    return red + green + blue


def gray32_from_rgb(ns: ArrayNamespace, rgb: Array) -> Array:
    """The same in float32, with 8 bytes a px in place of 32: for large strips."""
    gray = rgb[..., 0] * ns.xp.float32(_GRAY[0] / 255)
    gray += rgb[..., 1] * ns.xp.float32(_GRAY[1] / 255)
    gray += rgb[..., 2] * ns.xp.float32(_GRAY[2] / 255)
    return gray


def yuv_from_rgb(ns: ArrayNamespace, rgb: Array) -> Array:
    """Y, U and V, float64 (H, W, 3), of uint8 (H, W, 3)."""
    return (rgb / 255.0) @ ns.xp.asarray(_YUV).T


def channel_std(ns: ArrayNamespace, rgb: Array) -> Array:
    """Population standard deviation over R, G, B of each px, 0 to 255, float64 (H, W)."""
    # sums of bytes and of their squares are whole numbers below 2**24: exact in float32
    red, green, blue = (rgb[..., c].astype(ns.xp.float32) for c in range(3))
    total = red + green + blue
    squares = red * red + green * green + blue * blue
    return ns.xp.sqrt((3 * squares - total * total).astype(ns.xp.float64)) / 3.0


def saturation(ns: ArrayNamespace, rgb: Array) -> Array:
    """Saturation of HSV, float64 (H, W) in [0, 1]."""
    highest, lowest = rgb.max(axis=2).astype(ns.xp.float64), rgb.min(axis=2)
    return (highest - lowest) / ns.xp.maximum(highest, 1.0)


def stains_from_rgb(ns: ArrayNamespace, rgb: Array, stain: str) -> Array:
    """Amount of each of the three stains of one of `STAINS`, float64 (H, W, 3), >= 0.

    A channel's share of log(1e-6) stands for its optical density, as scikit-image has it.

    Source: Ruifrok and Johnston, Quantification of histochemical staining by color
        deconvolution, 2001; the vectors are those of scikit-image.

    Raises:
        InvalidInputError: no such stain.
    """
    if stain not in STAINS:
        raise InvalidInputError(f"stain must be one of {', '.join(STAINS)}, got {stain!r}")
    from skimage import color

    levels = ns.xp.maximum(ns.xp.arange(256) / 255.0, _FLOOR)
    log = (ns.xp.log(levels) / math.log(_FLOOR))[rgb]
    amounts = log @ ns.xp.asarray(getattr(color, stain))
    return ns.xp.maximum(amounts, 0.0, out=amounts)
