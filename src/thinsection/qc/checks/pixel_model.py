"""A small network over px features: trained with a seed, kept as plain arrays, run on any device.

Two hidden layers, some 2,000 weights: a million px in a fraction of a second by three matrix
products, where a random forest of 100 trees takes seconds and does not run on a GPU.
"""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters, get_namespace
from thinsection.arrays.colour import gray32_from_rgb
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.types import MaskArray, RgbArray

Example = tuple[RgbArray, MaskArray]  # a picture, and where it shows what is to be found
WEIGHTS = ("w1", "b1", "w2", "b2", "w3", "b3")  # of the three layers: (in, out), (out,), ...
RECIPE = {"positive_share": 0.3, "hidden": 32, "num_epochs": 12, "batch_size": 512, "rate": 1e-3}
_FEATURES = ("rgb", "smooth", "laplace", "texture", "ridge", "frangi")
_SMOOTH_SIGMAS_PX = (2.0, 8.0)
_RIDGE_SIGMAS_PX = (1.0, 2.0, 4.0)
_FRANGI_SIGMAS_PX = (1.0, 3.0, 5.0, 7.0, 9.0)
_FRANGI_BETA, _FRANGI_GAMMA = 0.5, 15.0
_TEXTURE_EDGE_PX = 7
_REACH_PX = 36  # no feature looks farther: 4 times the widest sigma
_BAND_PX = 1 << 20  # of the image at once: a band and its features take some 100 MB
_BLOCK_PX = 1 << 13  # px per matrix product: features and hidden layers stay in the CPU's cache


def check_features(names: Iterable[str]) -> None:
    """Raises ConfigError where a name is of no feature."""
    unknown = [name for name in names if name not in _FEATURES]
    if unknown:
        raise ConfigError(f"features must be of {', '.join(_FEATURES)}, got {unknown[0]!r}")


def pixel_features(ns: ArrayNamespace, rgb: Array, names: Sequence[str]) -> dict[str, list[Array]]:
    """Feature name -> its planes, float32 (H, W) each, of uint8 (H, W, 3).

    Memory: O(H * W * planes).
    """
    check_features(names)
    channels = [rgb[..., c] * ns.xp.float32(1 / 255) for c in range(3)]
    gray = gray32_from_rgb(ns, rgb)

    def planes(name: str) -> list[Array]:
        match name:
            case "rgb":
                return channels
            case "smooth":
                return [filters.gaussian(ns, c, s) for s in _SMOOTH_SIGMAS_PX for c in channels]
            case "laplace":
                return [filters.laplacian(ns, gray)]
            case "texture":
                return [filters.box_deviation(ns, gray, _TEXTURE_EDGE_PX)]
            case "ridge":  # both eigenvalues of the Hessian at each scale
                return [v for sigma in _RIDGE_SIGMAS_PX for v in filters.ridges(ns, gray, sigma)]
        return [_frangi(ns, gray)]

    return {name: planes(name) for name in names}


def _frangi(ns: ArrayNamespace, gray: Array) -> Array:
    """Largest response over the scales to a dark line.

    Source: Frangi et al., Multiscale vessel enhancement filtering, 1998.
    """
    xp, best = ns.xp, ns.xp.zeros_like(gray)
    for sigma in _FRANGI_SIGMAS_PX:
        low, high = filters.ridges(ns, gray, sigma)
        size = xp.where(high == 0, 1e-10, high)
        blob = xp.exp(-((low / size) ** 2) / (2 * _FRANGI_BETA**2))
        strength = 1 - xp.exp(-(low**2 + high**2) / (2 * _FRANGI_GAMMA**2))
        best = xp.maximum(best, xp.where(high > 0, blob * strength, 0))
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelModel:
    """A trained classifier: P = sigmoid(w3 relu(w2 relu(w1 x + b1) + b2) + b3)."""

    features: tuple[str, ...]  # whose planes are x, in this order
    weights: tuple[npt.NDArray[np.float32], ...]  # `WEIGHTS`


