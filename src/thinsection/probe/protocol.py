"""Protocols: named, frozen sets of all settings that decide a score; each result file records its.

Two scores can be compared if their result files record the same protocol. A probe that a protocol
does not define is refused.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from thinsection.config import from_mapping, nearest, read_toml
from thinsection.errors import ConfigError

SettingsT = TypeVar("SettingsT")
Metric = Literal["macro_f1", "balanced_accuracy"]
Similarity = Literal["cosine", "l2"]
# geometry by which a segmentation is enlarged; see `segment.probe.upsampled`
Geometry = Literal["compatible", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSettings:
    """One linear layer on raw float32 embeddings, AdamW at a constant learning rate."""

    # learning rates that are tried; head i is seeded with seed + i
    lrs: tuple[float, ...] = (1e-3, 1e-4, 1e-5)
    weight_decay: float = 1e-4  # decoupled weight decay of AdamW
    # passes over the training set; None if `max_steps` sets the length of training
    epochs: int | None = None
    max_steps: int | None = None  # optimiser steps; None if `epochs` sets the length
    batch_size: int = 64  # rows per step; the last partial batch is used
    # scored after each epoch; the result is the best score over learning rates and epochs
    metric: Metric = "macro_f1"
    last_epoch: bool = False  # True takes the score after the last epoch instead
    # training ends after this share of its epochs, rounded up, without a better score; None: never
    patience: float | None = None

    def patience_epochs(self, epochs: float) -> float:
        """Epochs without a better score after which training ends, of so many in all."""
        return math.inf if self.patience is None else math.ceil(self.patience * epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnSettings:
    """Cosine neighbours, unweighted vote, ties to the lowest label, best k (ties: smallest)."""

    ks: tuple[int, ...] = (1, 3, 5, 10, 20, 30, 40, 50)
    metric: Metric = "macro_f1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FewshotSettings:
    """SimpleShot: `support_sets` draws of `shots` per class without replacement."""

    shots: int = 16
    support_sets: int
    metric: Metric = "macro_f1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticSettings:
    """Logistic regression on slide (case) vectors; the best C on the mean AUROC over folds."""

    cs: tuple[float, ...]
    max_iter: int = 5000
    # True fits in float64, as Patho-Bench does (scikit-learn converts its torch tensors so);
    # nanopath fits in float32, in which rounding may stop lbfgs earlier
    double: bool = False
    # tasks that are solved by liblinear (by the dual if rows < D); the others are solved by lbfgs
    liblinear_tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalSettings:
    """Cox regression on slide (case) vectors; folds are stratified by event if none are given."""

    # ridge with Breslow ties, or the elastic net
    model: Literal["cox", "coxnet"] = "cox"
    alphas: tuple[float, ...]  # penalties that are tried
    # True first projects onto the span of the training cases; the model is equal up to rounding
    rotate: bool = False
    l1_ratio: float | None = None  # for the elastic net only
    z_scores: bool = (
        True  # True fits z-scores, with mean and variance of the training fold
    )
    max_iter: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustnessSettings:
    """PathoROB's robustness index: k other-slide neighbours, SO / (SO + OS)."""

    # published values of k
    k_by_subset: tuple[tuple[str, int], ...] = (
        ("camelyon", 11),
        ("tcga", 61),
        ("tcga_2x2", 61),
        ("tolkach_esca", 46),
    )
    paired_subsets: tuple[str, ...] = ("tcga", "tcga_2x2")  # scored by `subset`
    default_k: int = 11  # k for other data sets
    max_k: int = 600  # largest k that is tried, if k is chosen; below: for some subsets
    max_k_by_subset: tuple[tuple[str, int], ...] = (
        ("tcga", 1200),
        ("tcga_2x2", 1200),
        ("tolkach_esca", 1000),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionSettings:
    """Regression of HEST: z-scores, principal components, ridge.

    The ridge penalty is alpha = 100 / (components x targets).
    """

    components: int = 256
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSettings:
    """Nearest training rows; the score is mean average precision at the largest k."""

    ks: tuple[int, ...] = (1, 3, 5, 10)
    similarity: Similarity = "cosine"  # as in THUNDER; Patho-Bench uses l2


@dataclass(frozen=True, slots=True, kw_only=True)
class PathorobSettings:
    """Settings of the clustering score and of APD."""

    max_clusters: int = 30  # numbers of clusters from 2 to this are tried
    trials: int = 50  # k-means seeds per combination of classes and centres
    iterations: int = 20  # draws of slides for APD


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSettings:
    """Segmentation of nanopath: MaskTransformer head on frozen tokens, soft dice, Jaccard index."""

    image_px: int = 256  # edge of the image and of the label that is scored
    crop_px: int = 224  # edge of the centre crop that the encoder sees
    # width, blocks, heads and MLP width of the head's transformer
    width: int = 768
    blocks: int = 2
    heads: int = 8
    mlp: int = 3072
    lr: float = 1e-3  # learning rate of Adam
    weight_decay: float = 1e-4  # L2 term of Adam, not decoupled
    # passes over the training images; the weights with the lowest validation loss are restored
    epochs: int = 30
    batch_size: int = 64  # images per step; the last partial batch is used
    dice_smooth: float = 1.0  # added to intersection and union
    folds: int = 3  # number of folds, if the dataset has no split
    # weight of an image with foreground: this times the fraction of background-only images, at
    # least 1
    background_weight: float = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A named, frozen set of settings; a probe that is None is not defined by the suite."""

    name: str  # value of `--protocol`
    source: str  # the suite whose published scores it is comparable with
    seed: int  # base seed of every draw
    folds: int  # number of folds, if the data have none
    # True evaluates on the folds of the dataset files; False takes only the training rows of the
    # first of these folds, and draws `folds` stratified folds from them
    file_folds: bool = True
    linear: LinearSettings | None = None
    knn: KnnSettings | None = None
    fewshot: FewshotSettings | None = None
    logistic: LogisticSettings | None = None
    survival: SurvivalSettings | None = None
    robustness: RobustnessSettings | None = None
    segment: SegmentSettings | None = None
    # each of these probes belongs to one suite, so its settings are the same in every protocol
    regression: RegressionSettings = RegressionSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    pathorob: PathorobSettings = PathorobSettings()
    # number of inner folds of the training rows on which settings are chosen; 0 takes the setting
    # with the best score on the test rows
    inner_folds: int = 0
    repeats: int = 1  # number of seeds, if there are inner folds
    # number of permutations of the training labels, and of draws for each number of shots
    null_draws: int = 3
    shots: tuple[int, ...] = (1, 4, 16, 64, 256)  # rows per class in the learning curve
    notes: tuple[str, ...] = ()

    def require(self, probe: str, kind: type[SettingsT]) -> SettingsT:
        """The settings of a probe. Raises ConfigError: this protocol defines no such probe."""
        settings = getattr(self, probe)
        if not isinstance(settings, kind):
            others = [
                repr(p.name)
                for p in PROTOCOLS.values()
                if getattr(p, probe) is not None
            ]
            found = f"{self.name!r}; use {' or '.join(others)}"
            raise ConfigError(f"protocol must define the {probe} probe, got {found}")
        return settings


_TABLES = read_toml(Path(__file__).with_name("protocols.toml"))
PROTOCOLS = {
    name: from_mapping(Protocol, {"name": name, **t}) for name, t in _TABLES.items()
}
HONEST, NANOPATH, EVA, PATHOBENCH = PROTOCOLS.values()


def get_protocol(name: str, *, seed: int | None = None) -> Protocol:
    """The protocol with this name; `seed` replaces its base seed.

    Raises ConfigError: there is no protocol with this name.
    """
    if name not in PROTOCOLS:
        raise ConfigError(
            f"protocol must be a known name, got {name!r}{nearest(name, PROTOCOLS)}"
        )
    protocol = PROTOCOLS[name]
    return protocol if seed is None else replace(protocol, seed=seed)
