"""What a reviewer asks for, beside the scores: who, how, by which site and subgroup, and chance.

Plain values that stand in experiment.json under `review` and on the page.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation import intervals, metrics
from thinsection.evaluation.leaks import Contents
from thinsection.evaluation.parts import FoldUnit
from thinsection.evaluation.permuted import (
    MIN_OF_SITE,
    SITE_COMPONENTS,
    SITE_FOLDS,
    permuted_labels,
    site_probe,
)
from thinsection.evaluation.table_one import table_one
from thinsection.predict.folds import FoldResult, Study
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.tested import Tested
from thinsection.predict.training import FitConfig
from thinsection.predict.tripod import checklist
from thinsection.probe.result import METRIC_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewSettings:
    """Settings of the training that the page tells."""

    head: HeadConfig
    fit: FitConfig
    fold_unit: FoldUnit
    repeats: int
    splits: Path | None
    grid: tuple[str, ...]


def review(
    study: Study,
    contents: Contents,
    tested: Tested,
    results: Sequence[FoldResult],
    settings: ReviewSettings,
) -> dict[str, Any]:
    """Table 1, methods, repeats, sites, subgroups, permuted labels and the checklist."""
    cohort = study.cohort
    seed = settings.fit.seed
    table = table_one(cohort, contents.num_tiles.tolist())
    by_column = {
        column: dict(zip(cohort.cases, labels, strict=True))
        for column, labels in zip(
            cohort.subgroup_columns, cohort.subgroups, strict=True
        )
    }
    if cohort.sites:
        by_column = {"site": dict(zip(cohort.cases, cohort.sites))} | by_column
    tables = [
        {"column": column, "rows": subgroup_rows(tested, label_by_case, seed=seed)}
        for column, label_by_case in by_column.items()
    ]
    methods = _methods(study, tested, results, settings)
    found: dict[str, Any] = {
        "table_one": asdict(table),
        "methods": methods,
        "repeats": _repeat_rows(study, tested),
        "subgroups": tables,
        "permuted": _permuted_labels(study, contents, seed),
        "sites": _sites(study, contents, seed),
    }
    answers = _answers(study, tested, settings, dict(methods), found)
    found["checklist"] = [item._asdict() for item in checklist(answers)]
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as experiment.json holds it
    return plain


def subgroup_rows(
    tested: Tested, label_by_case: dict[str, str], *, seed: int
) -> list[dict[str, Any]]:
    """Score and interval of each subgroup's cases, or why there is no number."""
    labels = np.array([label_by_case[case] for case in tested.cases])
    rows = []
    for label in np.unique(labels):
        part = tested.take(np.flatnonzero(labels == label))
        row: dict[str, Any] = {
            "subgroup": str(label),
            "cases": len(set(part.cases)),
            "value": None,
            "low": None,
            "high": None,
            "missing": intervals.why_missing(part.sampling),
        }
        rows.append(row)
        if row["missing"]:
            continue
        try:
            scorer = part.scorers[tested.metric]
        except InvalidInputError as error:  # no comparable pair
            row["missing"] = str(error)
            continue
        value = metrics.all_scores({tested.metric: scorer}, len(part.cases))
        found = intervals.interval(part.sampling, scorer, tested.metric, seed=seed)
        row["missing"] = found.missing
        if not found.missing:
            row["value"] = value[tested.metric]
            row["low"] = found.low
            row["high"] = found.high
    return rows


def _repeat_rows(study: Study, tested: Tested) -> list[dict[str, Any]]:
    """The score of each drawing of the folds; none where folds are drawn once."""
    repeat_of_fold = np.array([part.repeat for part in study.parts])
    repeats = np.unique(repeat_of_fold)
    if len(repeats) < 2:
        return []
    rows = []
    for repeat in repeats.tolist():
        part = tested.take(np.flatnonzero(repeat_of_fold[tested.fold] == repeat))
        value = metrics.all_scores(part.scorers, len(part.cases))[tested.metric]
        rows.append({"repeat": repeat + 1, "cases": len(part.cases), "value": value})
    return rows


def _case_means(study: Study, contents: Contents) -> npt.NDArray[np.float64]:
    counts = [len(slides) for slides in study.cohort.slides]
    return contents.case_means(np.repeat(np.arange(len(counts)), counts))


def _permuted_labels(study: Study, contents: Contents, seed: int) -> dict[str, Any]:
    """Scores of a linear head on mean embeddings, labels as they are and permuted."""
    cohort = study.cohort
    if not (cohort.target.exclusive or cohort.target.kind == "regression"):
        return {"missing": f"not computed for {cohort.target.kind} targets"}
    folds = [
        (np.array((*part.train, *part.stop)), np.array(part.test))
        for part in study.parts
    ]
    found = permuted_labels(
        _case_means(study, contents),
        cohort.array[:, 0],
        len(cohort.target.names) if cohort.target.exclusive else 0,
        folds,
        cohort.groups.codes,
        seed=seed,
    )
    return {"missing": "", **_named(asdict(found))}


