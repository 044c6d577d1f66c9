"""Checks that find what their example pictures show: pen marks, the edge of the coverslip."""

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.arrays import get_namespace
from thinsection.arrays.morphology import dilated_by_square, drop_small
from thinsection.errors import ConfigError
from thinsection.qc.examples import EXAMPLES_VERSION, Example, coverslip_examples, pen_examples
from thinsection.qc.folds import keep_elongated
from thinsection.qc.light import remove
from thinsection.qc.measures import read_rgb
from thinsection.qc.pixel_features import pixel_features
from thinsection.qc.pixel_model import (
    PixelModel,
    Training,
    load_model,
    save_model,
    train,
)
from thinsection.qc.sizes import area_px, length_px
from thinsection.qc.view import Outcome, QcView

_BUILT_IN: dict[str, Callable[[int], list[Example]]] = {
    "pen": pen_examples,
    "coverslip": coverslip_examples,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByExample:
    """Removes px that look like the positive px of example pictures.

    Attributes:
        name: of the check and its column.
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

    name: str = "pen_markings"
    model: str = "pen"
    example_images: tuple[str, ...] = ()
    example_masks: tuple[str, ...] = ()
    features: tuple[str, ...] = ("rgb", "smooth", "laplace", "texture")
    threshold: float = 0.5
    min_area: str = "100 px"
    min_elongation: float = 0.0
    dilate: str = "0 px"
    seed: int = 0
    num_samples: int = 120_000


def by_example(view: QcView, params: ByExample) -> Outcome:
    """Removes what the trained model finds; what it found stays out of the final mask."""
    ns = view.ns
    least = area_px(params.min_area, view.mpp_th, key="min_area")
    found = drop_small(ns, view.probability_of(params) > params.threshold, least)
    if params.min_elongation > 0:
        found = keep_elongated(ns, found, params.min_elongation, least)
    edge = round(length_px(params.dilate, view.mpp_th, key="dilate"))
    if edge > 0:
        found = dilated_by_square(ns, found, edge)
    return remove(view, found, params.name, enforce=True)


def trained_model(params: ByExample, cache_dir: Path) -> PixelModel:
    """The model of a check: from the cache, else trained and put there.

    The file's name holds the hash of examples, features and training, so that another seed or
    another mask is another model. Two processes that train at once write the same bytes.

    Args:
        params: of the check.
        cache_dir: folder of the cache; made if it is not there.

    Raises:
        ConfigError: no such model, or examples that do not pair up.
    """
    training = Training(seed=params.seed, num_samples=params.num_samples)
    examples: list[Example] | None = None
    if params.model == "own":
        examples = _own_examples(params)
        content = hashlib.sha256()
        for rgb, mask in examples:
            content.update(rgb.tobytes() + mask.tobytes() + repr(rgb.shape).encode())
        source = content.hexdigest()
    elif params.model in _BUILT_IN:
        source = f"{params.model} {EXAMPLES_VERSION} {params.seed}"
    else:
        known = ", ".join((*_BUILT_IN, "own"))
        raise ConfigError(f"model must be one of {known}, got {params.model!r} in {params.name!r}")
    recipe = json.dumps([source, params.features, asdict(training)])
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    path = cache_dir / "qc-models" / f"{params.model}-{key}.npz"
    model = load_model(path)
    if model is None:
        model = _train(examples or _BUILT_IN[params.model](params.seed), params, training)
        _keep(path, model)
    return model


def _train(examples: list[Example], params: ByExample, training: Training) -> PixelModel:
    ns = get_namespace("cpu")  # training is the same whatever the device of the run
    features = []
    for rgb, _ in examples:
        planes = pixel_features(ns, rgb, params.features)
        columns = [plane.ravel() for name in params.features for plane in planes[name]]
        features.append(np.stack(columns, axis=1))
    return train(features, [mask.ravel() for _, mask in examples], training)


def _keep(path: Path, model: PixelModel) -> None:
    """A cache file appears whole; `qc` may not import `store`, and a lost cache is retrained."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        save_model(temporary, model)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _own_examples(params: ByExample) -> list[Example]:
    images, paths = params.example_images, params.example_masks
    if not images or len(images) != len(paths):
        raise ConfigError(
            f"{params.name} must have one example mask per image, got {len(images)} images "
            f"and {len(paths)} masks"
        )
    pairs = [(read_rgb(image), _as_mask(read_rgb(mask))) for image, mask in zip(images, paths)]
    for (rgb, mask), image, path in zip(pairs, images, paths, strict=True):
        if rgb.shape[:2] != mask.shape:
            raise ConfigError(
                f"example mask {path!r} must have the size of {image!r}, "
                f"got {mask.shape[::-1]} and {rgb.shape[1::-1]}"
            )
    return pairs


def _as_mask(rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    return np.asarray(rgb.max(axis=2) > 127)
