"""Settings of `thinsection train`: labels, head, training, folds, executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinsection.config import option, section
from thinsection.evaluation.labels import LabelsConfig
from thinsection.evaluation.parts import FoldUnit
from thinsection.jobs.executor import ExecutorConfig
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.training import FitConfig


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
        "How often the folds are drawn, each time with another seed. A score counts the "
        "test predictions of all repeats.",
        daily=True,
    )
    fold_unit: FoldUnit = option(
        "case",
        "Group that is never divided between training and test. case: all slides and "
        "cases of a patient; site: all cases of a site; each-site: the same, and each fold tests "
        "one site.",
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
    grid: tuple[str, ...] = option(
        (),
        "Search over a setting: the values to try, such as lr=1e-4,1e-3. Each fold uses "
        "the value with the lowest validation loss; repeat the option for several "
        "settings.",
        daily=True,
    )
    memory: str = option(
        "1GiB",
        "Memory of each worker process. Embeddings that fit into it are read only once.",
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of `thinsection train`, by section."""

    labels: LabelsConfig = section(LabelsConfig)
    head: HeadConfig = section(HeadConfig, "Model")
    fit: FitConfig = section(FitConfig, "Training")
    cross: FoldsConfig = section(FoldsConfig, "Cross-validation")
    executor: ExecutorConfig = section(ExecutorConfig, "Workers and clusters")
