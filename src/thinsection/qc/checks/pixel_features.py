"""What a pixel classifier sees of a px: colour, surroundings, edges, ridges."""

from collections.abc import Iterable, Sequence

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import gray32_from_rgb
from thinsection.errors import ConfigError

FEATURES = ("rgb", "smooth", "laplace", "texture", "ridge", "frangi")
_SMOOTH_SIGMAS_PX = (2.0, 8.0)
_RIDGE_SIGMAS_PX = (1.0, 2.0, 4.0)
_FRANGI_SIGMAS_PX = (1.0, 3.0, 5.0, 7.0, 9.0)
_FRANGI_BETA, _FRANGI_GAMMA = 0.5, 15.0
_TEXTURE_EDGE_PX = 7
REACH_PX = 36  # no feature looks farther: 4 times the widest sigma


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
    channels = [rgb[..., c] * ns.xp.float32(1 / 255) for c in range(3)]
    gray = gray32_from_rgb(ns, rgb)
    return {name: _planes(ns, name, channels, gray) for name in names}


def _planes(ns: ArrayNamespace, name: str, channels: Sequence[Array], gray: Array) -> list[Array]:
    """The planes of one feature, from channels and gray in [0, 1]."""
    if name == "rgb":
        return list(channels)
    if name == "smooth":
        return [filters.gaussian(ns, c, sigma) for sigma in _SMOOTH_SIGMAS_PX for c in channels]
    if name == "laplace":
        return [filters.laplacian(ns, gray)]
    if name == "texture":
        return [filters.box_deviation(ns, gray, _TEXTURE_EDGE_PX)]
    if name == "ridge":  # both eigenvalues of the Hessian at each scale
        return [value for sigma in _RIDGE_SIGMAS_PX for value in filters.ridges(ns, gray, sigma)]
    return [_frangi(ns, gray)]


def _frangi(ns: ArrayNamespace, gray: Array) -> Array:
    """Largest response over the scales to a dark line.

    Source: Frangi et al., Multiscale vessel enhancement filtering, 1998.
    """
    xp = ns.xp
    best = xp.zeros_like(gray)
    for sigma in _FRANGI_SIGMAS_PX:
        low, high = filters.ridges(ns, gray, sigma)
        size = xp.where(high == 0, 1e-10, high)
        blob = xp.exp(-((low / size) ** 2) / (2 * _FRANGI_BETA**2))
        strength = 1 - xp.exp(-(low**2 + high**2) / (2 * _FRANGI_GAMMA**2))
        best = xp.maximum(best, xp.where(high > 0, blob * strength, 0))
    return best
