"""A check that finds what its example pictures show: pen marks, the edge of the coverslip.

Its model is a small network over px features, trained with a seed, kept as plain arrays, run on any
device. Two hidden layers, some 2,000 weights: a million px in a fraction of a second by three
matrix products, where a random forest of 100 trees takes seconds and does not run on a GPU.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters, get_namespace
from thinsection.arrays.morphology import dilated_by_square, drop_small, keep_elongated
from thinsection.errors import ConfigError, require
from thinsection.files.atomic import atomic_path
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length
from thinsection.qc.checks.measures import read_rgb
from thinsection.types import MaskArray, RgbArray

Example = tuple[
    RgbArray, MaskArray
]  # a picture, and where it shows what is to be found
WEIGHTS = (
    "w1",
    "b1",
    "w2",
    "b2",
    "w3",
    "b3",
)  # of the three layers: (in, out), (out,), ...
_NETWORK = {
    "hidden_layer_sizes": (32, 32),
    "batch_size": 512,
    "learning_rate_init": 1e-3,
}
_NUM_EPOCHS, _POSITIVE_SHARE = 12, 0.3
_MODELS = Path(__file__).parent / "models"
BUILT_IN = ("coverslip", "pen")  # made by tests/support/pixel_examples.py
_FEATURES = ("rgb", "smooth", "laplace", "texture", "ridge", "frangi")
_DEFAULT_FEATURES = ("rgb", "smooth", "laplace", "texture")
_TEXTURE_EDGE_PX, _REACH_PX = (
    7,
    36,
)  # no feature looks farther: 4 times the widest sigma
_BAND_PX = 1 << 20  # of the image at once: a band and its features take some 100 MB
_BLOCK_PX = (
    1 << 13
)  # px per matrix product: features and hidden layers stay in the CPU's cache


class ByExample(QcCheck, kind="by_example", guarded=False):
    """Removes px that look like the positive px of example pictures; they stay out of the mask."""

    name: str = "pen_markings"
    model: str = "pen"  # or 'coverslip', trained on generated examples; or 'own', trained on yours
    example_images: tuple[
        str, ...
    ] = ()  # picture files at the work resolution, for model 'own'
    example_masks: tuple[
        str, ...
    ] = ()  # one for each, bright where the picture shows it
    features: tuple[str, ...] = ()  # of `pixel_features`, for model 'own'
    threshold: float = 0.5  # on P
    min_area: str = area("100 px")  # smaller finds are dropped
    min_elongation: float = (
        0.0  # so are finds whose squared length over area is less; 0 keeps all
    )
    dilate: str = length(
        "0 px"
    )  # edge of the square by which finds grow; '0 px' leaves them
    seed: int = 0  # of the training of model 'own'
    num_samples: int = 120_000  # px drawn from the examples for it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_features(self.features)

    def __call__(self, view: QcView) -> Outcome:
        ns, least = view.ns, view.area_px(self.min_area)
        found = drop_small(ns, view.probability_of(self) > self.threshold, least)
        if self.min_elongation > 0:
            found = keep_elongated(ns, found, self.min_elongation, least)
        if (edge := round(view.length_px(self.dilate))) > 0:
            found = dilated_by_square(ns, found, edge)
        return view.left(view.mask_use & ~found, self.name, enforce=True)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.example_images, *self.example_masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelModel:
    """A trained classifier: P = sigmoid(w3 relu(w2 relu(w1 x + b1) + b2) + b3)."""

    features: tuple[str, ...]  # whose planes are x, in this order
    weights: tuple[npt.NDArray[np.float32], ...]  # `WEIGHTS`


def trained_model(check: ByExample, cache_dir: Path) -> PixelModel:
    """The model of a check: the package's, or for 'own' that of the cache, else trained for it.

    The file's name holds the hash of examples, features and training, so that another seed or
    another mask is another model. Two processes that train at once write the same bytes.
    ConfigError: no such model, features that are not its, or examples that do not pair up.
    """
    if check.model != "own":
        return _built_in(check)
    examples, content = _own_examples(check), hashlib.sha256()
    for rgb, mask in examples:
        content.update(rgb.tobytes() + mask.tobytes() + repr(rgb.shape).encode())
    features = check.features or _DEFAULT_FEATURES
    settings = {"seed": check.seed, "num_samples": check.num_samples}
    recipe = [
        content.hexdigest(),
        features,
        settings,
        _NETWORK,
        _NUM_EPOCHS,
        _POSITIVE_SHARE,
    ]
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    path = cache_dir / "qc-models" / f"own-{key}.npz"
    if (model := load_model(path)) is None:
        model = train(examples, features, **settings)
        with atomic_path(path) as temporary:
            save_model(temporary, model)
    return model


def _built_in(check: ByExample) -> PixelModel:
    model = (
        load_model(_MODELS / f"{check.model}.npz") if check.model in BUILT_IN else None
    )
    if model is None:
        names = ", ".join((*BUILT_IN, "own"))
        raise ConfigError(
            f"model must be one of {names}, got {check.model!r} in {check.name!r}"
        )
    own, got = ", ".join(model.features), ", ".join(check.features)
    rule = f"{check.name}.features must be those of the model {check.model!r} ({own})"
    got += "; leave them out, or train model 'own'"
    require(check.features in ((), model.features), rule, got, error=ConfigError)
    return model


def _own_examples(check: ByExample) -> list[Example]:
    images, masks = check.example_images, check.example_masks
    paired, got = (
        len(images) == len(masks) > 0,
        f"{len(images)} images and {len(masks)} masks",
    )
    require(
        paired,
        f"{check.name} must have one example mask per image",
        got,
        error=ConfigError,
    )
    pairs = [
        (read_rgb(i), read_rgb(m).max(axis=2) > 127) for i, m in zip(images, masks)
    ]
    for image, path, (rgb, mask) in zip(images, masks, pairs):
        got = f"{mask.shape[::-1]} and {rgb.shape[1::-1]}"
        rule = f"example mask {path!r} must have the size of {image!r}"
        require(rgb.shape[:2] == mask.shape, rule, got, error=ConfigError)
    return pairs


def check_features(names: Iterable[str]) -> None:
    """Raises ConfigError where a name is of no feature."""
    if unknown := [name for name in names if name not in _FEATURES]:
        raise ConfigError(
            f"features must be of {', '.join(_FEATURES)}, got {unknown[0]!r}"
        )


def pixel_features(
    ns: ArrayNamespace, rgb: Array, names: Sequence[str]
) -> dict[str, list[Array]]:
    """Feature name -> its planes, float32 (H, W) each, of uint8 (H, W, 3).

    Memory: O(H * W * planes).
    """
    check_features(names)
    channels = [rgb[..., c] * ns.xp.float32(1 / 255) for c in range(3)]
    gray = filters.gray32_from_rgb(ns, rgb)

    planes: dict[str, Callable[[], list[Array]]] = {
        "rgb": lambda: channels,
        "smooth": lambda: [
            filters.gaussian(ns, c, s) for s in (2.0, 8.0) for c in channels
        ],
        "laplace": lambda: [filters.laplacian(ns, gray)],
        "texture": lambda: [filters.box_deviation(ns, gray, _TEXTURE_EDGE_PX)],
        # both eigenvalues of the Hessian at each scale
        "ridge": lambda: [
            v for sigma in (1.0, 2.0, 4.0) for v in filters.ridges(ns, gray, sigma)
        ],
        "frangi": lambda: [_frangi(ns, gray)],
    }
    return {name: planes[name]() for name in names}


def _frangi(
    ns: ArrayNamespace, gray: Array, beta: float = 0.5, gamma: float = 15.0
) -> Array:
    """Largest response over the scales to a dark line. Source: Frangi et al. 1998."""
    xp, best = ns.xp, ns.xp.zeros_like(gray)
    for sigma in (1.0, 3.0, 5.0, 7.0, 9.0):
        low, high = filters.ridges(ns, gray, sigma)
        blob = xp.exp(-((low / xp.where(high == 0, 1e-10, high)) ** 2) / (2 * beta**2))
        strength = 1 - xp.exp(-(low**2 + high**2) / (2 * gamma**2))
        best = xp.maximum(best, xp.where(high > 0, blob * strength, 0))
    return best


def train(
    examples: Sequence[Example],
    features: tuple[str, ...],
    *,
    seed: int,
    num_samples: int,
) -> PixelModel:
    """A model of the examples, on the CPU; the same inputs and seed give the same model.

    The seed decides the sampling of num_samples px, the first weights and the order of batches.
    InvalidInputError: the examples have no px of one of the classes.

    Memory: O(px of the examples * features).
    """
    from sklearn.neural_network import MLPClassifier

    found = [pixel_features(get_namespace("cpu"), rgb, features) for rgb, _ in examples]
    columns = [
        np.stack([p.ravel() for n in features for p in f[n]], axis=1) for f in found
    ]
    y, rng = (
        np.concatenate([mask.ravel() for _, mask in examples]),
        np.random.default_rng(seed),
    )
    inside, outside = np.flatnonzero(y), np.flatnonzero(~y)
    for what, places in (("inside", inside), ("outside", outside)):
        rule = "examples must have px of both classes"
        require(len(places), rule, f"none {what} the masks")
    num_inside = int(num_samples * _POSITIVE_SHARE)
    drawn = (
        rng.choice(inside, num_inside),
        rng.choice(outside, num_samples - num_inside),
    )
    chosen = np.concatenate(drawn)
    x = np.concatenate(columns)[chosen]
    shift, scale = x.mean(axis=0), x.std(axis=0) + 1e-6
    network = MLPClassifier(**_NETWORK, random_state=seed)
    for _ in range(_NUM_EPOCHS):  # `fit` warns that it stops before it converges
        network.partial_fit((x - shift) / scale, y[chosen], classes=[False, True])
    w1, w2, w3 = network.coefs_
    b1, b2, b3 = network.intercepts_
    w1 = w1 / scale[:, None]  # the standardisation, folded in
    weights = (w1, b1 - shift @ w1, w2, b2, w3, b3)
    return PixelModel(
        features=features, weights=tuple(v.astype(np.float32) for v in weights)
    )


def probabilities(
    ns: ArrayNamespace, rgb: Array, models: Mapping[Any, PixelModel]
) -> dict[Any, Array]:
    """P of each px by each model, float32 (H, W), from one pass over the image and its features.

    Bands of rows are taken with the rows around them that features look at: there are no seams.

    Memory: O(H * W * models + features of a band of about a million px).
    """
    height, width = rgb.shape[:2]
    rows = max(_REACH_PX, _BAND_PX // width)
    names = list(
        dict.fromkeys(name for model in models.values() for name in model.features)
    )
    found = {key: ns.xp.empty((height, width), dtype=ns.xp.float32) for key in models}
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        low, high = max(0, top - _REACH_PX), min(height, bottom + _REACH_PX)
        features = pixel_features(ns, rgb[low:high], names)
        for key, model in models.items():
            planes = [
                p[top - low : bottom - low] for n in model.features for p in features[n]
            ]
            found[key][top:bottom] = predict(ns, model, planes)
    return found


def predict(ns: ArrayNamespace, model: PixelModel, planes: Sequence[Array]) -> Array:
    """P of each px, float32 in the shape of a plane; one plane per feature, in the model's order.

    Memory: O(px + 8,192 * (features + hidden)).
    """
    logit = layers(ns, model, [plane.reshape(-1) for plane in planes])[:, 0]
    return (1 / (1 + ns.xp.exp(-ns.xp.clip(logit, -60, 60)))).reshape(planes[0].shape)


def layers(ns: ArrayNamespace, model: PixelModel, flat: Sequence[Array]) -> Array:
    """Outputs of the last layer before sigmoid or softmax, float32 (px, outputs), of flat planes.

    Memory: O(px * outputs + 8,192 * (features + hidden)).
    """
    xp = ns.xp
    w1, b1, w2, b2, w3, b3 = (
        ns.upload(value, reason="model") for value in model.weights
    )
    # relu(h + b) = max(h, -b) + b; that b goes into the next layer's: one write of px per layer
    b2 = b2 + b1 @ w2
    b3 = b3 + b2 @ w3
    out = xp.empty((flat[0].size, len(b3)), dtype=xp.float32)
    for part in (slice(n, n + _BLOCK_PX) for n in range(0, len(out), _BLOCK_PX)):
        one = xp.stack([plane[part] for plane in flat]).T @ w1
        two = xp.maximum(one, -b1, out=one) @ w2
        xp.matmul(xp.maximum(two, -b2, out=two), w3, out=out[part])
    out += b3
    return out


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
