"""A small network over features of pixels: trained with a seed, run on any device.

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

from thinsection.arrays import Array, ArrayNamespace, filters, get_namespace
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.types import MaskArray, RgbArray

K = TypeVar("K")
Example = tuple[RgbArray, MaskArray]  # a picture, and the mask of the pixels to find

# Names of the arrays of the three layers: matrix (in, out) and bias (out,) of each.
WEIGHTS = ("w1", "b1", "w2", "b2", "w3", "b3")
# Settings of training; a change here changes the models that are trained on own examples.
NETWORK = {
    "hidden_layer_sizes": (32, 32),
    "batch_size": 512,
    "learning_rate_init": 1e-3,
}
NUM_EPOCHS = 12
POSITIVE_SHARE = 0.3

_FEATURES = ("rgb", "smooth", "laplace", "texture", "ridge", "frangi")
_SMOOTH_SIGMAS = (2.0, 8.0)
_RIDGE_SIGMAS = (1.0, 2.0, 4.0)
_FRANGI_BETA = 0.5
_FRANGI_GAMMA = 15.0
_FRANGI_SIGMAS = (1.0, 3.0, 5.0, 7.0, 9.0)
_TEXTURE_EDGE_PX = 7
# Largest distance of a px that a feature depends on: 4 times the widest sigma.
_REACH_PX = 36
# Pixels of a band, the part of an image that is processed at once: with its features it takes some
# 100 MB.
_BAND_PX = 1 << 20
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
        case "texture":
            return [filters.box_deviation(ns, gray, _TEXTURE_EDGE_PX)]
        case "ridge":
            # two planes for each scale: the eigenvalues of the Hessian
            planes = []
            for sigma in _RIDGE_SIGMAS:
                planes += filters.ridges(ns, gray, sigma)
            return planes
        case _:
            return [_frangi(ns, gray)]


def _frangi(ns: ArrayNamespace, gray: Array) -> Array:
    """Largest response over the scales to a dark line.

    Source: Frangi et al., Multiscale vessel enhancement filtering, 1998.
    """
    xp = ns.xp
    best = xp.zeros_like(gray)
    for sigma in _FRANGI_SIGMAS:
        low, high = filters.ridges(ns, gray, sigma)
        blob = xp.exp(
            -((low / xp.where(high == 0, 1e-10, high)) ** 2) / (2 * _FRANGI_BETA**2)
        )
        strength = 1 - xp.exp(-(low**2 + high**2) / (2 * _FRANGI_GAMMA**2))
        best = xp.maximum(best, xp.where(high > 0, blob * strength, 0))
    return best


def train(
    examples: Sequence[Example],
    features: tuple[str, ...],
    *,
    seed: int,
    num_samples: int,
) -> PixelModel:
    """Trains a model on examples, on the CPU; the same inputs give the same model.

    Args:
        examples: pictures with masks.
        features: names of `pixel_features`.
        seed: decides the sampled px, the initial weights and the order of batches.
        num_samples: pixels that are drawn from the examples.

    Memory: O(px of the examples * features).

    Raises:
        InvalidInputError: the examples have no px of one of the classes.
    """
    from sklearn.neural_network import MLPClassifier

    matrices = []
    for rgb, _ in examples:
        planes_by_name = pixel_features(get_namespace("cpu"), rgb, features)
        columns = []
        for name in features:
            columns += [plane.ravel() for plane in planes_by_name[name]]
        matrices.append(np.stack(columns, axis=1))
    x = np.concatenate(matrices)
    y = np.concatenate([mask.ravel() for _, mask in examples])
    chosen = _draw_samples(y, num_samples, np.random.default_rng(seed))
    x = x[chosen]
    shift = x.mean(axis=0)
    scale = x.std(axis=0) + 1e-6
    network = MLPClassifier(**NETWORK, random_state=seed)
    # `fit` would warn that it stops before it converges
    for _ in range(NUM_EPOCHS):
        network.partial_fit((x - shift) / scale, y[chosen], classes=[False, True])
    w1, w2, w3 = network.coefs_
    b1, b2, b3 = network.intercepts_
    # the standardisation becomes part of the first layer
    w1 = w1 / scale[:, None]
    b1 = b1 - shift @ w1
    weights = tuple(value.astype(np.float32) for value in (w1, b1, w2, b2, w3, b3))
    return PixelModel(features=features, weights=weights)


def _draw_samples(
    y: npt.NDArray[np.bool_], num_samples: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draws px of both classes, with replacement."""
    inside = np.flatnonzero(y)
    outside = np.flatnonzero(~y)
    for side, places in (("inside", inside), ("outside", outside)):
        if not len(places):
            raise InvalidInputError(
                f"examples must have pixels of both classes, got none {side} the masks"
            )
    num_inside = int(num_samples * POSITIVE_SHARE)
    drawn_inside = rng.choice(inside, num_inside)
    drawn_outside = rng.choice(outside, num_samples - num_inside)
    return np.concatenate([drawn_inside, drawn_outside])


def probabilities(
    ns: ArrayNamespace, rgb: Array, models: Mapping[K, PixelModel]
) -> dict[K, Array]:
    """Probability of each px by each model, float32 (H, W), in one pass over the image.

    Each band of rows is processed with the rows around it that its features depend on, so there are
    no seams between bands.

    Memory: O(H * W * models + features of a band of about a million px).
    """
    height, width = rgb.shape[:2]
    band_rows = max(_REACH_PX, _BAND_PX // width)
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


def save_model(path: Path, model: PixelModel) -> None:
    """Writes the arrays of a model as .npz, no pickle."""
    arrays = dict(zip(WEIGHTS, model.weights, strict=True))
    with path.open("wb") as file:
        np.savez(file, features=model.features, **arrays)  # type: ignore[arg-type]


def load_model(path: Path) -> PixelModel | None:
    """Reads the model of a file; None if the file is missing or incomplete."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            features = tuple(arrays["features"].tolist())
            weights = tuple(arrays[name] for name in WEIGHTS)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return PixelModel(features=features, weights=weights)