def train(
    examples: Sequence[Example], features: tuple[str, ...], *, seed: int, num_samples: int
) -> PixelModel:
    """A model of the examples, on the CPU; the same inputs and seed give the same model.

    The seed decides the sampling, the first weights and the order of batches; num_samples px are
    drawn from all examples.

    Memory: O(px of the examples * features).

    Raises:
        InvalidInputError: the examples have no px of one of the classes.
    """
    from sklearn.neural_network import MLPClassifier

    x, y = _drawn(examples, features, seed, num_samples)
    shift, scale = x.mean(axis=0), x.std(axis=0) + 1e-6
    network = MLPClassifier(
        hidden_layer_sizes=(RECIPE["hidden"],) * 2,
        batch_size=RECIPE["batch_size"],
        learning_rate_init=RECIPE["rate"],
        random_state=seed,
    )
    for _ in range(int(RECIPE["num_epochs"])):  # `fit` warns that it stops before it converges
        network.partial_fit((x - shift) / scale, y, classes=[False, True])
    w1, w2, w3 = network.coefs_
    b1, b2, b3 = network.intercepts_
    w1 = w1 / scale[:, None]  # the standardisation, folded in
    weights = (w1, b1 - shift @ w1, w2, b2, w3, b3)
    return PixelModel(features=features, weights=tuple(v.astype(np.float32) for v in weights))


def _drawn(
    examples: Sequence[Example], features: Sequence[str], seed: int, num_samples: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Features (px, planes) and classes of px of the examples, both classes in fixed shares."""
    ns, rng = get_namespace("cpu"), np.random.default_rng(seed)
    found = [pixel_features(ns, rgb, features) for rgb, _ in examples]
    columns = [np.stack([p.ravel() for n in features for p in f[n]], axis=1) for f in found]
    y = np.concatenate([mask.ravel() for _, mask in examples])
    inside, outside = np.flatnonzero(y), np.flatnonzero(~y)
    if not len(inside) or not len(outside):
        what = "inside" if not len(inside) else "outside"
        raise InvalidInputError(f"examples must have px of both classes, got none {what} the masks")
    num_inside = int(num_samples * RECIPE["positive_share"])
    drawn = rng.choice(inside, num_inside), rng.choice(outside, num_samples - num_inside)
    chosen = np.concatenate(drawn)
    return np.concatenate(columns)[chosen], y[chosen]


def probabilities(
    ns: ArrayNamespace, rgb: Array, models: Mapping[Any, PixelModel]
) -> dict[Any, Array]:
    """P of each px by each model, float32 (H, W), from one pass over the image and its features.

    Bands of rows are taken with the rows beyond them that features look at, so that the result is
    that of the whole image.

    Memory: O(H * W * models + features of a band of about a million px).
    """
    height, width = rgb.shape[:2]
    rows = max(_REACH_PX, _BAND_PX // width)
    names = tuple(dict.fromkeys(name for model in models.values() for name in model.features))
    found = {key: ns.xp.empty((height, width), dtype=ns.xp.float32) for key in models}
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        low, high = max(0, top - _REACH_PX), min(height, bottom + _REACH_PX)
        features = pixel_features(ns, rgb[low:high], names)
        for key, model in models.items():
            planes = [plane for name in model.features for plane in features[name]]
            inside = [plane[top - low : bottom - low] for plane in planes]
            found[key][top:bottom] = predict(ns, model, inside)
    return found


def predict(ns: ArrayNamespace, model: PixelModel, planes: Sequence[Array]) -> Array:
    """P of each px, float32 in the shape of a plane; one plane per feature, in the model's order.

    Memory: O(px + 8,192 * (features + hidden)).
    """
    xp = ns.xp
    w1, b1, w2, b2, w3, b3 = (ns.upload(value, reason="model") for value in model.weights)
    # relu(h + b) = max(h, -b) + b: what is added goes into the next layer's bias, so that a block
    # of px is written once per layer
    b2 = b2 + b1 @ w2
    b3 = b3 + b2 @ w3
    flat = [plane.reshape(-1) for plane in planes]
    logit = xp.empty(flat[0].size, dtype=xp.float32)
    for start in range(0, logit.size, _BLOCK_PX):
        part = slice(start, start + _BLOCK_PX)
        one = xp.stack([plane[part] for plane in flat]).T @ w1
        two = xp.maximum(one, -b1, out=one) @ w2
        logit[part] = (xp.maximum(two, -b2, out=two) @ w3)[:, 0]
    logit += b3
    return (1 / (1 + xp.exp(-xp.clip(logit, -60, 60)))).reshape(planes[0].shape)


def save_model(path: Path, model: PixelModel) -> None:
    """Writes the arrays of a model as .npz, no pickle."""
    arrays: dict[str, Any] = dict(zip(WEIGHTS, model.weights, strict=True))
    with path.open("wb") as file:
        np.savez(file, features=model.features, **arrays)


def load_model(path: Path) -> PixelModel | None:
    """The model of a file, or None if it is not there or not whole."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            features, *weights = (arrays[name] for name in ("features", *WEIGHTS))
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return PixelModel(features=tuple(features.tolist()), weights=tuple(weights))
