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

from thinsection.config import as_mapping, nearest, option, section
from thinsection.errors import ClusterError, ConfigError, StoreError, require, rewording
from thinsection.files.atomic import write_json, write_table, write_text
from thinsection.jobs.contract import Report
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.predict import folds as studies
from thinsection.predict import model_file, tested
from thinsection.predict.bags import Bags
from thinsection.predict.folds import FoldDone, FoldJob, FoldResult, Study, TrainTask
from thinsection.predict.heads.config import HeadConfig, build_head
from thinsection.predict.labels import LabelsConfig, read_cohort
from thinsection.predict.tested import Tested
from thinsection.predict.training import FitConfig
from thinsection.probe import intervals
from thinsection.report.index import write_index
from thinsection.store.identity import file_sum, fingerprint

GRID = ("lr", "weight_decay", "bag_size", "dropout")  # that may be tried


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

    Raises ThinsectionError: labels that do not fit, bad settings, a damaged file, a lost cluster.
    """
    config, out = config or TrainConfig(), Path(out).absolute()
    cohort, cross, seed = read_cohort(Path(data), config.labels), config.cross, config.fit.seed
    for line in cohort.account:
        on_message(line)
    drawn = {"folds": cross.folds, "inner": cross.inner_folds, "seed": seed}
    sums = tuple(fingerprint(path) for paths in cohort.paths for path in paths)
    parts = studies.make_parts(cohort, cross.splits, **drawn)
    study = Study(cohort=cohort, parts=parts, sums=sums)
    study.save(out)
    results = _train_all(study, config, out, on_message)
    told, slides = tested.tested_of(study, results)
    document = _document(config, study, told, results, out.name)
    if against is not None:
        document["against"] = tested.compare(told, Path(against))
    _write_model(out, config, study, results, document["scores"])
    write_table(out / "predictions.csv", tested.lines_of(told, slides))
    grid = Path(data).absolute() / cohort.place.split("/")[0]
    write_text(out / "index.html", tested.experiment_page(document, told, grid, out))
    write_json(out / tested.EXPERIMENT_NAME, document)
    if (out.parent.parent / "summary.csv").is_file():  # RESULTS/experiments/NAME
        write_index(out.parent.parent)
    return document


def _train_all(
    study: Study, config: TrainConfig, out: Path, on_message: Callable[[str], None]
) -> list[FoldResult]:
    """Of each fold the head of the setting whose inner loss is lowest, the first of equals."""
    jobs, failed = list[list[FoldJob]](), list[str]()
    for fold in range(len(study.parts)):
        tries = enumerate(_tries(config))
        jobs.append([FoldJob(fold=fold, setting=i, head=h, fit=f) for i, (h, f) in tries])

    def take(report: Report[FoldDone]) -> None:
        failed.extend(done.error for done in report.results if done.error)

    task = TrainTask(out=out, memory=config.cross.memory, threads=config.executor.threads)
    # a fold may take long: each is a task of its own
    executor = replace(config.executor, chunk_slides=config.executor.chunk_slides or 1)
    told: dict[str, Any] = {"folder": out, "on_report": take, "on_message": on_message}
    told["on_event"] = lambda done: on_message(done.words)
    execute([job for own in jobs for job in own], task, executor, **told)
    if failed:
        raise ClusterError(f"each fold must be trained, got {failed[0]}; run the command again")
    best = []
    for own in jobs:
        found = [studies.read_fold(out, job.name, studies.fold_key(job, study)) for job in own]
        whole = [result for result in found if result is not None]
        require(len(whole) == len(own), "each fold must have its file", "fewer", error=StoreError)
        best.append(min(whole, key=lambda result: result.stop_loss))
    return best


def _tries(config: TrainConfig) -> Iterator[tuple[HeadConfig, FitConfig]]:
    """Every combination of the grid."""
    grid: dict[str, list[Any]] = {}
    for item in config.cross.grid:
        name, _, listed = item.partition("=")
        rule = f"grid must name a setting as {GRID[0]}=1e-4,1e-3, got {item!r}"
        if name not in GRID or not listed:
            raise ConfigError(f"{rule}{nearest(name, GRID)}")
        kind = int if name == "bag_size" else float
        with rewording("grid must list numbers", item, ValueError, error=ConfigError):
            grid[name] = [kind(text) for text in listed.split(",")]
    for chosen in product(*grid.values()):
        given = dict(zip(grid, chosen, strict=True))
        dropout = given.pop("dropout", config.head.dropout)
        yield replace(config.head, dropout=dropout), replace(config.fit, **given)


def _document(
    config: TrainConfig, study: Study, told: Tested, results: Sequence[FoldResult], name: str
) -> dict[str, Any]:
    """What experiment.json holds."""
    scorers, cases, target = told.scorers(), told.cases, study.cohort.target
    rows, seed = list(scorers.values()), config.fit.seed
    drawn = intervals.resample(rows, len(cases), groups=cases, seed=seed)
    ends = np.nanpercentile(drawn.values, (2.5, 97.5), axis=0).T.tolist()
    found = zip(scorers, drawn.observed, ends, strict=True)
    scores = {n: {"value": float(v), "low": low, "high": high} for n, v, (low, high) in found}
    folds = []
    for fold, (part, result) in enumerate(zip(study.parts, results, strict=True)):
        sizes = {side: len(rows) for side, rows in as_mapping(part).items()}
        epochs = {"epochs": len(result.losses), "best_epoch": result.best}
        said = {"temperature": result.temperature, "score": told.of_fold(fold)}
        folds.append(sizes | epochs | said)
    headline = scores[told.metric]
    return {
        **{"name": name, "task": target.kind, "target": ", ".join(target.columns)},
        **{"head": config.head.head, "metric": told.metric, "value": headline["value"]},
        **{"interval": [headline["low"], headline["high"]], "interval_by": f"{drawn.groups} cases"},
        **{"date": datetime.now(UTC).date().isoformat(), "scores": scores, "folds": folds},
        **{"heads": [result.name for result in results], "account": list(study.cohort.account)},
        **{"settings": as_mapping(config), "versions": model_file.versions()},
    }


def _write_model(
    out: Path, config: TrainConfig, study: Study, results: Sequence[FoldResult], scores: Any
) -> None:
    """The heads of all folds as one file."""
    cohort, files, heads, members = study.cohort, study.cohort.paths, [], []
    inputs = model_file.training_inputs([path for paths in files for path in paths])
    seen = {i for part in study.parts for i in part.test}
    with Bags(files) as bags:  # cases that no fold tests: by a draw of their tiles
        others = bags.stream([i for i in range(len(bags)) if i not in seen], most=2048, seed=[0])
        means = [bag.features.mean(axis=0, keepdims=True) for _, bag in others]
    usual = model_file.Usual.of(np.concatenate([*(r.means for r in results), *means]))
    for part, result in zip(study.parts, results, strict=True):
        head = build_head(config.head, inputs.dim, len(cohort.target.names))
        head.load_state_dict(result.state)
        heads.append(head.eval())
        names = dict.fromkeys(n for i in part.test for n in (cohort.cases[i], *cohort.slides[i]))
        held_out = tuple(map(model_file.case_mark, names))
        members.append(model_file.Member(temperature=result.temperature, held_out=held_out))
    told: dict[str, Any] = {"name": out.name, "head": config.head, "target": cohort.target}
    told |= {"inputs": inputs, "members": tuple(members), "versions": model_file.versions()}
    told |= {"floor": usual.floor, "threshold": usual.threshold}
    words = "{value:.4f} [{low:.4f}, {high:.4f}]"
    told["scores"] = {name: words.format(**score) for name, score in scores.items()}
    table, data = Path(config.labels.labels or ""), {"account": "; ".join(cohort.account)}
    card = model_file.ModelCard(**told, data=data, table_sha256=file_sum(table))
    model = model_file.Model(card=card, heads=tuple(heads), usual=usual)
    model_file.save_model(out / "model.safetensors", model)
