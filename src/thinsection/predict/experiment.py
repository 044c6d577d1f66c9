"""From embeddings and labels to an experiment: models of folds, honest scores, one model file.

OUT/experiment.json, index.html   what was found; its page
    model.safetensors             the ensemble of the folds, for `predict` and `heatmap`
    predictions.csv               of slides and cases, by the fold that has not seen them
    cohort.json, folds/           see `folds`
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.config import as_mapping, nearest, option, section
from thinsection.errors import ClusterError, ConfigError, StoreError, require, rewording
from thinsection.files.atomic import write_json, write_table, write_text
from thinsection.jobs.contract import Report
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.predict.bags import Bags
from thinsection.predict.folds import (
    FoldDone,
    FoldJob,
    FoldResult,
    Study,
    TrainTask,
    fold_key,
    read_fold,
)
from thinsection.predict.heads.config import HeadConfig, build_head
from thinsection.predict.inputs import training_inputs
from thinsection.predict.labels import LabelsConfig, read_cohort
from thinsection.predict.model_file import (
    Member,
    Model,
    ModelCard,
    Usual,
    case_mark,
    save_model,
    versions,
)
from thinsection.predict.page import experiment_page
from thinsection.predict.splits import make_parts
from thinsection.predict.tested import EXPERIMENT_NAME, Tested, compare, lines_of, tested_of
from thinsection.predict.training import FitConfig
from thinsection.probe import paired
from thinsection.report.index import write_index
from thinsection.store.identity import file_sum

MODEL_NAME, PREDICTIONS_NAME = "model.safetensors", "predictions.csv"
GRID = ("lr", "weight_decay", "bag_size", "dropout")  # that may be tried
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldsConfig:
    """How cases are split, and what is tried."""

    folds: int = option(5, "parts of the cases, each tested by a model that has not seen it")
    inner_folds: int = option(5, "one of so many parts of the training cases says when to stop")
    splits: Path | None = option(
        None, "splits of a file instead: of CLAM, Patho-Bench, nanopath, or a column split"
    )
    grid: tuple[str, ...] = option(
        (), "settings to try, the best inner loss of each fold counts: lr=1e-4,1e-3; repeat"
    )
    memory: str = option("1GiB", "memory of a process; what embeddings fit into it are kept")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of `thinsection train`, by section."""

    labels: LabelsConfig = section(LabelsConfig)
    head: HeadConfig = section(HeadConfig)
    fit: FitConfig = section(FitConfig)
    cross: FoldsConfig = section(FoldsConfig)
    executor: ExecutorConfig = section(ExecutorConfig)


