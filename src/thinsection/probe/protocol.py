"""Protocols: everything that decides a score, frozen, named, and written into each result file.

Two scores can be compared when their result files carry the same protocol. A probe that a suite
does not define is None there: asking for it is an error, never a guess.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from thinsection.config import as_mapping, nearest
from thinsection.errors import ConfigError

Metric = Literal["macro_f1", "balanced_accuracy"]
Geometry = Literal["compatible", "correct"]  # of a segmentation: see `segment.train.upsampled`


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSettings:
    """One linear layer on raw float32 embeddings, AdamW at a constant learning rate.

    Attributes:
        lrs: learning rates that are tried; the head of index i is seeded with seed + i.
        weight_decay: AdamW's decoupled weight decay.
        epochs: passes over the training set; None where `max_steps` decides.
        max_steps: optimiser steps; None where `epochs` decides.
        batch_size: rows a step; the last partial batch is kept.
        metric: validation metric after each epoch; the best over learning rate x epoch counts.
    """

    lrs: tuple[float, ...]
    weight_decay: float
    epochs: int | None
    max_steps: int | None
    batch_size: int
    metric: Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnSettings:
    """Cosine neighbours, unweighted vote, ties to the lowest label, best k (ties: smallest)."""

    ks: tuple[int, ...]
    metric: Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class FewshotSettings:
    """SimpleShot: `support_sets` draws of `shots` per class without replacement."""

    shots: int
    support_sets: int
    metric: Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticSettings:
    """Logistic regression on slide (case) vectors; the best C on the mean AUROC over folds."""

    cs: tuple[float, ...]
    max_iter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbmilSettings:
    """Gated attention over a bag of tile embeddings (Ilse et al. 2018), trained with AdamW.

    Attributes:
        hidden: width of the projection and of the attention.
        bag_size: tiles drawn per slide and step; all tiles where a slide has fewer.
        epochs: passes over the slides; the last epoch counts, nothing is selected.
        lr, weight_decay: AdamW's.
    """

    hidden: int
    bag_size: int
    epochs: int
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalSettings:
    """Cox regression on slide (case) vectors that are z-scored on the training fold.

    Attributes:
        model: 'cox' (ridge, Breslow ties) or 'coxnet' (elastic net).
        alpha: ridge penalty, or the elastic net's.
        l1_ratio: elastic net only.
    """

    model: Literal["cox", "coxnet"]
    alpha: float
    l1_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustnessSettings:
    """PathoROB's robustness index: k other-slide neighbours, SO / (SO + OS).

    Attributes:
        k_by_subset: the published k of each subset, as (name, k).
        default_k: k of a set that is none of these.
    """

    k_by_subset: tuple[tuple[str, int], ...]
    default_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSettings:
    """MaskTransformer head on frozen dense tokens, soft dice, per-image Jaccard.

    Attributes:
        image_px: edge of the image and of the label that is scored.
        crop_px: edge of the centre crop that the encoder sees.
        width, blocks, heads, mlp: of the head's transformer.
        lr, weight_decay: Adam's (weight decay is its L2 term, not decoupled).
        epochs: passes over the training images; the best validation loss is restored.
        batch_size: images a step; the last partial batch is kept.
        dice_smooth: added to intersection and union.
        folds: where the dataset brings no split.
        background_weight: an image with more than background weighs this times the fraction of
            background-only images, at least 1.
    """

    image_px: int
    crop_px: int
    width: int
    blocks: int
    heads: int
    mlp: int
    lr: float
    weight_decay: float
    epochs: int
    batch_size: int
    dice_smooth: float
    folds: int
    background_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A named, frozen set of settings.

    Attributes:
        name: what `--protocol` takes.
        source: whose numbers it makes comparable.
        seed: base seed of every draw.
        folds: number of folds where the data bring none.
        file_folds: True evaluates on the folds that the dataset files give; False takes only the
            training rows of the first and makes `folds` stratified ones of them.
    """

    name: str
    source: str
    seed: int
    folds: int
    file_folds: bool
    linear: LinearSettings | None = None
    knn: KnnSettings | None = None
    fewshot: FewshotSettings | None = None
    logistic: LogisticSettings | None = None
    abmil: AbmilSettings | None = None
    survival: SurvivalSettings | None = None
    robustness: RobustnessSettings | None = None
    segment: SegmentSettings | None = None
    notes: tuple[str, ...] = ()

    def require(self, probe: str) -> Any:
        """The settings of a probe.

        Raises:
            ConfigError: this protocol defines no such probe.
        """
        settings = getattr(self, probe)
        if settings is None:
            others = [p.name for p in PROTOCOLS.values() if getattr(p, probe) is not None]
            raise ConfigError(
                f"protocol must define the {probe} probe, got {self.name!r}; "
                f"use {' or '.join(map(repr, others))}"
            )
        return settings

    def as_mapping(self) -> dict[str, Any]:
        """Plain nested values, for a result file."""
        return as_mapping(self)


