"""Protocols: everything that decides a score, frozen, named, and written into each result file.

Two scores can be compared when their result files carry the same protocol. Asking for a probe that
a suite does not define is an error, never a guess.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from thinsection.config import from_mapping, nearest, read_toml
from thinsection.errors import ConfigError

SettingsT = TypeVar("SettingsT")
Metric = Literal["macro_f1", "balanced_accuracy"]
Similarity = Literal["cosine", "l2"]
# of a segmentation: see `segment.probe.upsampled`
Geometry = Literal["compatible", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSettings:
    """One linear layer on raw float32 embeddings, AdamW at a constant learning rate."""

    lrs: tuple[float, ...] = (1e-3, 1e-4, 1e-5)  # tried; head i is seeded with seed + i
    weight_decay: float = 1e-4  # AdamW's, decoupled
    # passes over the training set; None where `max_steps` decides
    epochs: int | None = None
    max_steps: int | None = None  # optimiser steps; None where `epochs` decides
    batch_size: int = 64  # rows a step; the last partial batch is kept
    # after each epoch; the best over learning rate x epoch counts
    metric: Metric = "macro_f1"
    last_epoch: bool = False  # the last epoch counts instead


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
    # fit in float64, as Patho-Bench does: scikit-learn converts its torch tensors so;
    # nanopath fits NumPy's float32, where lbfgs may stop earlier for rounding
    double: bool = False
    # solved so, by the dual where rows < D; others by lbfgs
    liblinear_tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalSettings:
    """Cox regression on slide (case) vectors; without given folds they are stratified by event."""

    # ridge with Breslow ties, or the elastic net
    model: Literal["cox", "coxnet"] = "cox"
    alphas: tuple[float, ...]  # penalties that are tried
    # onto the training cases' span first: the same model but for rounding
    rotate: bool = False
    l1_ratio: float | None = None  # elastic net only
    z_scores: bool = True  # of the training fold, before the fit
    max_iter: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustnessSettings:
    """PathoROB's robustness index: k other-slide neighbours, SO / (SO + OS)."""

    # published
    k_by_subset: tuple[tuple[str, int], ...] = (
        ("camelyon", 11),
        ("tcga", 61),
        ("tcga_2x2", 61),
        ("tolkach_esca", 46),
    )
    paired_subsets: tuple[str, ...] = ("tcga", "tcga_2x2")  # scored by `subset`
    default_k: int = 11  # of a set that is none of these
    max_k: int = 600  # where k is chosen, as the next
    max_k_by_subset: tuple[tuple[str, int], ...] = (
        ("tcga", 1200),
        ("tcga_2x2", 1200),
        ("tolkach_esca", 1000),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionSettings:
    """HEST's: z-scores, principal components, ridge at alpha 100 / (components x targets)."""

    components: int = 256
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSettings:
    """Nearest training rows; the score is mean average precision at the largest k."""

    ks: tuple[int, ...] = (1, 3, 5, 10)
    similarity: Similarity = "cosine"  # THUNDER's; Patho-Bench configures l2


@dataclass(frozen=True, slots=True, kw_only=True)
class PathorobSettings:
    """Settings of the clustering score and of APD."""

    max_clusters: int = 30  # 2 up to this are tried
    trials: int = 50  # k-means seeds a combination of classes and centres
    iterations: int = 20  # draws of slides for APD


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSettings:
    """MaskTransformer head on frozen dense tokens, soft dice, per-image Jaccard: nanopath's."""

    image_px: int = 256  # edge of the image and of the label that is scored
    crop_px: int = 224  # edge of the centre crop that the encoder sees
    width: int = 768  # of the head's transformer, as the next three
    blocks: int = 2
    heads: int = 8
    mlp: int = 3072
    lr: float = 1e-3  # Adam's
    weight_decay: float = 1e-4  # Adam's L2 term, not decoupled
    # passes over the training images; the best validation loss is restored
    epochs: int = 30
    batch_size: int = 64  # images a step; the last partial batch is kept
    dice_smooth: float = 1.0  # added to intersection and union
    folds: int = 3  # where the dataset brings no split
    # an image with more than background weighs this times the fraction of background-only images,
    # at least 1
    background_weight: float = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A named, frozen set of settings; a probe that is None is not defined by the suite."""

    name: str  # what `--protocol` takes
    source: str  # whose numbers it makes comparable
    seed: int  # base seed of every draw
    folds: int  # where the data bring none
    # True evaluates on the folds that the dataset files give; False takes only the training rows of
    # the first and makes `folds` stratified ones of them
    file_folds: bool = True
    linear: LinearSettings | None = None
    knn: KnnSettings | None = None
    fewshot: FewshotSettings | None = None
    logistic: LogisticSettings | None = None
    survival: SurvivalSettings | None = None
    robustness: RobustnessSettings | None = None
    segment: SegmentSettings | None = None
    # of one suite each, and so the same under every name
    regression: RegressionSettings = RegressionSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    pathorob: PathorobSettings = PathorobSettings()
    # folds of the training rows on which settings are chosen; 0: the best on the scored rows counts
    inner_folds: int = 0
    repeats: int = 1  # seeds, with inner folds
    # permutations of the training labels, and draws of each number of shots
    null_draws: int = 3
    shots: tuple[int, ...] = (1, 4, 16, 64, 256)  # rows a class of the learning curve
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
    """The protocol of that name, with another base seed where one is given.

    Raises ConfigError: no such protocol.
    """
    if name not in PROTOCOLS:
        raise ConfigError(
            f"protocol must be a known name, got {name!r}{nearest(name, PROTOCOLS)}"
        )
    protocol = PROTOCOLS[name]
    return protocol if seed is None else replace(protocol, seed=seed)
