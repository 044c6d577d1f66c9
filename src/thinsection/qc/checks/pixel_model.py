"""A small network over features of pixels, for candidates of pen ink; it runs on any device.

Two hidden layers, some 2,000 weights, kept as plain arrays: a million pixels in a
fraction of a second by three matrix products, where a random forest of 100 trees takes
seconds and does not run on a GPU.
"""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.errors import ConfigError

K = TypeVar("K")

# Names of the arrays of the three layers: matrix (in, out) and bias (out,) of each.
WEIGHTS = ("w1", "b1", "w2", "b2", "w3", "b3")

_FEATURES = ("rgb", "smooth", "laplace", "texture")
_SMOOTH_SIGMAS = (2.0, 8.0)
_TEXTURE_EDGE_PX = 7
# Largest distance of a px that a feature depends on: 4 times the widest sigma.
_REACH_PX = 32
# Pixels of a band, the part of an image that is processed at once: with its features it takes some
# 30 MB.
_BAND_PX = 1 << 18
# Pixels of one matrix product: their features and hidden layers stay in the CPU's cache.
_BLOCK_PX = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelModel:
    """A trained classifier: P = sigmoid(w3 relu(w2 relu(w1 x + b1) + b2) + b3)."""

    # names of the features; their planes, in this order, are x
    features: tuple[str, ...]
    weights: tuple[npt.NDArray[np.float32], ...]  # in the order of `WEIGHTS`


def check_features(names: Iterable[str]) -> None:
    """Raises ConfigError: a name is not the name of a feature."""
    for name in names:
        if name not in _FEATURES:
            raise ConfigError(
                f"features must be from {', '.join(_FEATURES)}, got {name!r}"
            )


def pixel_features(
    ns: ArrayNamespace, rgb: Array, names: Sequence[str]
) -> dict[str, list[Array]]:
    """Planes of each feature, float32 (H, W), by its name, for an image uint8 (H, W, 3).

    Memory: O(H * W * planes).
    """
    check_features(names)
    channels = [rgb[..., c] * ns.xp.float32(1 / 255) for c in range(3)]
    gray = filters.gray32_from_rgb(ns, rgb)
    return {name: _feature_planes(ns, name, channels, gray) for name in names}


def _feature_planes(
    ns: ArrayNamespace, name: str, channels: list[Array], gray: Array
) -> list[Array]:
    match name:
        case "rgb":
            return channels
        case "smooth":
            planes = []
            for sigma in _SMOOTH_SIGMAS:
                planes += [filters.gaussian(ns, channel, sigma) for channel in channels]
            return planes
        case "laplace":
            return [filters.laplacian(ns, gray)]
        case _:
            return [filters.box_deviation(ns, gray, _TEXTURE_EDGE_PX)]


def probabilities(
    ns: ArrayNamespace, rgb: Array, models: Mapping[K, PixelModel]
) -> dict[K, Array]:
    """Probability of each px by each model, float32 (H, W), in one pass over the image.

    Each band of rows is processed with the rows around it that its features depend on, so there are
    no seams between bands.

    Memory: O(H * W * models + features of a band of about 250,000 px).
    """
    height, width = rgb.shape[:2]
    # a multiple of the rows that filters make at once, so that their blocks are those of one band
    band_rows = _REACH_PX * max(1, _BAND_PX // width // _REACH_PX)
    names: list[str] = []
    for model in models.values():
        names += [name for name in model.features if name not in names]
    result = {key: ns.xp.empty((height, width), dtype=ns.xp.float32) for key in models}
    for top in range(0, height, band_rows):
        bottom = min(height, top + band_rows)
        low = max(0, top - _REACH_PX)
        high = min(height, bottom + _REACH_PX)
        features = pixel_features(ns, rgb[low:high], names)
        for key, model in models.items():
            planes: list[Array] = []
            for name in model.features:
                planes += [plane[top - low : bottom - low] for plane in features[name]]
            result[key][top:bottom] = predict(ns, model, planes)
    return result


def predict(ns: ArrayNamespace, model: PixelModel, planes: Sequence[Array]) -> Array:
    """Probability of each px, float32 in the shape of a plane.

    The planes are those of the model's features, in its order.

    Memory: O(px + 8,192 * (features + hidden)).
    """
    flat = [plane.reshape(-1) for plane in planes]
    xp = ns.xp
    w1, b1, w2, b2, w3, b3 = (
        ns.upload(value, reason="model") for value in model.weights
    )
    # relu(h + b) = max(h, -b) + b. The added b becomes part of the bias of the next layer, which
    # saves one write of all px per layer.
    b2 = b2 + b1 @ w2
    b3 = b3 + b2 @ w3
    logit = xp.empty((flat[0].size, 1), dtype=xp.float32)
    for start in range(0, len(logit), _BLOCK_PX):
        block = slice(start, start + _BLOCK_PX)
        hidden = xp.stack([plane[block] for plane in flat]).T @ w1
        xp.maximum(hidden, -b1, out=hidden)
        hidden = hidden @ w2
        xp.maximum(hidden, -b2, out=hidden)
        xp.matmul(hidden, w3, out=logit[block])
    logit += b3
    return (1 / (1 + xp.exp(-xp.clip(logit[:, 0], -60, 60)))).reshape(planes[0].shape)


def load_model(path: Path) -> PixelModel | None:
    """Reads the model of a file; None if the file is missing or incomplete."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            features = tuple(arrays["features"].tolist())
            weights = tuple(arrays[name] for name in WEIGHTS)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return PixelModel(features=features, weights=weights)
