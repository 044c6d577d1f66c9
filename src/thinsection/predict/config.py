"""Settings of `thinsection train`: labels, head, training, folds, executor."""

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
        5, "parts of the cases, each tested by a model that has not seen it"
    )
    inner_folds: int = option(
        5, "one of so many parts of the training cases says when to stop"
    )
    repeats: int = option(
        1, "times that folds are drawn; the score is over all of them"
    )
    fold_unit: FoldUnit = option(
        "case",
        "kept whole: case; site: no site trains and is tested; each-site: one site a fold",
    )
    allow_leakage: bool = option(
        False, "go on where training and test share patients or embeddings"
    )
    splits: Path | None = option(
        None,
        "splits of a file instead: of CLAM, Patho-Bench, nanopath, or a column split",
    )
    grid: tuple[str, ...] = option(
        (),
        "settings to try, the best inner loss of each fold counts: lr=1e-4,1e-3; repeat",
    )
    memory: str = option(
        "1GiB", "memory of a process; what embeddings fit into it are kept"
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of `thinsection train`, by section."""

    labels: LabelsConfig = section(LabelsConfig)
    head: HeadConfig = section(HeadConfig)
    fit: FitConfig = section(FitConfig)
    cross: FoldsConfig = section(FoldsConfig)
    executor: ExecutorConfig = section(ExecutorConfig)
