"""Facts for reviewers beside the scores: cases, methods, sites, subgroups, chance.

They are plain values, stored in experiment.json under `review` and shown on the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thinsection.config import read_toml
from thinsection.errors import InvalidInputError
from thinsection.evaluation import intervals
from thinsection.evaluation.comparison import (
    MIN_OF_SITE,
    SITE_COMPONENTS,
    SITE_FOLDS,
    Permuted,
    permuted_labels,
    site_probe,
)
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.leaks import Contents
from thinsection.evaluation.rows import METRIC_WORDS, strict
from thinsection.evaluation.table_one import table_one
from thinsection.predict.config import FoldsConfig, TrainConfig
from thinsection.predict.folds import FoldResult, Study
from thinsection.predict.tested import Tested, score_table
from thinsection.types import Document, Floats

# metrics that compare cases of the same fold, and so can compare those of the same site
WITHIN = ("auroc", "c_index", "pearson", "spearman")
OPEN = "to be filled by the authors"
TOPICS = Path(__file__).with_name("tripod.toml")


def review(
    study: Study,
    contents: Contents,
    tested: Tested,
    results: Sequence[FoldResult],
    config: TrainConfig,
) -> Document:
    """Table 1, methods, repeats, sites, subgroups, permuted labels and the checklist."""
    seed = config.fit.seed
    means = contents.case_means(study.case_of_slide)
    methods = _methods(study, tested, results, config)
    subgroups = subgroup_tables(study.cohort, tested, seed=seed)
    columns = [table["column"] for table in subgroups]
    answers = _checklist_answers(study, tested, config, dict(methods), columns)
    document = {
        "table_one": asdict(table_one(study.cohort, contents.num_tiles.tolist())),
        "methods": methods,
        "repeats": _repeat_rows(study, tested),
        "subgroups": subgroups,
        "permuted": _permuted_labels(study, means, seed),
        "sites": _sites(study, means, seed) | _within_sites(study, tested, seed),
        "checklist": [item._asdict() for item in checklist(answers)],
    }
    plain: Document = strict(document)
    return plain


def subgroup_tables(cohort: Cohort, tested: Tested, *, seed: int) -> list[Document]:
    """Scores by site if sites are known, and by each subgroup column."""
    labels_by_column = dict(zip(cohort.subgroup_columns, cohort.subgroups, strict=True))
    if cohort.sites:
        labels_by_column = {"site": cohort.sites} | labels_by_column
    tables = []
    for column, labels in labels_by_column.items():
        label_by_case = dict(zip(cohort.cases, labels, strict=True))
        rows = subgroup_rows(tested, label_by_case, seed=seed)
        words = METRIC_WORDS.get(tested.metric, tested.metric)
        tables.append({"column": column, "metric": words, "rows": rows})
    return tables


def subgroup_rows(
    tested: Tested, label_by_case: dict[str, str], *, seed: int
) -> list[Document]:
    """Score and interval for the cases of each subgroup, or the reason why there is none."""
    labels = np.array([label_by_case[case] for case in tested.cases])
    rows = []
    for label in np.unique(labels):
        part = tested.take(np.flatnonzero(labels == label))
        row: Document = {
            "subgroup": str(label),
            "cases": len(set(part.cases)),
            "patients": part.groups.total,
            "positive": part.num_positive,
            "value": None,
            "low": None,
            "high": None,
            "method": "",
            "missing": intervals.why_missing(part.sampling),
        }
        rows.append(row)
        if row["missing"]:
            continue
        try:
            scorers = {tested.metric: part.scorers[tested.metric]}
        except InvalidInputError as error:  # there is no comparable pair
            row["missing"] = str(error)
            continue
        score = score_table(scorers, part.sampling, seed=seed)[tested.metric]
        row["missing"] = score["missing"]
        if not score["missing"]:
            row |= {name: score[name] for name in ("value", "low", "high", "method")}
    return rows


def _repeat_rows(study: Study, tested: Tested) -> list[dict[str, float]]:
    """Score of each repetition of the folds; empty if folds are drawn once."""
    repeat_of_fold = np.array([part.repeat for part in study.parts])
    repeats = np.unique(repeat_of_fold)
    if len(repeats) < 2:
        return []
    rows = []
    for repeat in repeats.tolist():
        part = tested.take(np.flatnonzero(repeat_of_fold[tested.fold] == repeat))
        rows.append(
            {"repeat": repeat + 1, "cases": len(part.cases), "value": part.score()}
        )
    return rows


def _permuted_labels(study: Study, means: Floats, seed: int) -> Document:
    """Scores of a linear head on mean embeddings (n, D), with true and with permuted labels."""
    cohort = study.cohort
    if not (cohort.target.exclusive or cohort.target.kind == "regression"):
        return {"missing": f"not computed for {cohort.target.kind} targets"}
    folds = [
        (np.array((*part.train, *part.stop)), np.array(part.test))
        for part in study.parts
    ]
    permuted = permuted_labels(
        means,
        cohort.array[:, 0],
        len(cohort.target.names) if cohort.target.exclusive else 0,
        folds,
        cohort.groups.codes,
        seed=seed,
    )
    if permuted is None:
        return {"missing": "no fold has cases of two classes to be ranked"}
    return {"missing": "", **_with_metric_words(permuted)}


def _sites(study: Study, means: Floats, seed: int) -> Document:
    """Result of predicting the site from mean embeddings (n, D), or the reason for no result."""
    cohort = study.cohort
    if not cohort.sites:
        missing = "nobody knows the sites; name their column with --site COLUMN"
        return {"missing": missing}
    probe = site_probe(means, cohort.sites, cohort.groups, seed=seed)
    if probe is None:
        return {"missing": f"fewer than two sites have {MIN_OF_SITE} cases"}
    bounds = probe.interval
    return {
        "missing": "",
        "sites": probe.sites,
        "cases": probe.cases,
        "left_out": probe.left_out,
        "chance": 1 / probe.sites,
        "low": None if bounds.missing else bounds.low,
        "high": None if bounds.missing else bounds.high,
        "permuted": _with_metric_words(probe.permuted),
        "how": (
            f"multinomial logistic regression on {SITE_COMPONENTS} principal components of "
            f"mean embeddings, {SITE_FOLDS} folds of patients"
        ),
    }


def _within_sites(study: Study, tested: Tested, seed: int) -> Document:
    """Score over pairs of the same site and fold, beside which a site alone is worth nothing."""
    cohort = study.cohort
    if not cohort.sites or tested.metric not in WITHIN:
        return {}
    site_by_case = dict(zip(cohort.cases, cohort.sites, strict=True))
    sites = np.unique(
        [site_by_case[case] for case in tested.cases], return_inverse=True
    )
    both = np.stack([tested.fold, sites[1]])
    cells = np.unique(both, axis=1, return_inverse=True)[1].reshape(-1)
    try:
        scorer = replace(tested, fold=cells).scorers[tested.metric]
    except InvalidInputError as error:  # there is no comparable pair
        return {"within": None, "within_missing": str(error)}
    table = score_table({tested.metric: scorer}, tested.sampling, seed=seed)
    score = table[tested.metric]
    return {
        "within": score["value"],
        "within_low": score["low"],
        "within_high": score["high"],
        "within_missing": score["missing"],
    }


def _with_metric_words(permuted: Permuted) -> Document:
    words = METRIC_WORDS.get(permuted.metric, permuted.metric)
    return asdict(permuted) | {"metric": words}


def _methods(
    study: Study,
    tested: Tested,
    results: Sequence[FoldResult],
    config: TrainConfig,
) -> list[tuple[str, str]]:
    """Methods: pairs of a heading and a sentence."""
    searched = ", ".join(config.cross.search) or "one setting, nothing was compared"
    epochs = ", ".join(result.best_words for result in results)
    has_temperature = study.cohort.target.kind not in ("cox", "regression")
    temperature = " and temperature" if has_temperature else ""
    inner = [len(part.stop) for part in study.parts]
    least = f"{min(inner)} to {max(inner)}" if min(inner) < max(inner) else min(inner)
    return [
        ("folds", _fold_words(study, config.cross)),
        (
            "seed",
            f"{config.fit.seed}, for folds, order of cases, tiles and weights",
        ),
        (
            "confidence intervals",
            f"95 %, from the variance between {tested.groups.words}; the method of each is "
            "beside it",
        ),
        (
            "chosen on the validation set",
            f"epoch of each fold ({epochs}), settings ({searched}){temperature}, on "
            f"{least} validation cases per fold; never on test cases",
        ),
    ]


def _fold_words(study: Study, cross: FoldsConfig) -> str:
    if cross.splits is not None:
        return f"{len(study.parts)} folds as in {cross.splits.name}"
    unit = {
        "patient": "stratified, patients kept whole",
        "site": "stratified, sites kept whole: no site is in both training and test set",
        "each-site": "each site is predicted by a model of the other sites",
    }[cross.fold_unit]
    times = f", drawn {cross.repeats} times" if cross.repeats > 1 else ""
    count = len(study.parts) // cross.repeats
    return f"{count} folds, {unit}{times}"


def _checklist_answers(
    study: Study,
    tested: Tested,
    config: TrainConfig,
    methods: dict[str, str],
    subgroup_columns: Sequence[str],
) -> dict[str, str]:
    """Answers to the items of TRIPOD+AI that the software can give."""
    cohort = study.cohort
    target = ", ".join(cohort.target.columns)
    shown = ", ".join(METRIC_WORDS.get(name, name) for name in tested.scorers)
    counts = f"{tested.groups.of_cases(len(cohort.cases))}, {sum(map(len, cohort.slides))} slides"
    if tested.num_positive is not None:
        events = cohort.target.time_words
        noun = "with the event" if events else cohort.target.positive_name
        counts += f", {tested.num_positive} {noun}"
    weighted = (
        "rare classes have larger weights in the loss"
        if config.fit.class_weights
        else "classes have equal weights in the loss"
    )
    predicted = {"cox": "predicted risks", "regression": "predicted values"}.get(
        cohort.target.kind, "predicted probabilities"
    )
    return shared_answers(cohort, cohort.account) | {
        "4": "development with internal validation by cross-validation",
        "9b": f"embeddings of whole-slide images in {cohort.place}; encoder and tiles are in "
        "the model card",
        "10": f"{counts}; justification: to be filled by the authors",
        "12a": methods["folds"],
        "12c": (
            f"head {config.head.head}; {methods['chosen on the validation set']}; all settings "
            "are on this page"
        ),
        "12e": f"{shown}; confidence intervals {methods['confidence intervals']}",
        "12f": "none",
        "12g": f"mean of the {predicted} of the folds' models (model.safetensors)",
        "13": weighted if cohort.target.exclusive else "",
        "16": "not applicable: no other cohort was evaluated",
        "18f": "versions of the software are in experiment.json; code of the study: to be filled "
        "by the authors",
        "20a": f"{counts}; see Table 1 and the list above it",
        "20b": "Table 1; characteristics of participants: to be filled by the authors",
        "20c": "not applicable: no other cohort was evaluated",
        "24": "not applicable: the model was not updated",
        "21": f"{target}: {counts} in cross-validation, see Folds",
        "22": "model.safetensors contains all weights and settings",
        "23a": "Scores"
        + (f"; by {', '.join(subgroup_columns)}" if subgroup_columns else ""),
        "12d": "scores by site and a probe of the site" if cohort.sites else "",
    }


def shared_answers(cohort: Cohort, account: Sequence[str]) -> dict[str, str]:
    """Answers to the items of TRIPOD+AI that experiments and validations give alike."""
    sites = f"{len(set(cohort.sites))} sites" if cohort.sites else ""
    return {
        "6a": sites and f"{sites}; setting and location: {OPEN}",
        "7": "; ".join(account),
        "11": f"{cohort.unlabelled} rows without a label and {cohort.without_embeddings} without "
        "embeddings are not used; nothing is imputed",
        "15": f"{cohort.target.kind_words}: {', '.join(cohort.target.names)}",
        "23b": "Scores by site" if cohort.sites else "",
    }


class Item(NamedTuple):
    """Item of the checklist."""

    number: str
    topic: str
    answer: str


def checklist(answers: Mapping[str, str]) -> list[Item]:
    """All items; items without an answer are left to the authors."""
    topics = read_toml(TOPICS)
    unknown = answers.keys() - topics.keys()
    if unknown:
        raise KeyError(f"items must be of TRIPOD+AI, got {sorted(unknown)}")
    return [
        Item(number, topic, answers.get(number) or OPEN)
        for number, topic in topics.items()
    ]
