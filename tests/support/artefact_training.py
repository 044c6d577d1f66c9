"""Trains the net behind folds, ink, bubbles and dirt: `python -m tests.support.artefact_training`.

On slides of generator A (docs/validation/qc.md says which seeds), and on the real slides of
THINSECTION_TEST_SLIDES with the same artefacts drawn onto them, at 8 µm/px. Then raise `_VERSION`
in qc/pipeline. Some 12 minutes of one core.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage
from tests.support.artefact_slide import ArtefactSlide
from tests.support.tuning_slide import tuning_slide

from thinsection.arrays import get_namespace
from thinsection.qc.checks import artefact_maps
from thinsection.qc.checks.artefact_features import Features
from thinsection.qc.checks.artefact_maps import CLASSES
from thinsection.qc.checks.pixel_model import PixelModel, save_model
from thinsection.slide import open_slide
from thinsection.types import MaskArray, RgbArray

SIZE, MPP, WORK_MPP = (1200, 900), 4.0, 8.0  # drawn at 4 µm/px, looked at at 8
COARSE_SIZE = (
    600,
    450,
)  # of those that are drawn at 8 µm/px: more of them in the same time
SEEDS, COARSE_SEEDS, REAL_SEEDS = range(180), range(1000, 1360), range(5000, 5030)
REAL = ("CMU-1-Small-Region.svs", "tcga-cr-7395-01a-01-ts1.svs")
REAL_FACTOR = 8  # both have about 0.5 µm/px
SAMPLES = {  # px of a class that are drawn from a slide; ink: 600 of each colour
    **{"glass": 400, "tissue": 1700, "fold": 1500, "bubble": 500},
    **{"coverslip": 300, "dust": 150, "edge": 150},
}
HIDDEN, NUM_EPOCHS, BATCH = (64, 32), 4, 400
SLIDE_WIDE, JITTER = (
    (9, 13, 14, 16, 34),
    0.25,
)  # columns, and noise as a share of their spread
_RIM_PX = 5  # of a bubble's rim, at 8 µm/px

Labels = npt.NDArray[np.int8]


def main() -> None:
    """Writes the model into the package."""
    rng = np.random.default_rng(0)
    parts = [drawn(slide, rng) for slide in slides()]
    x, y = (np.concatenate(side) for side in zip(*parts, strict=True))
    model = fitted(jittered(x), y)
    save_model(Path(artefact_maps.__file__).parent / "models" / "artefacts.npz", model)


def slides() -> Iterator[ArtefactSlide]:
    """Generated slides, then the real ones with artefacts."""
    for seed in SEEDS:
        yield tuning_slide(seed, size=SIZE, mpp=MPP)
    for seed in COARSE_SEEDS:
        yield tuning_slide(seed, size=COARSE_SIZE, mpp=WORK_MPP)
    folder = Path(os.environ["THINSECTION_TEST_SLIDES"])
    bases = []
    for name in REAL:
        with open_slide(folder / name) as slide:
            px = slide.read_region((0, 0), 0, slide.size)
        bases.append(np.asarray(Image.fromarray(px).reduce(REAL_FACTOR)))
    for seed in REAL_SEEDS:
        yield tuning_slide(seed, size=SIZE, mpp=MPP, base=bases[seed % len(bases)])


def drawn(
    slide: ArtefactSlide, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], Labels]:
    """Features (N, planes) and classes (N,) of px of a slide, so many of each class."""
    factor = round(WORK_MPP / slide.mpp)
    classes = labels(
        {name: reduced(mask, factor) for name, mask in slide.masks.items()}
    )
    rgb = np.asarray(Image.fromarray(slide.rgb).reduce(factor))
    planes = density_features(rgb)
    x, y = [], []
    for number, name in enumerate(CLASSES):
        where = np.flatnonzero(classes == number)
        chosen = rng.choice(
            where, min(len(where), SAMPLES.get(name, 600)), replace=False
        )
        x.append(np.stack([plane.reshape(-1)[chosen] for plane in planes], axis=1))
        y.append(np.full(len(chosen), number, np.int8))
    return np.concatenate(x), np.concatenate(y)


def density_features(rgb: RgbArray) -> list[npt.NDArray[np.float32]]:
    """The small net's planes (H, W) of an image at WORK_MPP, which is also their px."""
    ns = get_namespace("cpu")
    features = Features(ns, rgb, WORK_MPP)
    return list(features.planes(slice(0, len(rgb))))


def labels(masks: Mapping[str, MaskArray]) -> Labels:
    """The class of each px, -1 beside a bubble's rim; what is drawn later hides what was there."""
    classes = masks["tissue"].astype(np.int8)
    none = np.zeros_like(masks["tissue"])
    for name in ("fold", "bubble", "coverslip", *CLASSES[7:], "dust", "edge"):
        where = masks.get(name, none)
        if name == "bubble":
            rim = where & ~ndimage.binary_erosion(
                where, iterations=_RIM_PX, border_value=1
            )
            classes[ndimage.binary_dilation(rim, iterations=2) & ~rim] = -1
            where = rim
        classes[where] = CLASSES.index(name)
    return classes


def reduced(mask: MaskArray, factor: int) -> MaskArray:
    return np.asarray(Image.fromarray(mask.astype(np.uint8) * 255).reduce(factor)) > 127


def jittered(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The features, with noise on those by which the net could tell one slide from another."""
    noisy, rng = x.copy(), np.random.default_rng(1)
    for column in SLIDE_WIDE:
        spread = JITTER * x[:, column].std()
        noisy[:, column] += rng.normal(0, spread, len(x)).astype(np.float32)
    return noisy


def fitted(x: npt.NDArray[np.float32], y: Labels) -> PixelModel:
    """The net, its standardisation folded into the first layer."""
    from sklearn.neural_network import MLPClassifier

    shift, scale = x.mean(axis=0), x.std(axis=0) + 1e-6
    z = ((x - shift) / scale).astype(np.float32)
    network = MLPClassifier(HIDDEN, batch_size=BATCH, alpha=1e-3, random_state=0)
    for _ in range(NUM_EPOCHS):
        network.partial_fit(z, y, classes=np.arange(len(CLASSES)))
    (w1, w2, w3), (b1, b2, b3) = network.coefs_, network.intercepts_
    w1 = w1 / scale[:, None]
    weights = (w1, b1 - shift @ w1, w2, b2, w3, b3)
    return PixelModel(
        features=("artefacts",), weights=tuple(v.astype(np.float32) for v in weights)
    )


if __name__ == "__main__":
    main()
