"""Generated pictures at about 8 µm/px: tissue on glass, with pen marks.

No picture of another project is used. Colours, widths and textures are drawn from wide ranges, so
that a model learns what ink is rather than how one pen looks. The network that comes with the
package is made by `python -m tests.support.pixel_examples`; then raise `_VERSION` in qc/pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from thinsection.arrays import get_namespace
from thinsection.errors import InvalidInputError
from thinsection.qc.checks import pixel_model
from thinsection.qc.checks.forest import Example
from thinsection.qc.checks.pixel_model import WEIGHTS, PixelModel, pixel_features
from thinsection.types import MaskArray, RgbArray

_Floats = npt.NDArray[np.float64]

_EDGE_PX = 320
_NUM_PICTURES = 16
# Settings of training.
_NETWORK = {
    "hidden_layer_sizes": (32, 32),
    "batch_size": 512,
    "learning_rate_init": 1e-3,
}
_NUM_EPOCHS = 12
_POSITIVE_SHARE = 0.3

# transmitted light of ink, (R, G, B) in [0, 1], lowest and highest of each
INKS = {
    "blue": ((0.02, 0.08, 0.35), (0.30, 0.45, 0.85)),
    "green": ((0.02, 0.30, 0.10), (0.35, 0.75, 0.50)),
    "red": ((0.60, 0.02, 0.05), (0.95, 0.22, 0.30)),
    "black": ((0.02, 0.02, 0.02), (0.24, 0.24, 0.26)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stain:
    """Colours of a generated slide, transmitted light of dense tissue, (R, G, B) in [0, 1]."""

    nuclei: tuple[float, float, float]
    matrix: tuple[float, float, float]


STAINS = (
    Stain(nuclei=(0.36, 0.22, 0.52), matrix=(0.86, 0.52, 0.70)),  # H&E
    Stain(nuclei=(0.28, 0.20, 0.48), matrix=(0.78, 0.42, 0.62)),  # H&E, strong
    Stain(nuclei=(0.55, 0.35, 0.60), matrix=(0.92, 0.70, 0.80)),  # H&E, pale
    Stain(nuclei=(0.45, 0.28, 0.16), matrix=(0.72, 0.74, 0.84)),  # DAB and haematoxylin
    Stain(nuclei=(0.30, 0.12, 0.30), matrix=(0.82, 0.36, 0.48)),  # H&E, red
)


def train_pen() -> PixelModel:
    """The network that comes with the package, trained anew."""
    features = ("rgb", "smooth", "laplace", "texture")
    return train(pen_examples(0), features, seed=0, num_samples=120_000)


def pen_examples(seed: int) -> list[Example]:
    """Pictures with strokes of blue, green, red and black ink, and where the ink is."""
    rng = np.random.default_rng([seed, 1])
    pictures = []
    for number in range(_NUM_PICTURES):
        base = tissue_picture(rng, _EDGE_PX, STAINS[number % len(STAINS)])
        mask = np.zeros(base.shape[:2], dtype=bool)
        for color in list(INKS)[
            : 4 if number % 4 else 0
        ]:  # one in four has no ink at all
            low, high = INKS[color]
            ink = rng.uniform(low, high)
            if color == "black":
                ink = np.full(3, ink.mean()) + rng.uniform(-0.02, 0.02, 3)
            base, painted = paint(
                base, stroke(rng, _EDGE_PX, rng.uniform(5, 34)), ink, rng
            )
            mask |= painted
        pictures.append((_camera(base, rng), mask))
    return pictures


def tissue_picture(rng: np.random.Generator, edge_px: int, stain: Stain) -> _Floats:
    """Stained tissue on glass with fat, vessels and folds, float64 (edge, edge, 3) in [0, 1]."""
    shape = (edge_px, edge_px)
    outline = _noise(rng, shape, 40) + 0.35 * _noise(rng, shape, 8)
    density = np.clip(
        (outline - np.quantile(outline, rng.uniform(0.15, 0.6))) * 6, 0, 1
    )
    fat = _noise(rng, shape, 25) > 1.1
    cells = _noise(rng, shape, 2.5) > 0.1
    density = density * np.where(fat & cells, 0.05, 1.0)
    epithelium = np.clip(
        1.2 - np.abs(_noise(rng, shape, rng.uniform(10, 40))) * 4, 0, 1
    )
    nuclei = np.clip(
        0.35 + 0.25 * _noise(rng, shape, 0.8) + 0.25 * _noise(rng, shape, 6), 0, 1
    )
    nuclei = np.clip(nuclei + 0.45 * epithelium * (rng.random() < 0.7), 0, 1)
    fold = np.clip(1.6 - np.abs(_noise(rng, shape, 30)) * 18, 0, 1) * (
        rng.random() < 0.6
    )
    optical = (
        -np.log(np.array(stain.matrix)) * (1 - nuclei[..., None])
        - np.log(np.array(stain.nuclei)) * nuclei[..., None]
    )
    uneven = (0.75 + 0.2 * _noise(rng, shape, 12)).clip(0.1)
    thickness = density * (1 + 0.5 * epithelium) * uneven * (1 + 1.2 * fold)
    light = np.exp(-optical * thickness[..., None])
    blood = (_noise(rng, shape, 14) > 1.7) & (density > 0.5)
    red = np.array([0.80, 0.28, 0.34]) * (1 + 0.12 * _noise(rng, shape, 1.0))[..., None]
    light = np.where(blood[..., None], red, light)
    glass = rng.uniform(0.86, 0.97) + rng.uniform(-0.02, 0.02, 3)
    return np.asarray(np.clip(light * glass, 0, 1))


def stroke(rng: np.random.Generator, edge_px: int, width_px: float) -> _Floats:
    """Coverage in [0, 1] of one pen stroke: a smooth path, soft at its rim, streaked along it."""
    knots = rng.uniform(-0.1, 1.1, (4, 2)) * edge_px
    t = np.linspace(0, 1, 40 * int(edge_px / 32))[:, None]
    path = (
        (1 - t) ** 3 * knots[0]
        + 3 * (1 - t) ** 2 * t * knots[1]
        + 3 * (1 - t) * t**2 * knots[2]
        + t**3 * knots[3]
    )
    inside = np.zeros((edge_px, edge_px), dtype=bool)
    rows, columns = np.rint(path).astype(int).T
    kept = (rows >= 0) & (rows < edge_px) & (columns >= 0) & (columns < edge_px)
    inside[rows[kept], columns[kept]] = True
    if not inside.any():
        return np.zeros((edge_px, edge_px))
    distance = ndimage.distance_transform_edt(~inside)
    wobble = 1 + 0.15 * _noise(rng, (edge_px, edge_px), 5)
    rim = np.clip(
        (width_px / 2 * wobble - distance) / rng.uniform(1.0, 3.0) + 0.5, 0, 1
    )
    streaks = 1 - rng.uniform(0, 0.25) * np.abs(_noise(rng, (edge_px, edge_px), 2.0))
    return np.asarray(rim * np.clip(streaks, 0.3, 1))


def paint(
    base: _Floats, coverage: _Floats, ink: _Floats, rng: np.random.Generator
) -> tuple[_Floats, MaskArray]:
    """The picture under a layer of ink, and where the ink covers more than half."""
    shade = ink[None, None, :] ** (0.8 + 0.4 * coverage[..., None])
    opacity = (coverage * rng.uniform(0.85, 1.0))[..., None]
    dense = rng.uniform(0.3, 0.9)  # how much of the tissue shows through
    under = base**dense
    return base * (1 - opacity) + shade * under * opacity, coverage > 0.5


def _noise(
    rng: np.random.Generator, shape: tuple[int, int], sigma_px: float
) -> _Floats:
    """Smooth noise of mean 0 and standard deviation 1."""
    field = ndimage.gaussian_filter(rng.standard_normal(shape), sigma_px, mode="wrap")
    return np.asarray((field - field.mean()) / field.std())


def _camera(light: _Floats, rng: np.random.Generator) -> RgbArray:
    """Shading, noise and rounding of a scanner."""
    ramp = np.linspace(-1, 1, light.shape[1])[None, :] * rng.uniform(-0.02, 0.02)
    noisy = light * (1 + ramp)[..., None] + rng.normal(
        0, rng.uniform(0.002, 0.012), light.shape
    )
    return np.asarray(np.clip(np.rint(noisy * 255), 0, 255).astype(np.uint8))


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
    network = MLPClassifier(**_NETWORK, random_state=seed)
    # `fit` would warn that it stops before it converges
    for _ in range(_NUM_EPOCHS):
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
    num_inside = int(num_samples * _POSITIVE_SHARE)
    drawn_inside = rng.choice(inside, num_inside)
    drawn_outside = rng.choice(outside, num_samples - num_inside)
    return np.concatenate([drawn_inside, drawn_outside])


def save_model(path: Path, model: PixelModel) -> None:
    """Writes the arrays of a model as .npz, no pickle."""
    arrays = dict(zip(WEIGHTS, model.weights, strict=True))
    with path.open("wb") as file:
        np.savez(file, features=model.features, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    models = Path(pixel_model.__file__).parent / "models"
    save_model(models / "pen.npz", train_pen())
