"""What a pixel classifier sees of a px: colour, surroundings, edges, ridges."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import gray32_from_rgb
from thinsection.errors import ConfigError

_SMOOTH_SIGMAS_PX = (2.0, 8.0)
_RIDGE_SIGMAS_PX = (1.0, 2.0, 4.0)
_FRANGI_SIGMAS_PX = (1.0, 3.0, 5.0, 7.0, 9.0)
_FRANGI_BETA, _FRANGI_GAMMA = 0.5, 15.0
_TEXTURE_EDGE_PX = 7
REACH_PX = 36  # no feature looks farther: 4 times the widest sigma


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planes:
    """The image as features are made of it: float32 (H, W) in [0, 1]."""

    ns: ArrayNamespace
    channels: tuple[Array, Array, Array]
    gray: Array


def _rgb(planes: _Planes) -> list[Array]:
    return list(planes.channels)


def _smooth(planes: _Planes) -> list[Array]:
    return [
        filters.gaussian(planes.ns, channel, sigma)
        for sigma in _SMOOTH_SIGMAS_PX
        for channel in planes.channels
    ]


def _laplace(planes: _Planes) -> list[Array]:
    return [filters.laplacian(planes.ns, planes.gray)]


def _texture(planes: _Planes) -> list[Array]:
    return [filters.box_deviation(planes.ns, planes.gray, _TEXTURE_EDGE_PX)]


def _ridge(planes: _Planes) -> list[Array]:
    """Both eigenvalues of the Hessian at each scale."""
    return [
        value
        for sigma in _RIDGE_SIGMAS_PX
        for value in filters.ridges(planes.ns, planes.gray, sigma)
    ]


def _frangi(planes: _Planes) -> list[Array]:
    """Largest response over the scales to a dark line.

    Source: Frangi et al., Multiscale vessel enhancement filtering, 1998.
    """
    xp = planes.ns.xp
    best = xp.zeros_like(planes.gray)
    for sigma in _FRANGI_SIGMAS_PX:
        low, high = filters.ridges(planes.ns, planes.gray, sigma)
        size = xp.where(high == 0, 1e-10, high)
        blob = xp.exp(-((low / size) ** 2) / (2 * _FRANGI_BETA**2))
        strength = 1 - xp.exp(-(low**2 + high**2) / (2 * _FRANGI_GAMMA**2))
        best = xp.maximum(best, xp.where(high > 0, blob * strength, 0))
    return [best]


FEATURES: dict[str, Callable[[_Planes], list[Array]]] = {
    "rgb": _rgb,
    "smooth": _smooth,
    "laplace": _laplace,
    "texture": _texture,
    "ridge": _ridge,
    "frangi": _frangi,
}


def check_features(names: Iterable[str]) -> None:
    """Raises ConfigError where a feature is not of `FEATURES`."""
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        known = ", ".join(FEATURES)
        raise ConfigError(f"features must be of {known}, got {unknown[0]!r}")


def pixel_features(ns: ArrayNamespace, rgb: Array, names: Sequence[str]) -> dict[str, list[Array]]:
    """Feature name -> its planes, float32 (H, W) each, of uint8 (H, W, 3).

    Args:
        ns: where arrays live.
        rgb: the image.
        names: of `FEATURES`.

    Memory: O(H * W * planes).

    Raises:
        ConfigError: no such feature.
    """
    check_features(names)
    red, green, blue = (rgb[..., c] * ns.xp.float32(1 / 255) for c in range(3))
    planes = _Planes(ns=ns, channels=(red, green, blue), gray=gray32_from_rgb(ns, rgb))
    return {name: FEATURES[name](planes) for name in names}
