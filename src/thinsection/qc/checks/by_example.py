"""A check that finds what its example pictures show: pen marks, the edge of the coverslip."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from thinsection.arrays.morphology import dilated_by_square, drop_small, keep_elongated
from thinsection.errors import ConfigError
from thinsection.files.atomic import atomic_path
from thinsection.qc.checks import pixel_model
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length
from thinsection.qc.checks.measures import read_rgb
from thinsection.qc.checks.pixel_model import Example, PixelModel, load_model

_MODELS = Path(__file__).parent / "models"  # made by tests/support/pixel_examples.py
_DEFAULT_FEATURES = ("rgb", "smooth", "laplace", "texture")


@dataclass(frozen=True, kw_only=True)
class ByExample(QcCheck):
    """Removes px that look like the positive px of example pictures; they stay out of the mask."""

    kind: ClassVar[str] = "by_example"
    name: str = "pen_markings"
    model: str = "pen"  # or 'coverslip', trained on generated examples; or 'own', trained on yours
    example_images: tuple[str, ...] = ()  # picture files at the work resolution, for model 'own'
    example_masks: tuple[str, ...] = ()  # one for each, bright where the picture shows it
    features: tuple[str, ...] = ()  # of `pixel_features`, for model 'own'
    threshold: float = 0.5  # on P
    min_area: str = area("100 px")  # smaller finds are dropped
    min_elongation: float = 0.0  # so are finds whose squared length over area is less; 0 keeps all
    dilate: str = length("0 px")  # edge of the square by which finds grow; '0 px' leaves them
    seed: int = 0  # of the training of model 'own'
    num_samples: int = 120_000  # px drawn from the examples for it

    def __post_init__(self) -> None:
        super().__post_init__()
        pixel_model.check_features(self.features)

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


def trained_model(check: ByExample, cache_dir: Path) -> PixelModel:
    """The model of a check: the package's, or for 'own' that of the cache, else trained for it.

    The file's name holds the hash of examples, features and training, so that another seed or
    another mask is another model. Two processes that train at once write the same bytes.

    Raises:
        ConfigError: no such model, features that are not its, or examples that do not pair up.
    """
    if check.model != "own":
        return _built_in(check)
    examples = _own_examples(check)
    content = hashlib.sha256()
    for rgb, mask in examples:
        content.update(rgb.tobytes() + mask.tobytes() + repr(rgb.shape).encode())
    features = check.features or _DEFAULT_FEATURES
    settings = {"seed": check.seed, "num_samples": check.num_samples}
    recipe = json.dumps([content.hexdigest(), features, settings, pixel_model.RECIPE])
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    path = cache_dir / "qc-models" / f"own-{key}.npz"
    if (model := load_model(path)) is None:
        model = pixel_model.train(examples, features, **settings)
        with atomic_path(path) as temporary:
            pixel_model.save_model(temporary, model)
    return model


def _built_in(check: ByExample) -> PixelModel:
    known = sorted(path.stem for path in _MODELS.glob("*.npz"))
    model = load_model(_MODELS / f"{check.model}.npz") if check.model in known else None
    if model is None:
        names = ", ".join((*known, "own"))
        raise ConfigError(f"model must be one of {names}, got {check.model!r} in {check.name!r}")
    if check.features not in ((), model.features):
        own, got = ", ".join(model.features), ", ".join(check.features)
        rule = f"{check.name}.features must be those of the model {check.model!r} ({own})"
        raise ConfigError(f"{rule}, got {got}; leave them out, or train model 'own'")
    return model


def _own_examples(check: ByExample) -> list[Example]:
    images, masks = check.example_images, check.example_masks
    if not images or len(images) != len(masks):
        got = f"{len(images)} images and {len(masks)} masks"
        raise ConfigError(f"{check.name} must have one example mask per image, got {got}")
    examples = []
    for image, path in zip(images, masks, strict=True):
        rgb, mask = read_rgb(image), read_rgb(path).max(axis=2) > 127
        if rgb.shape[:2] != mask.shape:
            got = f"{mask.shape[::-1]} and {rgb.shape[1::-1]}"
            raise ConfigError(f"example mask {path!r} must have the size of {image!r}, got {got}")
        examples.append((rgb, mask))
    return examples