def _sites(study: Study, contents: Contents, seed: int) -> dict[str, Any]:
    """The probe of the site, or why there is none."""
    cohort = study.cohort
    if not cohort.sites:
        missing = "nobody knows the sites; name their column with --site COLUMN"
        return {"missing": missing}
    means = _case_means(study, contents)
    found = site_probe(means, cohort.sites, cohort.groups.codes, seed=seed)
    if found is None:
        return {"missing": f"fewer than two sites have {MIN_OF_SITE} cases"}
    bounds = found.interval
    return {
        "missing": "",
        "sites": found.sites,
        "cases": found.cases,
        "left_out": found.left_out,
        "chance": 1 / found.sites,
        "low": None if bounds.missing else bounds.low,
        "high": None if bounds.missing else bounds.high,
        "permuted": _named(asdict(found.permuted)),
        "how": (
            f"multinomial logistic regression on {SITE_COMPONENTS} principal components of "
            f"mean embeddings, {SITE_FOLDS} folds of patients"
        ),
    }


def _named(permuted: dict[str, Any]) -> dict[str, Any]:
    name = permuted["metric"]
    return permuted | {"metric": METRIC_WORDS.get(name, name)}


def _methods(
    study: Study,
    tested: Tested,
    results: Sequence[FoldResult],
    settings: ReviewSettings,
) -> list[tuple[str, str]]:
    """How it was done: a heading and a sentence each."""
    grid = ", ".join(settings.grid) or "none was tried: one setting"
    epochs = ", ".join(str(result.best) for result in results)
    inner = [len(part.stop) for part in study.parts]
    return [
        ("folds", _fold_words(study, settings)),
        ("seed", f"{settings.fit.seed}, of folds, order, tiles, weights and resamples"),
        (
            "confidence intervals",
            f"95 %, {intervals.DRAWS} Bayesian bootstrap resamples of "
            f"{tested.sampling.units} cases",
        ),
        (
            "chosen on inner cases",
            f"epoch of each fold ({epochs}), settings ({grid}) and temperature, on "
            f"{min(inner)} to {max(inner)} inner cases a fold; never on test cases",
        ),
    ]


def _fold_words(study: Study, settings: ReviewSettings) -> str:
    if settings.splits is not None:
        return f"{len(study.parts)} folds as in {settings.splits.name}"
    unit = {
        "case": "stratified, patients kept whole",
        "site": "stratified, sites kept whole: no site trains and is tested",
        "each-site": "each site is tested by a model of the other sites",
    }[settings.fold_unit]
    times = f", drawn {settings.repeats} times" if settings.repeats > 1 else ""
    count = len(study.parts) // settings.repeats
    return f"{count} folds, {unit}{times}"


def _answers(
    study: Study,
    tested: Tested,
    settings: ReviewSettings,
    methods: dict[str, str],
    found: dict[str, Any],
) -> dict[str, str]:
    """What the software knows of the items of TRIPOD+AI."""
    cohort = study.cohort
    target = ", ".join(cohort.target.columns)
    shown = ", ".join(METRIC_WORDS.get(name, name) for name in tested.scorers)
    counts = f"{len(cohort.cases)} cases, {sum(map(len, cohort.slides))} slides"
    sites = f"{len(set(cohort.sites))} sites" if cohort.sites else ""
    weighted = "rare classes weigh more" if settings.fit.class_weights else "no weights"
    tables = [table["column"] for table in found["subgroups"]]
    answers = {
        "4": "development with internal validation by cross-validation",
        "6a": sites and f"{sites}; setting and location: to be filled by the authors",
        "7": "; ".join(cohort.account),
        "9b": f"embeddings of whole-slide images: {cohort.place}",
        "10": f"{counts}; justification: to be filled by the authors",
        "11": (
            f"{cohort.unlabelled} rows without a label and {cohort.without_embeddings} without "
            "embeddings are not used; nothing is imputed"
        ),
        "12a": methods["folds"],
        "12c": (
            f"head {settings.head.head}; {methods['chosen on inner cases']}; all settings "
            "stand on this page"
        ),
        "12e": f"{shown}; {methods['confidence intervals']}",
        "12f": "none",
        "12g": "mean of the predicted probabilities of the folds' models (model.safetensors)",
        "13": weighted if cohort.target.exclusive else "",
        "15": f"{cohort.target.kind}: {', '.join(cohort.target.names)}",
        "18f": "made with Thinsection, which is open source; versions are in experiment.json",
        "20a": f"{counts}; see Table 1 and the account above it",
        "20b": "Table 1; characteristics of participants: to be filled by the authors",
        "21": f"{target}: {counts} in cross-validation, see Folds",
        "22": "model.safetensors holds all weights and settings",
        "23a": "Scores" + (f"; by {', '.join(tables)}" if tables else ""),
        "12d": "scores by site and a probe of the site" if cohort.sites else "",
        "23b": "Scores by site" if cohort.sites else "",
    }
    return {number: answer for number, answer in answers.items() if answer}
