"""A check that finds what its example pictures show: pen marks, the edge of the coverslip."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from thinsection.arrays import Array, ArrayNamespace, get_namespace
from thinsection.arrays.morphology import dilated_by_square, drop_small
from thinsection.errors import ConfigError
from thinsection.files.atomic import atomic_path
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length
from thinsection.qc.checks.examples import (
    EXAMPLES_VERSION,
    Example,
    coverslip_examples,
    pen_examples,
)
from thinsection.qc.checks.folds import keep_elongated
from thinsection.qc.checks.measures import read_rgb
from thinsection.qc.checks.pixel_features import REACH_PX, check_features, pixel_features
from thinsection.qc.checks.pixel_model import (
    PixelModel,
    Training,
    load_model,
    predict,
    save_model,
    train,
)

_BUILT_IN: dict[str, Callable[[int], list[Example]]] = {
    "pen": pen_examples,
    "coverslip": coverslip_examples,
}
_BAND_PX = 1 << 20  # of the image at once: a band and its features take some 100 MB


@dataclass(frozen=True, kw_only=True)
class ByExample(QcCheck):
    """Removes px that look like the positive px of example pictures; they stay out of the mask.

    Attributes:
        model: 'pen' or 'coverslip', trained on generated examples, or 'own', trained on yours.
        example_images: picture files at the work resolution, for model 'own'.
        example_masks: one mask picture for each, bright where the picture shows it.
        features: of `pixel_features.FEATURES`.
        threshold: on P.
        min_area: smaller finds are dropped.
        min_elongation: so are finds whose squared length over area is less; 0 keeps all.
        dilate: edge of the square by which finds grow; '0 px' leaves them.
        seed: of the training.
        num_samples: px drawn from the examples for it.
    """

    kind: ClassVar[str] = "by_example"

    name: str = "pen_markings"
    model: str = "pen"
    example_images: tuple[str, ...] = ()
    example_masks: tuple[str, ...] = ()
    features: tuple[str, ...] = ("rgb", "smooth", "laplace", "texture")
    threshold: float = 0.5
    min_area: str = area("100 px")
    min_elongation: float = 0.0
    dilate: str = length("0 px")
    seed: int = 0
    num_samples: int = 120_000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_features(self.features)

    def __call__(self, view: QcView) -> Outcome:
        ns, least = view.ns, view.area_px(self.min_area)
        found = drop_small(ns, view.probability_of(self) > self.threshold, least)
        if self.min_elongation > 0:
            found = keep_elongated(ns, found, self.min_elongation, least)
        edge = round(view.length_px(self.dilate))
        if edge > 0:
            found = dilated_by_square(ns, found, edge)
        return view.left(view.mask_use & ~found, self.name, enforce=True)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.example_images, *self.example_masks)


def trained_model(check: ByExample, cache_dir: Path) -> PixelModel:
    """The model of a check: from the cache, else trained and put there.

    The file's name holds the hash of examples, features and training, so that another seed or
    another mask is another model. Two processes that train at once write the same bytes.

    Args:
        check: that asks.
        cache_dir: folder of the cache; made if it is not there.

    Raises:
        ConfigError: no such model, or examples that do not pair up.
    """
    training = Training(seed=check.seed, num_samples=check.num_samples)
    examples: list[Example] | None = None
    if check.model == "own":
        examples = _own_examples(check)
        content = hashlib.sha256()
        for rgb, mask in examples:
            content.update(rgb.tobytes() + mask.tobytes() + repr(rgb.shape).encode())
        source = content.hexdigest()
    elif check.model in _BUILT_IN:
        source = f"{check.model} {EXAMPLES_VERSION} {check.seed}"
    else:
        known = ", ".join((*_BUILT_IN, "own"))
        raise ConfigError(f"model must be one of {known}, got {check.model!r} in {check.name!r}")
    recipe = json.dumps([source, check.features, asdict(training)])
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    path = cache_dir / "qc-models" / f"{check.model}-{key}.npz"
    model = load_model(path)
    if model is None:
        model = _train(examples or _BUILT_IN[check.model](check.seed), check, training)
        with atomic_path(path) as temporary:
            save_model(temporary, model)
    return model


def probabilities(
    ns: ArrayNamespace, rgb: Array, models: Mapping[ByExample, PixelModel]
) -> dict[ByExample, Array]:
    """P of each px by each model, float32 (H, W), from one pass over the image and its features.

    Bands of rows are taken one after the other, each with the rows beyond it that its features
    look at, so that the result is that of the whole image.

    Memory: O(H * W * models + features of a band of about a million px).
    """
    height, width = rgb.shape[:2]
    rows = max(REACH_PX, _BAND_PX // width)
    names = tuple(dict.fromkeys(name for check in models for name in check.features))
    found = {check: ns.xp.empty((height, width), dtype=ns.xp.float32) for check in models}
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        low, high = max(0, top - REACH_PX), min(height, bottom + REACH_PX)
        features = pixel_features(ns, rgb[low:high], names)
        for check, model in models.items():
            planes = [plane for name in check.features for plane in features[name]]
            inside = [plane[top - low : bottom - low] for plane in planes]
            found[check][top:bottom] = predict(ns, model, inside)
    return found


def _train(examples: list[Example], check: ByExample, training: Training) -> PixelModel:
    ns = get_namespace("cpu")  # training is the same whatever the device of the run
    features = []
    for rgb, _ in examples:
        planes = pixel_features(ns, rgb, check.features)
        columns = [plane.ravel() for name in check.features for plane in planes[name]]
        features.append(np.stack(columns, axis=1))
    return train(features, [mask.ravel() for _, mask in examples], training)


def _own_examples(check: ByExample) -> list[Example]:
    images, masks = check.example_images, check.example_masks
    if not images or len(images) != len(masks):
        raise ConfigError(
            f"{check.name} must have one example mask per image, got {len(images)} images "
            f"and {len(masks)} masks"
        )
    examples = []
    for image, path in zip(images, masks, strict=True):
        rgb, mask = read_rgb(image), read_rgb(path).max(axis=2) > 127
        if rgb.shape[:2] != mask.shape:
            raise ConfigError(
                f"example mask {path!r} must have the size of {image!r}, "
                f"got {mask.shape[::-1]} and {rgb.shape[1::-1]}"
            )
        examples.append((rgb, mask))
    return examples