def train(
    data: str | Path,
    *,
    out: str | Path,
    config: TrainConfig | None = None,
    against: str | Path | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Trains a head on stored embeddings and says how good it is; what experiment.json holds.

    Folds that are done with the same settings and labels are not trained again; one that was killed
    goes on from its last checkpoint, to the same bytes.

    Args:
        data: a results folder, or features of TRIDENT, CLAM, STAMP or slide2vec.
        out: folder of the experiment; `RESULTS/experiments/NAME` appears on the results' page.
        config: all settings; `labels.labels` and `labels.target` have no default.
        against: another experiment, to be compared with on the cases of both.
        on_message: lines for the person who waits.

    Memory: `cross.memory` in each process.

    Raises:
        ThinsectionError: labels that do not fit, bad settings, a damaged file, a lost cluster.
    """
    config, out = config or TrainConfig(), Path(out).absolute()
    cohort = read_cohort(Path(data), config.labels)
    for line in cohort.account:
        on_message(line)
    cross, seed = config.cross, config.fit.seed
    drawn = {"folds": cross.folds, "inner": cross.inner_folds, "seed": seed}
    study = Study(cohort=cohort, parts=make_parts(cohort, cross.splits, **drawn))
    study.save(out)
    results = _train_all(study, config, out, on_message)
    tested, slides = tested_of(study, results)
    document = _document(config, study, tested, results, out.name)
    if against is not None:
        document["against"] = compare(tested, Path(against))
    _write_model(out, config, study, results, document["scores"])
    write_table(out / PREDICTIONS_NAME, lines_of(tested, slides))
    grid = Path(data).absolute() / cohort.place.split("/")[0]
    write_text(out / "index.html", experiment_page(document, tested, grid, out))
    write_json(out / EXPERIMENT_NAME, document)
    if (out.parent.parent / "summary.csv").is_file():  # RESULTS/experiments/NAME
        write_index(out.parent.parent)
    return document


def _train_all(
    study: Study, config: TrainConfig, out: Path, on_message: Callable[[str], None]
) -> list[FoldResult]:
    """Of each fold the head of the setting whose inner loss is lowest, the first of equals."""
    tries = list(_tries(config))
    jobs = [
        FoldJob(fold=fold, setting=i, head=head, fit=fit)
        for fold in range(len(study.parts))
        for i, (head, fit) in enumerate(tries)
    ]
    failed: list[str] = []

    def take(report: Report[FoldDone]) -> None:
        failed.extend(done.error for done in report.results if done.error)

    task = TrainTask(out=out, memory=config.cross.memory, threads=config.executor.threads)
    # a fold may take long: each is a task of its own
    executor = replace(config.executor, chunk_slides=config.executor.chunk_slides or 1)
    told = {"on_event": lambda done: on_message(done.words), "on_message": on_message}
    execute(jobs, task, executor, folder=out, on_report=take, **told)
    if failed:
        raise ClusterError(f"each fold must be trained, got {failed[0]}; run the command again")
    found = [read_fold(out, job.name, fold_key(job, study)) for job in jobs]
    whole = [result for result in found if result is not None]
    require(len(whole) == len(jobs), "each fold must have its file", "fewer", error=StoreError)
    parts = [whole[at : at + len(tries)] for at in range(0, len(whole), len(tries))]
    return [min(of_fold, key=lambda result: result.stop_loss) for of_fold in parts]


def _tries(config: TrainConfig) -> Iterator[tuple[HeadConfig, FitConfig]]:
    """Every combination of the grid."""
    names, values = [], []
    for item in config.cross.grid:
        name, _, listed = item.partition("=")
        rule = f"grid must name a setting as {GRID[0]}=1e-4,1e-3, got {item!r}"
        if name not in GRID or not listed:
            raise ConfigError(f"{rule}{nearest(name, GRID)}")
        kind = int if name == "bag_size" else float
        with rewording("grid must list numbers", item, ValueError, error=ConfigError):
            values.append([kind(text) for text in listed.split(",")])
        names.append(name)
    for chosen in product(*values):
        given: dict[str, Any] = dict(zip(names, chosen, strict=True))
        dropout = given.pop("dropout", config.head.dropout)
        yield replace(config.head, dropout=dropout), replace(config.fit, **given)


def _document(
    config: TrainConfig, study: Study, tested: Tested, results: Sequence[FoldResult], name: str
) -> dict[str, Any]:
    """What experiment.json holds."""
    scorers, seed = tested.scorers(), config.fit.seed
    rows, cases = list(scorers.values()), tested.cases
    drawn = paired.resample(rows, len(cases), groups=cases, seed=seed)
    ends = np.nanpercentile(drawn.values, (2.5, 97.5), axis=0).T.tolist()
    scores = {
        metric: {"value": float(value), "low": low, "high": high}
        for metric, value, (low, high) in zip(scorers, drawn.observed, ends, strict=True)
    }
    folds = [
        {
            "train": len(part.train),
            "stop": len(part.stop),
            "test": len(part.test),
            "epochs": len(result.losses),
            "best_epoch": result.best,
            "temperature": result.temperature,
            "score": tested.of_fold(fold),
        }
        for fold, (part, result) in enumerate(zip(study.parts, results, strict=True))
    ]
    headline, target = scores[tested.metric], study.cohort.target
    return {
        "name": name,
        "task": target.kind,
        "target": ", ".join(target.columns),
        "head": config.head.head,
        "metric": tested.metric,
        "value": headline["value"],
        "interval": [headline["low"], headline["high"]],
        "interval_by": f"{drawn.groups} cases",
        "date": datetime.now(UTC).date().isoformat(),
        "scores": scores,
        "folds": folds,
        "heads": [result.name for result in results],
        "account": list(study.cohort.account),
        "settings": as_mapping(config),
        "versions": versions(),
    }


def _write_model(
    out: Path, config: TrainConfig, study: Study, results: Sequence[FoldResult], scores: Any
) -> None:
    """The heads of all folds as one file."""
    cohort, heads = study.cohort, []
    files = [[Path(path) for path in paths] for paths in cohort.files]
    inputs = training_inputs([path for paths in files for path in paths])
    seen = {i for part in study.parts for i in part.test}
    with Bags(files) as bags:  # cases that no fold tests: by a draw of their tiles
        others = bags.stream([i for i in range(len(bags)) if i not in seen], most=2048, seed=[0])
        means = [bag.features.mean(axis=0) for _, bag in others]
    usual = Usual.of(np.concatenate([*(r.means for r in results), *(m[None] for m in means)]))
    members = []
    for part, result in zip(study.parts, results, strict=True):
        head = build_head(config.head.head, inputs.dim, len(cohort.target.names), config.head)
        head.load_state_dict(result.state)
        heads.append(head.eval())
        names = [name for i in part.test for name in (cohort.cases[i], *cohort.slides[i])]
        held_out = tuple(map(case_mark, dict.fromkeys(names)))
        members.append(Member(temperature=result.temperature, held_out=held_out))
    card = ModelCard(
        name=out.name,
        head=config.head,
        target=cohort.target,
        inputs=inputs,
        members=tuple(members),
        floor=usual.floor,
        threshold=usual.threshold,
        table_sha256=file_sum(Path(config.labels.labels or "")),
        data={"account": "; ".join(cohort.account)},
        scores={k: "{value:.4f} [{low:.4f}, {high:.4f}]".format(**s) for k, s in scores.items()},
        versions=versions(),
    )
    save_model(out / MODEL_NAME, Model(card=card, heads=tuple(heads), usual=usual))
