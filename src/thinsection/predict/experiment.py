"""From embeddings and labels to an experiment: models of folds, honest scores, one model file.

OUT/experiment.json, index.html   what was found; its page, with heatmaps.js, see `heatmap_links`
    model.safetensors             the ensemble of the folds, for `predict` and `heatmap`
    predictions.csv               of slides and cases, by the fold that has not seen them
    cohort.json, folds/           see `folds`
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.config import as_mapping, nearest, option, section
from thinsection.errors import ClusterError, ConfigError, StoreError, require, rewording
from thinsection.evaluation.labels import Cohort, Floats, LabelsConfig, read_cohort
from thinsection.evaluation.leaks import Contents, check_copies, read_contents, sketches
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.parts import Drawing, FoldUnit, make_parts
from thinsection.files.atomic import write_json, write_table, write_text
from thinsection.jobs.contract import Report
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.predict import folds as studies
from thinsection.predict import model_file, tested
from thinsection.predict.bags import Bags
from thinsection.predict.folds import FoldDone, FoldJob, FoldResult, Study, TrainTask
from thinsection.predict.heads.config import HeadConfig, build_head
from thinsection.predict.heatmap_links import heatmap_folder, write_heatmap_links
from thinsection.predict.locking import lock_of
from thinsection.predict.review import ReviewSettings, review
from thinsection.predict.tested import Tested
from thinsection.predict.training import FitConfig, with_recipe
from thinsection.report.index import write_index
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES

GRID = ("lr", "weight_decay", "bag_size", "dropout")  # that may be tried
RESIDUAL_TILES = 64  # of each case, for the variance of its tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldsConfig:
    """How cases are split, and what is tried."""

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
    cohort, cross, seed = (
        read_cohort(Path(data), config.labels),
        config.cross,
        config.fit.seed,
    )
    for line in cohort.account:
        on_message(line)
    study, contents, notes = plan(cohort, cross, seed)
    warnings = [f"warning: {warning}" for warning in study.warnings]
    for line in (*notes, *warnings, *tested.forecast(study)):
        on_message(line)
    study.save(out)
    results = _train_all(study, config, out, on_message)
    temperature = tested.ensemble_temperature(study, results)
    told, slides = tested.tested_of(study, results, temperature)
    lock = lock_of(study, results, told, temperature)
    document = _document(config, study, told, results, out.name)
    document["temperature"] = temperature
    document["account"] += notes
    document["warnings"] = [*study.warnings]
    document["review"] = review(
        study,
        contents,
        told,
        results,
        ReviewSettings(
            head=config.head,
            fit=config.fit,
            fold_unit=cross.fold_unit,
            repeats=cross.repeats,
            splits=cross.splits,
            grid=cross.grid,
        ),
    )
    if against is not None:
        document["against"] = tested.compare(told, Path(against))
    _write_model(
        out, config, study, results, contents=contents, document=document, lock=lock
    )
    write_table(out / "predictions.csv", tested.lines_of(told, slides))
    folder = Path(data).absolute()
    heatmaps = heatmap_folder(folder / cohort.place.split("/")[0], out.name)
    document["heatmaps"] = os.path.relpath(heatmaps, out)
    page = tested.experiment_page(document, told, folder / SLIDES)
    write_text(out / "index.html", page)
    write_heatmap_links(out, heatmaps)
    write_json(out / tested.EXPERIMENT_NAME, document)
    if (out.parent.parent / "summary.csv").is_file():  # RESULTS/experiments/NAME
        write_index(out.parent.parent)
    return document


def plan(
    cohort: Cohort, cross: FoldsConfig, seed: int
) -> tuple[Study, Contents, list[str]]:
    """Folds whose parts share nothing, what the slides hold, and sentences for the person.

    Raises DatasetError, InvalidInputError, ConfigError: see `make_parts`, `read_contents` and
    `check_copies`.
    """
    if cross.repeats < 1:
        raise ConfigError(f"repeats must be >= 1, got {cross.repeats}")
    drawing = Drawing(
        folds=cross.folds,
        inner=cross.inner_folds,
        seed=seed,
        unit=cross.fold_unit,
        repeats=cross.repeats,
    )
    allowed = cross.allow_leakage
    parts, lines = make_parts(cohort, drawing, cross.splits, allow_leakage=allowed)
    contents = read_contents([path for paths in cohort.paths for path in paths])
    copies = check_copies(cohort, parts, contents, allowed=allowed)
    warnings = (*cohort.warnings, *copies)
    study = Study(
        cohort=cohort, parts=parts, digests=contents.digests, warnings=warnings
    )
    return study, contents, lines


def _train_all(
    study: Study, config: TrainConfig, out: Path, on_message: Callable[[str], None]
) -> list[FoldResult]:
    """Of each fold the head of the setting whose inner loss is lowest, the first of equals."""
    jobs, failed = list[list[FoldJob]](), list[str]()
    for fold in range(len(study.parts)):
        tries = enumerate(_tries(config))
        jobs.append(
            [FoldJob(fold=fold, setting=i, head=h, fit=f) for i, (h, f) in tries]
        )

    def take(report: Report[FoldDone]) -> None:
        failed.extend(done.error for done in report.results if done.error)

    task = TrainTask(
        out=out, memory=config.cross.memory, threads=config.executor.threads
    )
    # a fold may take long: each is a task of its own
    executor = replace(config.executor, chunk_slides=config.executor.chunk_slides or 1)
    told: dict[str, Any] = {"folder": out, "on_report": take, "on_message": on_message}
    told["on_event"] = lambda done: on_message(done.words)
    execute([job for own in jobs for job in own], task, executor, **told)
    if failed:
        raise ClusterError(
            f"each fold must be trained, got {failed[0]}; run the command again"
        )
    best = []
    for own in jobs:
        found = [
            studies.read_fold(out, job.name, studies.fold_key(job, study))
            for job in own
        ]
        whole = [result for result in found if result is not None]
        require(
            len(whole) == len(own),
            "each fold must have its file",
            "fewer",
            error=StoreError,
        )
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
        fit = with_recipe(replace(config.fit, **given), config.head.head)
        yield replace(config.head, dropout=dropout), fit


def _document(
    config: TrainConfig,
    study: Study,
    told: Tested,
    results: Sequence[FoldResult],
    name_of_experiment: str,
) -> dict[str, Any]:
    """What experiment.json holds."""
    sampling = told.sampling
    scores = tested.score_table(told.scorers, sampling, seed=config.fit.seed)
    folds = []
    for fold, (part, result) in enumerate(zip(study.parts, results, strict=True)):
        folds.append(
            {
                "repeat": part.repeat,
                "train": len(part.train),
                "stop": len(part.stop),
                "test": len(part.test),
                "epochs": len(result.losses),
                "best_epoch": result.best,
                "score": told.of_fold(fold),
            }
        )
    headline = scores[told.metric]
    ends = None if headline["missing"] else [headline["low"], headline["high"]]
    target = study.cohort.target
    return {
        "name": name_of_experiment,
        "task": target.kind,
        "target": ", ".join(target.columns),
        "head": config.head.head,
        "metric": told.metric,
        "value": headline["value"],
        "interval": ends,
        "interval_missing": headline["missing"],
        "interval_by": f"{headline['resamples']} resamples of {sampling.units} cases",
        "pooled_over": headline["pooled_over"],
        "date": datetime.now(UTC).date().isoformat(),
        "scores": scores,
        "folds": folds,
        "heads": [result.name for result in results],
        "account": list(study.cohort.account),
        "settings": as_mapping(config),
        "versions": model_file.versions(),
    }


def _score_words(score: dict[str, Any]) -> str:
    """A score with its interval, or why it has none."""
    if score["value"] is None:
        return "no value"
    words = f"{score['value']:.4f}"
    if score["missing"]:
        return f"{words} (no interval: {score['missing']})"
    return f"{words} [{score['low']:.4f}, {score['high']:.4f}]"


def _usual(means: Floats, bags: Bags) -> model_file.Usual:
    """What is usual among the training cases, of means (n, D); of tiles by a draw of each case."""
    drawn = bags.stream(list(range(len(bags))), most=RESIDUAL_TILES, seed=[1])
    residuals = (bag.features - bag.features.mean(axis=0) for _, bag in drawn)
    return model_file.Usual.of(
        means, residuals, [bags.count(i) for i in range(len(bags))]
    )


def _write_model(
    out: Path,
    config: TrainConfig,
    study: Study,
    results: Sequence[FoldResult],
    *,
    contents: Contents,
    document: dict[str, Any],
    lock: model_file.Lock,
) -> None:
    """The heads of all folds as one file."""
    cohort = study.cohort
    files = cohort.paths
    inputs = model_file.training_inputs([path for paths in files for path in paths])
    counts = [len(slides) for slides in cohort.slides]
    case_of = np.repeat(np.arange(len(counts)), counts)
    with Bags(files) as bags:
        usual = _usual(contents.case_means(case_of), bags)
    marks = _marks_by_case(cohort, contents, case_of)
    heads, members = [], []
    for part, result in zip(study.parts, results, strict=True):
        head = build_head(config.head, inputs.dim, len(cohort.target.names))
        head.load_state_dict(result.state)
        heads.append(head.eval())
        held_out = dict.fromkeys(mark for i in part.test for mark in marks[i])
        members.append(
            model_file.Member(
                temperature=document["temperature"],
                held_out=tuple(held_out),
                target=result.target,
            )
        )
    card = model_file.ModelCard(
        name=out.name,
        head=config.head,
        target=cohort.target,
        inputs=inputs,
        members=tuple(members),
        floor=usual.floor,
        threshold=usual.threshold,
        within_floor=usual.within_floor,
        num_tiles=usual.num_tiles,
        table_sha256=file_sum(Path(config.labels.labels or "")),
        trained=tuple(dict.fromkeys(mark for own in marks for mark in own)),
        sketches=sketches(contents.means, usual.center),
        lock=lock,
        data={"account": "; ".join((*cohort.account, *study.warnings))},
        scores={
            name: _score_words(score) for name, score in document["scores"].items()
        },
        versions=model_file.versions(),
    )
    model = model_file.Model(card=card, heads=tuple(heads), usual=usual)
    model_file.save_model(out / "model.safetensors", model)


def _marks_by_case(
    cohort: Cohort, contents: Contents, case_of: IndexArray
) -> list[list[str]]:
    """Marks of each case in the model file: of its name, its slides' names and embeddings."""
    marks = [
        model_file.name_marks(case, patient, *slides)
        for case, patient, slides in zip(
            cohort.cases, cohort.patients, cohort.slides, strict=True
        )
    ]
    for case, digest in zip(case_of.tolist(), contents.digests, strict=True):
        marks[case].append(model_file.content_mark(digest))
    return marks
