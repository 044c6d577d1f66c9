"""What a pixel classifier sees of a px: colour, surroundings, edges, ridges."""

from collections.abc import Callable

import numpy as np

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import gray_from_rgb
from thinsection.errors import ConfigError

_SMOOTH_SIGMAS_PX = (2.0, 8.0)
_RIDGE_SIGMAS_PX = (1.0, 2.0, 4.0)
_FRANGI_SIGMAS_PX = (1.0, 3.0, 5.0, 7.0, 9.0)
_FRANGI_BETA, _FRANGI_GAMMA = 0.5, 15.0
_TEXTURE_EDGE_PX = 7


def _rgb(ns: ArrayNamespace, rgb: Array, gray: Array) -> list[Array]:
    return [rgb[..., c].astype(ns.xp.float32) / 255 for c in range(3)]


def _smooth(ns: ArrayNamespace, rgb: Array, gray: Array) -> list[Array]:
    channels = _rgb(ns, rgb, gray)
    return [filters.gaussian(ns, c, sigma) for sigma in _SMOOTH_SIGMAS_PX for c in channels]


def _laplace(ns: ArrayNamespace, rgb: Array, gray: Array) -> list[Array]:
    return [filters.laplacian(ns, gray)]


def _texture(ns: ArrayNamespace, rgb: Array, gray: Array) -> list[Array]:
    """Standard deviation of gray in a square around the px."""
    mean = ns.ndimage.uniform_filter(gray, size=_TEXTURE_EDGE_PX, mode="nearest")
    square = ns.ndimage.uniform_filter(gray * gray, size=_TEXTURE_EDGE_PX, mode="nearest")
    return [ns.xp.sqrt(ns.xp.maximum(square - mean * mean, 0.0))]


def _ridge(ns: ArrayNamespace, rgb: Array, gray: Array) -> list[Array]:
    """Both eigenvalues of the Hessian at each scale."""
    return [value for sigma in _RIDGE_SIGMAS_PX for value in filters.ridges(ns, gray, sigma)]


def _frangi(ns: ArrayNamespace, rgb: Array, gray: Array) -> list[Array]:
    """Largest response over the scales to a dark line.

    Source: Frangi et al., Multiscale vessel enhancement filtering, 1998.
    """
    best = ns.xp.zeros_like(gray)
    for sigma in _FRANGI_SIGMAS_PX:
        low, high = filters.ridges(ns, gray, sigma)
        size = ns.xp.where(high == 0, 1e-10, high)
        blob = ns.xp.exp(-((low / size) ** 2) / (2 * _FRANGI_BETA**2))
        strength = 1 - ns.xp.exp(-(low**2 + high**2) / (2 * _FRANGI_GAMMA**2))
        best = ns.xp.maximum(best, ns.xp.where(high > 0, blob * strength, 0))
    return [best]


FEATURES: dict[str, Callable[[ArrayNamespace, Array, Array], list[Array]]] = {
    "rgb": _rgb,
    "smooth": _smooth,
    "laplace": _laplace,
    "texture": _texture,
    "ridge": _ridge,
    "frangi": _frangi,
}


def check_features(names: tuple[str, ...]) -> None:
    """Raises ConfigError where a feature is not of `FEATURES`."""
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        known = ", ".join(FEATURES)
        raise ConfigError(f"features must be of {known}, got {unknown[0]!r}")


def pixel_features(ns: ArrayNamespace, rgb: Array, names: tuple[str, ...]) -> Array:
    """float32 (H * W, F) of uint8 (H, W, 3).

    Args:
        ns: where arrays live.
        rgb: the image.
        names: of `FEATURES`; F is their number of channels.

    Memory: O(H * W * F).

    Raises:
        ConfigError: no such feature.
    """
    check_features(names)
    gray = gray_from_rgb(ns, rgb).astype(ns.xp.float32)
    channels = [channel for name in names for channel in FEATURES[name](ns, rgb, gray)]
    return ns.xp.stack([c.ravel() for c in channels], axis=1).astype(np.float32, copy=False)
