"""A small network over px features: trained with a seed, kept as plain arrays, run on any device.

Two hidden layers: some 2,000 weights classify a million px in a fraction of a second by three
matrix products, where a random forest of 100 trees takes seconds and does not run on a GPU.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace
from thinsection.errors import InvalidInputError

Weights = npt.NDArray[np.float32]
_BLOCK_PX = 1 << 13  # px per matrix product: features and hidden layers stay in the CPU's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelModel:
    """A trained classifier: P = sigmoid(w3 relu(w2 relu(w1 (x - shift) / scale + b1) + b2) + b3).

    Attributes:
        shift, scale: (F,) standardisation of the features.
        w1, b1, w2, b2, w3, b3: weights (in, out) and biases (out,) of the three layers.
    """

    shift: Weights
    scale: Weights
    w1: Weights
    b1: Weights
    w2: Weights
    b2: Weights
    w3: Weights
    b3: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained.

    Attributes:
        seed: of the sampling, the first weights and the order of batches.
        num_samples: px drawn from all examples.
        positive_share: of the drawn px, from [0, 1].
        hidden: width of both hidden layers.
        num_epochs: passes over the drawn px.
        batch_size: px per step.
        learning_rate: of Adam.
    """

    seed: int = 0
    num_samples: int = 120_000
    positive_share: float = 0.3
    hidden: int = 32
    num_epochs: int = 12
    batch_size: int = 512
    learning_rate: float = 3e-3


def train(
    features: Sequence[npt.NDArray[np.float32]],
    labels: Sequence[npt.NDArray[np.bool_]],
    training: Training,
) -> PixelModel:
    """A model of the examples; the same inputs and seed give the same model.

    Args:
        features: (px, F) of each example.
        labels: (px,) of each example.
        training: how.

    Memory: O(num_samples * F) beyond the inputs.

    Raises:
        InvalidInputError: the examples have no px of one of the classes.
    """
    rng = np.random.default_rng(training.seed)
    x, y = _draw(np.concatenate(features), np.concatenate(labels), training, rng)
    shift, scale = x.mean(axis=0), x.std(axis=0) + 1e-6
    return PixelModel(shift=shift, scale=scale, **_fit((x - shift) / scale, y, training))


def predict(ns: ArrayNamespace, model: PixelModel, planes: Sequence[Array]) -> Array:
    """P of each px, float32 in the shape of a plane.

    Args:
        ns: where arrays live.
        model: of `train`.
        planes: float32 arrays of one shape, one per feature in the order of the training.

    Memory: O(px + 8,192 * (features + hidden)).
    """
    xp = ns.xp
    at = {f.name: ns.upload(getattr(model, f.name), reason="model") for f in fields(PixelModel)}
    # relu(h + b) = max(h, -b) + b: what is added goes into the next layer's bias, so that a block
    # of px is written once per layer
    first = at["w1"] / at["scale"][:, None]  # the standardisation, folded in
    bias1 = at["b1"] - at["shift"] @ first
    bias2 = at["b2"] + bias1 @ at["w2"]
    bias3 = at["b3"] + bias2 @ at["w3"]
    flat = [plane.reshape(-1) for plane in planes]
    logit = xp.empty(flat[0].size, dtype=xp.float32)
    for start in range(0, logit.size, _BLOCK_PX):
        part = slice(start, start + _BLOCK_PX)
        one = xp.stack([plane[part] for plane in flat]).T @ first
        two = xp.maximum(one, -bias1, out=one) @ at["w2"]
        logit[part] = (xp.maximum(two, -bias2, out=two) @ at["w3"])[:, 0]
    logit += bias3
    return (1 / (1 + xp.exp(-xp.clip(logit, -60, 60)))).reshape(planes[0].shape)


def save_model(path: Path, model: PixelModel) -> None:
    """Writes the arrays of a model as .npz, no pickle."""
    with path.open("wb") as file:
        np.savez(file, **{f.name: getattr(model, f.name) for f in fields(PixelModel)})


def load_model(path: Path) -> PixelModel | None:
    """The model of a file, or None if it is not there or not whole."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return PixelModel(**{f.name: arrays[f.name] for f in fields(PixelModel)})
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def _draw(
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.bool_],
    training: Training,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    inside, outside = np.flatnonzero(y), np.flatnonzero(~y)
    if not len(inside) or not len(outside):
        what = "inside" if not len(inside) else "outside"
        raise InvalidInputError(f"examples must have px of both classes, got none {what} the masks")
    num_inside = int(training.num_samples * training.positive_share)
    chosen = np.concatenate(
        [rng.choice(inside, num_inside), rng.choice(outside, training.num_samples - num_inside)]
    )
    return x[chosen].astype(np.float32), y[chosen]


def _fit(
    x: npt.NDArray[np.float32], y: npt.NDArray[np.bool_], training: Training
) -> dict[str, Weights]:
    """Weights and biases of the three layers, by Adam on the cross-entropy."""
    from sklearn.neural_network import MLPClassifier

    network = MLPClassifier(
        hidden_layer_sizes=(training.hidden, training.hidden),
        batch_size=training.batch_size,
        learning_rate_init=training.learning_rate,
        random_state=training.seed,
    )
    for _ in range(training.num_epochs):  # `fit` would warn that it stops before it converges
        network.partial_fit(x, y, classes=[False, True])
    layers = zip(network.coefs_, network.intercepts_, strict=True)
    return {
        name: values.astype(np.float32)
        for n, (weights, biases) in enumerate(layers, 1)
        for name, values in ((f"w{n}", weights), (f"b{n}", biases))
    }
