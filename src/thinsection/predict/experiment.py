"""Experiment from embeddings and labels: models of folds, out-of-fold scores, one model file.

OUT/experiment.json, index.html   all figures, and a page with them; heatmaps.js beside it
    model.safetensors             ensemble of the folds, for `predict` and `heatmap`
    predictions.csv               slides and cases, predicted by folds not trained on them
    cohort.json, folds/           see `folds`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np
import psutil
import torch

from thinsection.config import as_mapping, listing_settings, nearest, replace_flat
from thinsection.errors import (
    ClusterError,
    ConfigError,
    DatasetError,
    StoreError,
    rewording,
)
from thinsection.evaluation.audit import audit
from thinsection.evaluation.covariates import check_values_of_folds
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.leaks import Contents, check_copies, read_labelled, sketches
from thinsection.evaluation.parts import FoldSettings, make_parts
from thinsection.files.atomic import read_json, write_json, write_table, write_text
from thinsection.files.tables import path_and_sheet
from thinsection.jobs.execute import execute
from thinsection.jobs.task import Report
from thinsection.predict import tested
from thinsection.predict.bags import Bags
from thinsection.predict.config import (
    FitConfig,
    FoldsConfig,
    TrainConfig,
)
from thinsection.predict.folds import (
    FoldDone,
    FoldJob,
    FoldResult,
    Study,
    TrainTask,
    bytes_at_work,
    fold_key,
    read_fold,
)
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.heads.head import head_for
from thinsection.predict.inputs import training_inputs
from thinsection.predict.locking import lock_of, shipped_score
from thinsection.predict.model_file import (
    Member,
    Model,
    ModelCard,
    content_mark,
    name_marks,
    save_model,
    versions,
)
from thinsection.predict.pages import experiment_page
from thinsection.predict.replacing import (
    check_experiment,
    heatmap_folder,
    remove_stale_heatmaps,
    stale_words,
    write_heatmap_links,
)
from thinsection.predict.review import review
from thinsection.predict.tested import Score, Tested
from thinsection.predict.training import with_recipe
from thinsection.predict.usual import Usual
from thinsection.predict.validation_review import described
from thinsection.report.index import index_address, refresh_index
from thinsection.run.progress import chosen_progress, showing
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES
from thinsection.types import (
    Document,
    counted,
    format_bytes,
    ignore_message,
    parse_bytes,
    rounded,
)

if TYPE_CHECKING:
    from thinsection.settings_types import TrainSettings

SEARCHABLE = (
    "lr",
    "weight_decay",
    "bag_size",
    "dropout",
)  # settings that can be searched
RESIDUAL_TILES = 64  # tiles per case for the variance of its tiles


class Trained(NamedTuple):
    """Trained folds, and the common temperature of their logits."""

    study: Study
    contents: Contents
    results: Sequence[FoldResult]
    temperature: float


@listing_settings(TrainConfig)
def train(
    data: str | Path,
    *,
    out: str | Path,
    config: TrainConfig | None = None,
    against: Sequence[str | Path] = (),
    overwrite: bool = False,
    on_event: Callable[[FoldDone], None] | None = None,
    on_message: Callable[[str], None] | None = None,
    **settings: Unpack[TrainSettings],
) -> Document:
    """Trains a head on stored embeddings and scores it; returns the content of experiment.json.

    Folds that are done with the same settings and labels are not trained again. A fold that was
    killed resumes from its last checkpoint and gives the same bytes.

    Args:
        data: a results folder, or features of TRIDENT, CLAM, STAMP or slide2vec.
        out: folder of the experiment; `RESULTS/experiments/NAME` appears on the results' page.
        config: all settings; `labels.labels` and `labels.target` have no default.
        settings: single settings by name, which replace those of `config`: labels="labels.csv",
            target=("grade",), head="abmil".
        against: other experiments, for comparisons on the cases of both.
        overwrite: True replaces a model of other labels or settings in `out`.
        on_event: called with each fold that is done; `thinsection.progress()` shows them. None
            shows them in a notebook, and nothing in a script.
        on_message: called with lines of text for the user.

    Memory: in each process the bags that `cross.memory` keeps, and 9 times the largest bag for the
    bags at work; `thinsection plan --command train` predicts the peak.

    A slide whose embeddings are damaged, missing or not finite is left out, and named in
    "left_out" of the result with the reason.

    Raises ThinsectionError: labels that do not match, bad settings, a lost cluster, a model of
    other labels or settings in `out`.
    """
    config = replace_flat(config or TrainConfig(), settings)
    config.check_packages()
    progress = chosen_progress(on_event)
    if progress is not None:
        on_event = progress
    on_message = on_message or ignore_message
    out = Path(out).absolute()
    folder = Path(data).absolute()
    cohort, contents, left_out = read_labelled(Path(data), config.labels)
    for slide, reason in left_out.items():
        on_message(f"{slide}: left out: {reason}")
    for line in cohort.account:
        on_message(line)
    if cohort.questions:
        raise DatasetError("; and ".join(cohort.questions))
    study, notes = plan(cohort, contents, config.cross, config.fit.seed)
    warnings = [f"warning: {warning}" for warning in study.warnings]
    audited = audit(cohort, contents, config.labels, config.cross.splits)
    for line in (*notes, *warnings, *audited.lines, *tested.forecast(study)):
        on_message(line)
    with torch.device("meta"):  # settings that do not fit are refused before training
        for head, _ in _settings(config):
            head_for(
                head,
                contents.means.shape[1],
                cohort.target,
                len(cohort.covariate_columns),
            )
    if not overwrite:
        check_experiment(out, study, as_mapping(config))
    study.save(out)
    num_settings = len([*_settings(config)])
    with showing(progress, num_settings * len(study.parts), "folds"):
        results = _train_folds(study, config, out, on_event, on_message)
    temperature = tested.ensemble_temperature(study, results)
    trained = Trained(study, contents, results, temperature)
    scored, slides = tested.tested_of(study, results, temperature)
    document = _document(config, trained, scored, notes, name=out.name)
    document["audit"] = as_mapping(audited)
    document["warnings"] = [*document["warnings"], *audited.warnings]
    others = [Path(folder) for folder in against]
    document["against"] = tested.compare_all(scored, others)
    document["experiments"] = _count_experiments(out, document["target"])
    heatmaps = heatmap_folder(folder / cohort.place.split("/")[0], out.name)
    document["left_out"] = dict(left_out)
    document["heatmaps"] = os.path.relpath(heatmaps, out)
    model = _ensemble(config, trained, scored, document["scores"], name=out.name)
    model_path = out / "model.safetensors"
    replaced_sum = file_sum(model_path) if model_path.is_file() else ""
    save_model(model_path, model)
    model_sum = file_sum(model_path)
    for drawn in sorted(folder.glob(f"*/{heatmaps.name}")):
        if not os.access(drawn, os.W_OK):
            on_message(
                f"heatmaps in {drawn} may show the earlier model; they were not removed, "
                "because the folder is not writable"
            )
            continue
        num_stale = remove_stale_heatmaps(drawn, model_sum, replaced_sum=replaced_sum)
        if num_stale:
            on_message(stale_words(drawn, num_stale))
    write_table(out / "predictions.csv", tested.lines_of(scored, slides))
    on_message(document["shipped"]["words"])
    home = index_address(out, folder)
    page = experiment_page(document, scored, folder / SLIDES, home=home)
    write_text(out / "index.html", page)
    write_heatmap_links(out, heatmaps)
    write_json(out / tested.EXPERIMENT_NAME, document)
    refresh_index(out)
    return document


def plan(
    cohort: Cohort, contents: Contents, cross: FoldsConfig, seed: int
) -> tuple[Study, list[str]]:
    """Folds whose parts share nothing, and messages for the user.

    Raises DatasetError, InvalidInputError, ConfigError: see `make_parts`,
    `check_values_of_folds` and `check_copies`.
    """
    if cross.repeats < 1:
        raise ConfigError(f"repeats must be >= 1, got {cross.repeats}")
    settings = FoldSettings(
        folds=cross.folds,
        inner=cross.inner_folds,
        seed=seed,
        unit=cross.fold_unit,
        repeats=cross.repeats,
    )
    allowed = cross.allow_leakage
    parts, lines = make_parts(cohort, settings, cross.splits, allow_leakage=allowed)
    check_values_of_folds(cohort, parts)
    copies = check_copies(cohort, parts, contents, allowed=allowed)
    study = Study(
        cohort=cohort,
        parts=parts,
        digests=contents.digests,
        warnings=(*cohort.warnings, *copies),
    )
    return study, lines


def _train_folds(
    study: Study,
    config: TrainConfig,
    out: Path,
    on_event: Callable[[FoldDone], None] | None,
    on_message: Callable[[str], None],
) -> list[FoldResult]:
    """Head of each fold for the setting with the lowest inner loss, the first of equal ones."""
    settings = list(_settings(config))
    jobs_by_fold = [
        [
            FoldJob(fold=fold, setting=i, head=head, fit=fit)
            for i, (head, fit) in enumerate(settings)
        ]
        for fold in range(len(study.parts))
    ]
    errors = list[str]()
    in_use_bytes = int(psutil.Process().memory_info().rss)
    all_jobs = [job for jobs in jobs_by_fold for job in jobs]
    floor_bytes = in_use_bytes + bytes_at_work(study.cohort.paths, all_jobs)
    if parse_bytes(config.cross.memory) < floor_bytes:
        on_message(
            f"--memory {config.cross.memory} is below what training takes without any embedding "
            f"kept in memory: the floor is {format_bytes(floor_bytes)} per worker"
        )

    def collect_errors(report: Report[FoldDone]) -> None:
        errors.extend(done.error for done in report.results if done.error)

    def note_fold(done: FoldDone) -> None:
        on_message(done.words)
        if on_event is not None:
            on_event(done)

    execute(
        [job for jobs in jobs_by_fold for job in jobs],
        TrainTask(out=out, memory=config.cross.memory, threads=config.executor.threads),
        # one task per job, since a fold may take long
        replace(config.executor, chunk_slides=config.executor.chunk_slides or 1),
        folder=out,
        on_report=collect_errors,
        on_message=on_message,
        on_event=note_fold,
    )
    if errors:
        raise ClusterError(
            f"each fold must be trained, got {errors[0]}; run the command again"
        )
    best = []
    for jobs in jobs_by_fold:
        results = [read_fold(out, job.name, fold_key(job, study)) for job in jobs]
        whole = [result for result in results if result is not None]
        if len(whole) < len(jobs):
            raise StoreError("each fold must have its file, got fewer files than folds")
        best.append(min(whole, key=lambda result: result.stop_loss))
    return best


def _settings(config: TrainConfig) -> Iterator[tuple[HeadConfig, FitConfig]]:
    """All combinations of the values that are searched."""
    values_by_name: dict[str, list[float]] = {}
    for item in config.cross.search:
        name, _, listed = item.partition("=")
        if name not in SEARCHABLE or not listed:
            raise ConfigError(
                f"search must name a setting as {SEARCHABLE[0]}=1e-4,1e-3, got {item!r}"
                f"{nearest(name, SEARCHABLE)}"
            )
        kind = int if name == "bag_size" else float
        with rewording("search must list numbers", item, ValueError, error=ConfigError):
            values_by_name[name] = [kind(text) for text in listed.split(",")]
    for values in product(*values_by_name.values()):
        chosen = dict(zip(values_by_name, values, strict=True))
        fit = replace(
            config.fit,
            lr=chosen.get("lr", config.fit.lr),
            weight_decay=chosen.get("weight_decay", config.fit.weight_decay),
            bag_size=int(chosen.get("bag_size", config.fit.bag_size)),
        )
        head = replace(config.head, dropout=chosen.get("dropout", config.head.dropout))
        yield head, with_recipe(fit, head.head)


def _document(
    config: TrainConfig,
    trained: Trained,
    scored: Tested,
    notes: Sequence[str],
    *,
    name: str,
) -> Document:
    """Content of experiment.json."""
    study = trained.study
    sampling = scored.sampling
    scores = tested.score_table(scored.scorers, sampling, seed=config.fit.seed)
    headline = scores[scored.metric]
    warnings = [*study.warnings]
    num_unlearnt = sum(not result.has_learnt for result in trained.results)
    if num_unlearnt:
        folds = counted(len(trained.results), "fold")
        warnings.append(
            f"{num_unlearnt} of {folds} did not learn after the first epoch: the validation loss "
            "only rose"
        )
    ends = None if headline["missing"] else [headline["low"], headline["high"]]
    return {
        "name": name,
        "task": study.cohort.target.kind,
        "target": ", ".join(study.cohort.target.columns),
        "positive": study.cohort.target.positive or None,
        "positive_words": study.cohort.target.positive_words,
        "order_words": study.cohort.target.order_words,
        "head": config.head.head,
        "metric": scored.metric,
        "value": headline["value"],
        "interval": ends,
        "interval_missing": headline["missing"],
        "cases": len(study.cohort.cases),
        "interval_by": f"{scored.groups.words}: {headline['method']}",
        "pooled_over": headline["pooled_over"],
        "date": datetime.now(UTC).date().isoformat(),
        "scores": scores,
        "labels": _label_scores(scored, config.fit.seed),
        "shipped": shipped_score(study, scored, seed=config.fit.seed),
        "folds": _fold_rows(trained, scored),
        "heads": [result.name for result in trained.results],
        "account": [*study.cohort.account, *notes],
        "reading": [asdict(reading) for reading in study.cohort.reading],
        "settings": as_mapping(config),
        "versions": versions(),
        "temperature": trained.temperature,
        "warnings": warnings,
        "review": review(study, trained.contents, scored, trained.results, config),
    }


def _label_scores(scored: Tested, seed: int) -> list[Document]:
    """Scores of each of several labels, over the cases that have it; [] of other targets."""
    if scored.target.kind != "multilabel":
        return []
    tables = []
    for k, name in enumerate(scored.target.names):
        label = scored.label(k)
        positive = label.truth[:, 0] == 1
        cases = np.array(label.cases)
        tables.append(
            {
                "name": name,
                "cases": len(set(cases.tolist())),
                "positive": len(set(cases[positive].tolist())),
                "independent": label.groups.words,
                "scores": tested.score_table(label.scorers, label.sampling, seed=seed),
            }
        )
    return tables


def _count_experiments(out: Path, target: str) -> int:
    """Experiments with this target in the folder, itself included: how often a score was tried."""
    counted_folders = {out}
    for path in out.parent.glob(f"*/{tested.EXPERIMENT_NAME}"):
        try:
            same = read_json(path).get("target", target) == target
        except (OSError, ValueError, AttributeError):
            same = True  # an experiment that cannot be read was one all the same
        if same:
            counted_folders.add(path.parent)
    return len(counted_folders)


def _fold_rows(trained: Trained, scored: Tested) -> list[Document]:
    """Sizes, epochs of each start, best epoch of its start, and score of each fold."""
    pairs = zip(trained.study.parts, trained.results, strict=True)
    return [
        {
            "repeat": part.repeat,
            "train": len(part.train),
            "stop": len(part.stop),
            "test": len(part.test),
            "epochs": result.epochs,
            "best_start": result.best_start,
            "best_epoch": result.best_epoch,
            "learnt": result.has_learnt,
            "score": scored.fold_score(fold),
        }
        for fold, (part, result) in enumerate(pairs)
    ]


def _score_words(score: Score, cases: int) -> str:
    """Score with its interval, or the reason why there is none."""
    if score["value"] is None:
        return "no value"
    words = rounded(score["value"], cases)
    if score["low"] is None or score["high"] is None:
        return f"{words} (no interval: {score['missing']})"
    return f"{words} [{rounded(score['low'], cases)}, {rounded(score['high'], cases)}]"


def _ensemble(
    config: TrainConfig,
    trained: Trained,
    scored: Tested,
    scores: Mapping[str, Score],
    *,
    name: str,
) -> Model:
    """Heads of all folds as one model."""
    study, contents, results, temperature = trained
    cohort = study.cohort
    files = [path for paths in cohort.paths for path in paths]
    inputs = training_inputs(files)
    usual = _usual(study, contents)
    marks_by_case = _marks_by_case(study, contents)
    heads = []
    members = []
    for part, result in zip(study.parts, results, strict=True):
        head = head_for(
            config.head, inputs.dim, cohort.target, len(cohort.covariate_columns)
        )
        head.load_state_dict(result.state)
        heads.append(head.eval())
        held_out = [mark for i in part.test for mark in marks_by_case[i]]
        members.append(
            Member(
                temperature=temperature,
                held_out=tuple(dict.fromkeys(held_out)),
                target=replace(
                    result.target,
                    positive=cohort.target.positive,
                    positive_by=cohort.target.positive_by,
                ),
            )
        )
    trained_marks = [mark for marks in marks_by_case for mark in marks]
    card = ModelCard(
        name=name,
        head=config.head,
        target=cohort.target,
        inputs=inputs,
        covariates=cohort.covariate_columns,
        members=tuple(members),
        floor=usual.floor,
        threshold=usual.threshold,
        within_floor=usual.within_floor,
        num_tiles=usual.num_tiles,
        table_sha256=file_sum(path_and_sheet(Path(config.labels.labels or ""))[0]),
        trained=tuple(dict.fromkeys(trained_marks)),
        sketches=sketches(contents.means, usual.center),
        lock=lock_of(study, results, scored, temperature),
        data={
            "account": "; ".join((*cohort.account, *study.warnings)),
            **described(cohort, contents.num_tiles.tolist()),
        },
        scores={
            metric: _score_words(score, len(cohort.cases))
            for metric, score in scores.items()
        },
        versions=versions(),
    )
    return Model(card=card, heads=tuple(heads), usual=usual)


def _usual(study: Study, contents: Contents) -> Usual:
    """Usual embeddings from the training cases: their means, and some tiles of each."""
    case_of = study.case_of_slide
    num_tiles = np.bincount(case_of, weights=contents.num_tiles)
    with Bags(study.cohort.paths) as bags:
        drawn = bags.stream(range(len(bags)), most=RESIDUAL_TILES, seed=[1])
        residuals = (bag.features - bag.features.mean(axis=0) for _, bag in drawn)
        return Usual.of(contents.case_means(case_of), residuals, num_tiles.tolist())


def _marks_by_case(study: Study, contents: Contents) -> list[list[str]]:
    """Marks of each case for the model file, from its name, its slides' names and embeddings."""
    cohort = study.cohort
    marks = [
        name_marks(case, patient, *slides)
        for case, patient, slides in zip(
            cohort.cases, cohort.patients, cohort.slides, strict=True
        )
    ]
    for case, digest in zip(study.case_of_slide, contents.digests, strict=True):
        marks[case].append(content_mark(digest))
    return marks
