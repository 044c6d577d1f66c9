"""Settings of `thinsection train`: labels, head, training, folds, executor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import Settings, option, section
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.parts import FoldUnit
from thinsection.extras import Need
from thinsection.jobs.executor import ExecutorConfig
from thinsection.predict.heads.config import HeadConfig

# memory beside the cached bags, in multiples of the largest bag, of its drawn tiles or of a block:
# 2 for those that are being read, 7 for the activations of one in a head with 512 channels
BAGS_AT_WORK = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Settings for the training of a head."""

    epochs: int = option(
        0,
        "Largest number of passes over the training cases; 0 means 100.",
        daily=True,
    )
    patience: int = option(
        0,
        "Epochs without a lower validation loss after which training stops; 0 means the"
        " default of the head.",
    )
    lr: float = option(
        0.0,
        "Learning rate of AdamW; 0 means 5e-4, for dsmil 1e-3.",
        daily=True,
    )
    weight_decay: float = option(1e-3, "Weight decay of AdamW.")
    bag_size: int = option(
        2048, "Tiles that are sampled from a case in each epoch; 0 means all."
    )
    starts: int = option(
        0,
        "How often training may start again from other initial weights, if the "
        "validation loss is not clearly below that of a constant prediction; the first "
        "start counts. 0 means the default of the head.",
    )
    batch_cases: int = option(
        0,
        "Cases per training step; 0 means 16 for survival, which compares cases, and 1 "
        "for other tasks.",
    )
    class_weights: bool = option(
        False,
        "Give rare classes more weight. Predicted probabilities are then those of a cohort "
        "in which all classes are equally frequent.",
    )
    seed: int = option(0, "Seed of folds, sampling, weights and dropout.", daily=True)
    device: str = option(
        "auto", "Device for training: auto, cpu, cuda or cuda:1.", daily=True
    )
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto",
        "Floating-point type during training. auto uses bf16 on CUDA and fp32 "
        "elsewhere.",
    )
    checkpoint_s: float = option(
        20.0, "Seconds between checkpoints, which are written at the end of an epoch."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldsConfig:
    """Settings of the folds, and of the search over settings."""

    folds: int = option(
        5,
        "Number of cross-validation folds. Each fold tests cases that its model was not "
        "trained on.",
        daily=True,
    )
    inner_folds: int = option(
        5,
        "The training cases are divided into this many parts. One of them is the "
        "validation set, which decides when training stops.",
    )
    repeats: int = option(
        1,
        "How often the cases are divided into folds, each time with another seed. Each "
        "score is computed once, over the test predictions of all repeats.",
        daily=True,
    )
    fold_unit: FoldUnit = option(
        "patient",
        "Cases that stay together in one fold: those of a patient, or of a site. "
        "each-site: each fold tests one site (leave one site out).",
        daily=True,
    )
    allow_leakage: bool = option(
        False,
        "Continue even if training and test sets share patients or embeddings. A shared "
        "case stays an error.",
    )
    splits: Path | None = option(
        None,
        "File with the splits, in place of random folds: of CLAM, Patho-Bench or "
        "nanopath, or a table with the column split.",
    )
    search: tuple[str, ...] = option(
        (),
        "Values of a setting to try, such as lr=1e-4,1e-3. Each fold uses the value with "
        "the lowest validation loss; repeat the option for several settings.",
        daily=True,
    )
    memory: str = option(
        "1GiB",
        "Memory for stored embeddings in each worker process. Embeddings that fit into it "
        "are read only once.",
    )


@dataclass(frozen=True, kw_only=True)
class LabelsRunConfig:
    """All settings of `thinsection labels`."""

    columns: LabelsConfig = section(LabelsConfig)


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainConfig(Settings):
    """All settings of `thinsection train`, by section."""

    labels: LabelsConfig = section(LabelsConfig)
    head: HeadConfig = section(HeadConfig, "Model")
    fit: FitConfig = section(FitConfig, "Training")
    cross: FoldsConfig = section(FoldsConfig, "Cross-validation")
    executor: ExecutorConfig = section(ExecutorConfig, "Workers and clusters")

    def needs(self) -> Iterator[Need]:
        """Packages of the sections, and of the page."""
        yield from super().needs()
        yield "the page of scores", ("matplotlib",)
