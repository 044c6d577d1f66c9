"""A check that finds pixels like those of example pictures: pen, the coverslip's edge."""

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from thinsection.arrays.morphology import dilated_by_square, drop_small
from thinsection.errors import ConfigError
from thinsection.files.atomic import atomic_path
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length
from thinsection.qc.checks.forest import (
    Example,
    Forest,
    advance,
    check_features,
    load_forest,
    save_forest,
    train,
)
from thinsection.types import MaskArray


class ExampleCheck(QcCheck, kind="by_example"):
    """Removes pixels like the marked ones of example pictures; no later check adds them back."""

    name: str = "pen_markings"
    # picture files at the work resolution
    example_images: tuple[str, ...] = ()
    # one mask for each picture, bright at the pixels to find
    example_masks: tuple[str, ...] = ()
    # files of the two lists that are missing: the check is left out, and its column is NA
    absent: tuple[str, ...] = ()
    # what the random forest compares: names of `pixel_features`
    features: tuple[str, ...] = ("frangi", "laplace", "rgb")
    # pixels with a higher probability are found
    threshold: float = 0.5
    # smaller groups of found pixels are dropped
    min_area: str = area("100 px")
    # edge of the square by which groups are dilated; '0 px' does not change them
    dilate: str = length("0 px")
    # seed of the training
    seed: int = 0
    # px that are drawn from each example; up to 1, as a share of its px; 0 takes all px
    samples_per_example: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_features(self.features)
        if self.samples_per_example < 0:
            raise ConfigError(
                f"{self.kind}.samples_per_example must be >= 0, got "
                f"{self.samples_per_example:g}"
            )

    def __call__(self, view: QcView) -> Outcome:
        if self.absent:
            return Outcome(scores={self.name: "NA"})
        ns = view.ns
        marked = view.probability_of(self) > self.threshold
        marked = drop_small(ns, marked, view.area_px(self.min_area))
        edge_px = round(view.length_px(self.dilate))
        if edge_px > 0:
            marked = dilated_by_square(ns, marked, edge_px)
        outcome = view.left(view.mask_use & ~marked, self.name, enforce=True)
        # its user has marked what it finds, so the guard never overrules it
        return replace(outcome, sure_area=outcome.affected_area)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.example_images, *self.example_masks)


def trained_forests(
    checks: Sequence[ExampleCheck], cache_dir: Path
) -> dict[ExampleCheck, Forest]:
    """The forests of a pipeline's checks, in its order, from the cache or newly trained.

    As in HistoQC, checks with the same seed draw from one generator, one after the other. With the
    same version of scikit-learn, their forests are those of HistoQC's `--seed`.

    The name of a file in the cache has a hash of examples, features and random numbers, so another
    seed or another mask gives another forest. Two processes that train at once write the same
    values.

    Raises:
        ConfigError: the examples cannot be read, or the numbers of pictures and masks differ.
        InvalidInputError: the examples have pixels of one class alone.
    """
    forests = {}
    generators: dict[int, np.random.RandomState] = {}
    for check in checks:
        rng = generators.setdefault(check.seed, np.random.RandomState(check.seed))
        examples = _read_examples(check)
        key = _training_key(check, examples, rng)
        path = cache_dir / "qc-models" / f"forest-{key}.npz"
        forest = load_forest(path)
        if forest is None:
            forest = train(
                examples,
                check.features,
                seed=check.seed,
                samples_per_example=check.samples_per_example,
                rng=copy.deepcopy(rng),
            )
            with atomic_path(path) as temporary:
                save_forest(temporary, forest)
        forests[check] = forest
        advance(
            rng,
            examples,
            seed=check.seed,
            samples_per_example=check.samples_per_example,
        )
    return forests


def _training_key(
    check: ExampleCheck, examples: Sequence[Example], rng: "np.random.RandomState"
) -> str:
    content = hashlib.sha256()
    for rgb, mask in examples:
        content.update(rgb.tobytes() + mask.tobytes() + repr(rgb.shape).encode())
    state = rng.get_state(legacy=False)["state"]
    content.update(state["key"].tobytes() + repr(state["pos"]).encode())
    recipe = [
        content.hexdigest(),
        check.features,
        {"seed": check.seed, "samples_per_example": check.samples_per_example},
    ]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


def _read_examples(check: ExampleCheck) -> list[Example]:
    images = check.example_images
    masks = check.example_masks
    if not images or len(images) != len(masks):
        raise ConfigError(
            f"{check.name} must have one example mask per image, "
            f"got {len(images)} images and {len(masks)} masks"
        )
    return [_read_example(image, mask) for image, mask in zip(images, masks)]


def _read_example(image_path: str, mask_path: str) -> Example:
    from thinsection.qc.checks.measures import read_rgb

    rgb = read_rgb(image_path)
    mask: MaskArray = np.asarray(read_rgb(mask_path).max(axis=2) > 127)
    if rgb.shape[:2] != mask.shape:
        raise ConfigError(
            f"example mask {mask_path!r} must have the size of {image_path!r}, "
            f"got {mask.shape[::-1]} and {rgb.shape[1::-1]}"
        )
    return rgb, mask
