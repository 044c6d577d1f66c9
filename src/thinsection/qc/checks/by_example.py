"""A check that finds pixels like those of example pictures: pen, the coverslip's edge."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from thinsection.arrays.morphology import dilated_by_square, drop_small, keep_elongated
from thinsection.errors import ConfigError
from thinsection.files.atomic import atomic_path
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length
from thinsection.qc.checks.pixel_model import (
    NETWORK,
    NUM_EPOCHS,
    POSITIVE_SHARE,
    Example,
    PixelModel,
    check_features,
    load_model,
    save_model,
    train,
)

BUILT_IN = ("coverslip", "pen")  # made by tests/support/pixel_examples.py
_OWN = "own"
_MODELS = Path(__file__).parent / "models"
_DEFAULT_FEATURES = ("rgb", "smooth", "laplace", "texture")


class ExampleCheck(QcCheck, kind="by_example"):
    """Removes pixels like the marked ones of example pictures; no later check adds them back."""

    name: str = "pen_markings"
    # 'pen' or 'coverslip', which the package trained on generated examples; or 'own', which is
    # trained on the user's examples
    model: str = "pen"
    # picture files at the work resolution, for model 'own'
    example_images: tuple[str, ...] = ()
    # one mask for each picture, bright at the pixels to find
    example_masks: tuple[str, ...] = ()
    # names of `pixel_features`, for model 'own'
    features: tuple[str, ...] = ()
    # pixels with a higher probability are found
    threshold: float = 0.5
    # smaller groups of found pixels are dropped
    min_area: str = area("100 px")
    # groups whose squared length over area is less are dropped; 0 keeps all
    min_elongation: float = 0.0
    # edge of the square by which groups are dilated; '0 px' does not change them
    dilate: str = length("0 px")
    # seed for training model 'own'
    seed: int = 0
    # number of px that are drawn from the examples to train model 'own'
    num_samples: int = 120_000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_features(self.features)

    def __call__(self, view: QcView) -> Outcome:
        ns = view.ns
        least_px = view.area_px(self.min_area)
        marked = view.probability_of(self) > self.threshold
        marked = drop_small(ns, marked, least_px)
        if self.min_elongation > 0:
            marked = keep_elongated(ns, marked, self.min_elongation, least_px)
        edge_px = round(view.length_px(self.dilate))
        if edge_px > 0:
            marked = dilated_by_square(ns, marked, edge_px)
        outcome = view.left(view.mask_use & ~marked, self.name, enforce=True)
        # its user has marked what it finds, so the guard never overrules it
        return replace(outcome, sure_area=outcome.affected_area)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.example_images, *self.example_masks)


def trained_model(check: ExampleCheck, cache_dir: Path) -> PixelModel:
    """The model of a check: one of the package's, or model 'own' from the cache or newly trained.

    The name of the file in the cache has a hash of examples, features and training settings, so
    another seed or another mask gives another model. Two processes that train at once write the
    same bytes.

    Raises:
        ConfigError: there is no such model, the features are not those of the model, or the
            numbers of pictures and masks differ.
    """
    if check.model != _OWN:
        return _built_in_model(check)
    examples = _own_examples(check)
    features = check.features or _DEFAULT_FEATURES
    key = _training_key(check, examples, features)
    path = cache_dir / "qc-models" / f"own-{key}.npz"
    model = load_model(path)
    if model is None:
        model = train(
            examples, features, seed=check.seed, num_samples=check.num_samples
        )
        with atomic_path(path) as temporary:
            save_model(temporary, model)
    return model


def _training_key(
    check: ExampleCheck, examples: list[Example], features: tuple[str, ...]
) -> str:
    content = hashlib.sha256()
    for rgb, mask in examples:
        content.update(rgb.tobytes() + mask.tobytes() + repr(rgb.shape).encode())
    recipe = [
        content.hexdigest(),
        features,
        {"seed": check.seed, "num_samples": check.num_samples},
        NETWORK,
        NUM_EPOCHS,
        POSITIVE_SHARE,
    ]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


def _built_in_model(check: ExampleCheck) -> PixelModel:
    model = None
    if check.model in BUILT_IN:
        model = load_model(_MODELS / f"{check.model}.npz")
    if model is None:
        raise ConfigError(
            f"model must be one of {', '.join((*BUILT_IN, _OWN))}, "
            f"got {check.model!r} in {check.name!r}"
        )
    if check.features not in ((), model.features):
        raise ConfigError(
            f"{check.name}.features must be those of the model {check.model!r} "
            f"({', '.join(model.features)}), got {', '.join(check.features)}; omit them, or "
            "train model 'own'"
        )
    return model


def _own_examples(check: ExampleCheck) -> list[Example]:
    from thinsection.qc.checks.measures import read_rgb

    images = check.example_images
    masks = check.example_masks
    if not images or len(images) != len(masks):
        raise ConfigError(
            f"{check.name} must have one example mask per image, "
            f"got {len(images)} images and {len(masks)} masks"
        )
    examples = []
    for image_path, mask_path in zip(images, masks):
        rgb = read_rgb(image_path)
        mask = read_rgb(mask_path).max(axis=2) > 127
        if rgb.shape[:2] != mask.shape:
            raise ConfigError(
                f"example mask {mask_path!r} must have the size of {image_path!r}, "
                f"got {mask.shape[::-1]} and {rgb.shape[1::-1]}"
            )
        examples.append((rgb, mask))
    return examples