NANOPATH_SEGMENT = SegmentSettings(
    image_px=256,
    crop_px=224,
    width=768,
    blocks=2,
    heads=8,
    mlp=3072,
    lr=1e-3,
    weight_decay=1e-4,
    epochs=30,
    batch_size=64,
    dice_smooth=1.0,
    folds=3,
    background_weight=16.0,
)

NANOPATH = Protocol(
    name="nanopath",
    source="MedARC-AI/nanopath, probe.py of June 2026",
    seed=1337,
    folds=3,
    file_folds=False,
    linear=LinearSettings(
        lrs=(1e-3, 1e-4, 1e-5),
        weight_decay=1e-4,
        epochs=200,
        max_steps=None,
        batch_size=64,
        metric="macro_f1",
    ),
    knn=KnnSettings(ks=(1, 3, 5, 10, 20, 30, 40, 50), metric="macro_f1"),
    fewshot=FewshotSettings(shots=16, support_sets=1000, metric="macro_f1"),
    logistic=LogisticSettings(cs=(0.001, 0.01, 0.1, 0.5, 1.0, 10.0, 100.0), max_iter=5000),
    abmil=AbmilSettings(hidden=128, bag_size=2048, epochs=20, lr=3e-4, weight_decay=1e-5),
    survival=SurvivalSettings(model="cox", alpha=2.0),
    robustness=RobustnessSettings(
        k_by_subset=(("camelyon", 11), ("tolkach_esca", 46)), default_k=11
    ),
    segment=NANOPATH_SEGMENT,
    notes=("abmil is this package's own setting: the suite defines none",),
)

EVA = Protocol(
    name="eva",
    source="kaiko-ai/eva, offline classification",
    seed=42,
    folds=3,
    file_folds=True,
    linear=LinearSettings(
        lrs=(3e-4,),
        weight_decay=1e-2,
        epochs=None,
        max_steps=12_500,
        batch_size=256,
        metric="balanced_accuracy",
    ),
    abmil=AbmilSettings(hidden=128, bag_size=2048, epochs=20, lr=1e-3, weight_decay=1e-2),
    notes=(
        "eva stops early by patience; here every step runs and the best epoch counts",
        "abmil: width 128 as in eva; epochs, bag size and learning rate are this package's own",
    ),
)

PATHOBENCH = Protocol(
    name="pathobench",
    source="mahmoodlab/Patho-Bench",
    seed=1,
    folds=5,
    file_folds=True,
    logistic=LogisticSettings(cs=(0.5,), max_iter=10_000),
    abmil=AbmilSettings(hidden=512, bag_size=2048, epochs=20, lr=3e-4, weight_decay=1e-5),
    survival=SurvivalSettings(model="coxnet", alpha=0.07, l1_ratio=0.5),
    notes=(
        "logistic C 0.5, Coxnet and 2048-tile bags are the suite's; "
        "the Coxnet penalty and the rest of abmil are this package's own",
    ),
)

PROTOCOLS = {p.name: p for p in (NANOPATH, EVA, PATHOBENCH)}


def get_protocol(name: str, *, seed: int | None = None) -> Protocol:
    """The protocol of that name, with another base seed where one is given.

    Raises:
        ConfigError: no such protocol.
    """
    if name not in PROTOCOLS:
        hint = nearest(name, PROTOCOLS)
        raise ConfigError(f"protocol must be a known name, got {name!r}{hint}")
    protocol = PROTOCOLS[name]
    return protocol if seed is None else dataclasses.replace(protocol, seed=seed)
